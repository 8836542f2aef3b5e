"""Make or read the tokenizer of a config, and keep it in the cache (see text_tokenizer.py).

It is bytes, a BPE that is trained here, a tokenizer.json, or that of a model's directory.
"""

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, replace
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Any

from samecurve.seam import (
    UserError,
    cache_entry,
    cache_key,
    install_command,
    show_progress,
    stamp_file,
)
from samecurve_products.text.huggingface.data.text_tokenizer import (
    END,
    MASK,
    NOTES,
    PAD,
    TOKENIZER,
    TextTokenizer,
    TokenizerNotes,
    read_notes,
)
from samecurve_products.text.huggingface.model_directory import check_directory
from samecurve_products.text.huggingface.sections import HFData
from samecurve_products.text_files.tokenizer import PROBED, LibraryTokenizer, train_bpe

_CONFIG, _SPECIAL, _TEMPLATE = (
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
)
_FILES = (
    "tokenizer*", "special_tokens_map.json", "added_tokens.json", "chat_template*", "vocab*",
    "merges*", "*.model", "config.json",
)  # fmt: skip
# classes for which tokenizer.json is enough
_AS_IT_IS = (None, "PreTrainedTokenizerFast", "TokenizersBackend")
_FORMAT = 2  # of the cache


def keep_tokenizer(
    data: HFData,
    model: Path | None,
    cache: Path,
    *,
    content: str,
    texts: Callable[[], Iterable[str]],
    for_encoder: bool = False,
    ends: bool = True,
) -> TextTokenizer:
    """The tokenizer of a data section, from the cache if it is there.

    model: the model's directory. content: a hash of what the sources hold. texts: returns their
    texts. for_encoder: a BPE that is trained here gets tokens for masks and padding. ends: the
    end-of-text token follows each text.
    UserError: there is no such tokenizer, it can't be read, or it does not know the text.
    """
    place = data.tokenizer or (str(model) if model else "")
    if not place:
        raise UserError(
            "no tokenizer: the model is made from its fields, and has no directory that holds one",
            "data.tokenizer=bytes, bpe:8000, or the path of a tokenizer.json",
            "data.tokenizer",
        )
    template = _read_template(data)
    if place == "bytes" or place.startswith("bpe:"):
        identity: list[Any] = [place, template, content if place != "bytes" else ""]
    else:
        if model and not data.tokenizer:
            check_directory(model)
        identity = [_digest_files(Path(place).expanduser()), template]
    special = {"eos_token": END}
    if for_encoder and place.startswith("bpe:"):
        special |= {"pad_token": PAD, "mask_token": MASK}
        identity.append(special)
    identity += [] if ends or place == "bytes" else ["no end"]
    home = cache / "tokenizers" / cache_key([_FORMAT, *identity])
    make = partial(_make, place, template, texts, special=special, ends=ends)
    return TextTokenizer(cache_entry(home, make, say=show_progress))


def stamp_tokenizer(data: HFData, model: Path | None) -> object:
    """Names, sizes and times of the files that the tokenizer comes from."""
    paths = [Path(data.chat_template).expanduser()] if data.chat_template else []
    place = data.tokenizer or (str(model) if model else "")
    if place and place != "bytes" and not place.startswith("bpe:"):
        paths += _files_of(Path(place).expanduser())
    return [stamp_file(path) for path in paths if path.is_file()]


def _make(
    place: str,
    template: str | None,
    texts: Callable[[], Iterable[str]],
    scratch: Path,
    *,
    special: Mapping[str, str],
    ends: bool,
) -> None:
    """Make the files of a tokenizer. special: tokens of a BPE that is trained here."""
    if place == "bytes":
        notes = TokenizerNotes("bytes", chat_template=template)
    elif place.startswith("bpe:"):
        train_bpe(int(place[4:]), texts(), scratch / TOKENIZER, list(special.values()))
        notes = TokenizerNotes(place, special, template, ends)
    else:
        path = Path(place).expanduser()
        content, notes = _read_tokenizer(path)
        began_before = (path / NOTES).is_file() and "ends" not in _json(path / NOTES)
        notes = replace(notes, ends=ends or began_before)
        if template is not None:
            notes = replace(notes, chat_template=template)
        if content is not None:
            (scratch / TOKENIZER).write_text(content)
            sample = "".join(islice(chain.from_iterable(texts()), PROBED))
            LibraryTokenizer(scratch / TOKENIZER, place).check_coverage(sample)
    (scratch / NOTES).write_text(json.dumps(asdict(notes), indent=1))


def _read_template(data: HFData) -> str | None:
    if data.chat_template is None:
        return None
    try:
        return Path(data.chat_template).expanduser().read_text()
    except OSError as error:
        raise UserError(
            f"the chat template {data.chat_template} can't be read: {error.strerror}",
            "the path of a Jinja file, or leave data.chat_template out",
            "data.chat_template",
        ) from None


def _files_of(place: Path) -> list[Path]:
    """The files that a tokenizer is read from."""
    if place.is_file():
        if place.name != TOKENIZER:
            return [place]
        place = place.parent
    return sorted({path for pattern in _FILES for path in place.glob(pattern) if path.is_file()})


def has_tokenizer(place: Path) -> bool:
    """Whether a directory, or a file, holds a tokenizer."""
    return any(path.name != "config.json" for path in _files_of(place))


def check_tokenizer_files(data: HFData) -> None:
    """UserError: the place that data.tokenizer names has no tokenizer."""
    if data.tokenizer and data.tokenizer != "bytes" and not data.tokenizer.startswith("bpe:"):
        _check_tokenizer_in(Path(data.tokenizer).expanduser())


def _check_tokenizer_in(place: Path) -> None:
    if not has_tokenizer(place):
        raise UserError(
            f"there is no tokenizer in {place}" if place.is_dir() else f"there is no {place}",
            "data.tokenizer=bytes, bpe:8000, or the path of a tokenizer.json or of a directory"
            " with one",
            "data.tokenizer",
        )


def _digest_files(place: Path) -> str:
    """A hash of a tokenizer's files. UserError: there are none."""
    _check_tokenizer_in(place)
    digest = hashlib.sha256()
    for path in _files_of(place):
        digest.update(f"{path.name}/{path.stat().st_size}/".encode() + path.read_bytes())
    return digest.hexdigest()


def _read_tokenizer(place: Path) -> tuple[str | None, TokenizerNotes]:
    """Read tokenizer.json (None: tokens are bytes) and notes. UserError: it can't be read."""
    home = place
    if (place / NOTES).is_file():  # a directory that a run keeps
        notes = read_notes(place / NOTES)
        return _checked(place / TOKENIZER) if (place / TOKENIZER).is_file() else None, notes
    if place.is_file():
        if place.name != TOKENIZER:
            return _checked(place), TokenizerNotes(str(place))
        home = place.parent
    config = _json(home / _CONFIG)
    if (home / TOKENIZER).is_file() and config.get("tokenizer_class") in _AS_IT_IS:
        names = _token_names({**_json(home / _SPECIAL), **config})
        template = _default_of(config.get("chat_template"))
        if (home / _TEMPLATE).is_file():
            template = (home / _TEMPLATE).read_text()
        return _checked(home / TOKENIZER), TokenizerNotes(str(place), names, template)
    return _through_transformers(home)


def _checked(path: Path) -> str:
    """The content of a tokenizer.json. UserError: the file is no tokenizer.json."""
    LibraryTokenizer(path)
    return path.read_text()


def _through_transformers(home: Path) -> tuple[str, TokenizerNotes]:
    """Read the tokenizer by the transformers class that the directory names."""
    try:
        from transformers import AutoTokenizer
    except ImportError:
        raise UserError(
            f"the tokenizer in {home} needs transformers: not installed",
            install_command("hf"),
            "data.tokenizer",
        ) from None
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            str(home), local_files_only=True, trust_remote_code=False
        )
    except Exception as error:  # tokenizer classes raise any kind
        raise UserError(
            f"the tokenizer in {home} can't be loaded: {type(error).__name__}: {error}",
            "a directory as save_pretrained writes it",
            "data.tokenizer",
        ) from None
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise UserError(
            f"the tokenizer in {home} ({type(tokenizer).__name__}) has no fast form",
            "convert it to a tokenizer.json, and name that",
            "data.tokenizer",
        )
    names = _token_names(tokenizer.special_tokens_map)
    template = _default_of(tokenizer.chat_template)
    return backend.to_str(), TokenizerNotes(str(home), names, template)


def _token_names(values: Mapping[str, Any]) -> dict[str, str]:
    """The special tokens of a tokenizer's config: bos_token, eos_token and others."""
    names = {}
    for name, value in values.items():
        token = value.get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and token is not None and not isinstance(token, bool):
            names[name] = str(token)
    return names


def _default_of(template: Any) -> str | None:
    """The chat template named default, if there are several."""
    if isinstance(template, list):
        named = [item for item in template if isinstance(item, dict)]
        template = {item.get("name"): item.get("template") for item in named}
    if isinstance(template, dict):
        template = template.get("default")
    return None if template is None else str(template)


def _json(path: Path) -> dict[str, Any]:
    """The object in a JSON file; {}: there is no such file."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text())
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is no JSON: {error}", "copy it again", "data.tokenizer") from None
    return value if isinstance(value, dict) else {}
