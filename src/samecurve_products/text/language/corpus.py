"""Text files -> a file of token ids for each split, made once and mapped by every rank.

A token file is found again by the files and the tokenizer from which it was made.
"""

import hashlib
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, get_args

import numpy as np
from numpy.typing import NDArray

from samecurve.core.system.cache import CHECKED, check_once
from samecurve.errors import Refusals
from samecurve.seam import (
    UserError,
    cache_entry,
    cache_key,
    counted,
    show_bytes,
    show_count,
    stamp_file,
    write_json,
)
from samecurve_products.text.language import LanguageData
from samecurve_products.text_files import (
    PACKED,
    Role,
    SourceSplits,
    batches_of,
    check_is_text,
    check_split_is_somewhere,
    check_whole_tokens,
    files_of_source,
    has_suffix,
    id_blocks,
    no_files,
    passed_over,
    paths_by_split,
    use_splits,
)
from samecurve_products.text_files.tokenizer import (
    PROBED,
    ByteTokenizer,
    LibraryTokenizer,
    Tokenizer,
    train_bpe,
)

_BLOCK = 1 << 22  # bytes of text tokenized at once
_FORMAT = 2  # of the cache
_RAW = ".bin"
_LINES = (".jsonl", ".ndjson")
_TABLES = (".parquet", ".pq", ".arrow")
_KEYS = {"num_tokens": "count", "vocab_size": "size", "largest_id": "top"}  # field: key in a file


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """A token file and its properties."""

    path: str
    dtype: str
    num_tokens: int
    vocab_size: int  # of the tokenizer; 0: a .bin file without one
    largest_id: int
    sha256: str  # of the ids
    entropy: float  # of single tokens, in nats: the loss of a model that knows only frequencies
    text_bytes: int  # before tokenizing
    tokenizer: str  # "bytes", or the path of a tokenizer.json

    def decoder(self) -> Tokenizer:
        if self.tokenizer == "bytes":
            return ByteTokenizer()
        return LibraryTokenizer(Path(self.tokenizer))

    def write(self, file: Path) -> None:
        write_json(file, {_KEYS.get(name, name): value for name, value in asdict(self).items()})

    @staticmethod
    def read(file: Path) -> "Corpus":
        values = json.loads(file.read_text())
        names = (field.name for field in fields(Corpus))
        return Corpus(**{name: values[_KEYS.get(name, name)] for name in names})


@dataclass(frozen=True)
class Corpora:
    """The text of a data section, split by split.

    validation, test: None where no source has a split of that name. lines: for the user.
    """

    train: Corpus
    validation: Corpus | None = None
    test: Corpus | None = None
    lines: tuple[str, ...] = ()

    @property
    def held_out(self) -> tuple[Corpus, ...]:
        return tuple(corpus for corpus in (self.validation, self.test) if corpus is not None)


def prepare_corpora(data: LanguageData, cache: Path) -> Corpora:
    """The token files of a data section, from the cache if its files have not changed.

    The tokenizer of the training text serves the other splits.
    UserError: missing, empty or unfit input.
    """
    if _is_raw(data):
        return Corpora(_read_raw_tokens(data, cache))
    files, lines = _files_by_role(data)
    train = _read_text(files["train"], data.tokenizer, cache)
    others = {
        role: _read_text(files[role], train.tokenizer, cache) for role in files if role != "train"
    }
    return Corpora(train, others.get("validation"), others.get("test"), tuple(lines))


def _read_text(files: list[Path], tokenizer: str, cache: Path) -> Corpus:
    """The tokens of text files. tokenizer: as data.tokenizer names it."""
    identity = {
        "files": [stamp_file(file) for file in files],
        "format": _FORMAT,
        "tokenizer": _tokenizer_stamp(tokenizer),
    }
    home = cache / "corpus" / cache_key(identity)

    def make(scratch: Path) -> None:
        _tokenize(files, tokenizer, home, scratch).write(scratch / "corpus.json")
        (scratch / CHECKED).touch()

    def check() -> None:
        for file in files:
            _text(file)

    cache_entry(home, make, say=_say)
    check_once(home, check)
    corpus = replace(Corpus.read(home / "corpus.json"), path=str(home / "tokens.bin"))
    trained_tokenizer = home / "tokenizer.json"
    if trained_tokenizer.exists():
        return replace(corpus, tokenizer=str(trained_tokenizer))
    return corpus


def _say(line: str) -> None:
    from samecurve.seam import show_progress

    show_progress(line)


def stamp_corpus(data: LanguageData) -> object:
    """Names, sizes and times of the files from which the corpus is made.

    UserError: a source can't be read; where the tokenizer isn't there either, that is said too.
    """
    if _is_raw(data):
        raw = [_existing(source) for source in data.sources if source.endswith(_RAW)]
        return [*(stamp_file(file) for file in raw), _tokenizer_stamp(data.tokenizer)]
    refusals = Refusals()
    with refusals.collected():
        files, _ = _files_by_role(data)
    if refusals:
        with refusals.collected():
            if data.tokenizer != "bytes" and not data.tokenizer.startswith("bpe:"):
                LibraryTokenizer(Path(data.tokenizer))
        refusals.raise_any()
    held_out = [[role, *map(stamp_file, files[role])] for role in files if role != "train"]
    return [
        *(stamp_file(file) for file in files["train"]),
        *held_out,
        _tokenizer_stamp(data.tokenizer),
    ]


def lines_about(data: LanguageData, corpora: Corpora) -> list[str]:
    """Lines for the user: what was read of the sources, and which files were passed over."""
    train = corpora.train
    if _is_raw(data):
        return [f"{train.path}: {show_count(train.num_tokens)} token ids of {train.dtype}"]
    files, _ = _files_by_role(data)
    lines = [
        f"{counted(len(files['train']), 'file')} to train on, {show_bytes(train.text_bytes)} of"
        f" text: {show_count(train.num_tokens)} tokens of {show_count(train.vocab_size)} kinds"
    ]
    read = [file for of_role in files.values() for file in of_role]
    return [*lines, *passed_over(data.sources, read)]


def _is_raw(data: LanguageData) -> bool:
    return any(source.endswith(_RAW) for source in data.sources)


def _files_by_role(data: LanguageData) -> tuple[dict[Role, list[Path]], list[str]]:
    """The text files of all sources by what they are used for, each once; lines for the user.

    UserError: a source has none, or a file is not text.
    """
    splits = [_splits_of_text(source, data.split) for source in data.sources]
    check_split_is_somewhere(splits, data.split)
    files: dict[Role, list[Path]] = {}
    for role in get_args(Role):
        named = [file for split in splits for file in split.files.get(role, ())]
        if named or role == "train":
            files[role] = list(dict.fromkeys(file.resolve() for file in named))
            for file in named:
                _check_is_text(file)
    return files, [split.line for split in splits if split.line]


def _splits_of_text(source: str, split: str) -> SourceSplits[Path]:
    """The text files of a source by what they are used for. UserError: it has none."""
    by_split = paths_by_split(source, split, _LINES)
    if set(by_split) == {None}:  # without splits, what lies beside files of rows is text too
        by_split = {None: files_of_source(source)}
    if not any(by_split.values()) and not Path(source).expanduser().is_dir():
        raise no_files(source, "text files, globs or directories; python-stdlib; or one .bin file")
    return use_splits(by_split, split, source)


def _check_is_text(file: Path) -> None:
    """UserError: a file's name says that its bytes are no text."""
    remedies = {
        (_RAW,): "token ids are read from one .bin file alone: data.source: FILE.bin",
        PACKED: "unpack it first",
        _TABLES: "task: huggingface reads such files; for this one, write the text to a file",
    }
    for suffixes, remedy in remedies.items():
        if has_suffix(file, suffixes):
            raise UserError(
                f"{file} is no text",
                f"{remedy}; or a glob that names only files of text",
                "data.source",
            )


def _existing(source: str) -> Path:
    """UserError: there is no such file."""
    path = Path(source).expanduser()
    if not path.is_file():
        raise UserError(
            f"there is no data file {path}",
            "check the path given with -d or data.source",
            "data.source",
        )
    return path


def _tokenizer_stamp(tokenizer: str) -> Any:
    if tokenizer.endswith(".json") and Path(tokenizer).is_file():
        return stamp_file(Path(tokenizer))
    return tokenizer


def _texts(files: list[Path]) -> Iterator[list[bytes]]:
    """The files' bytes, several at a time. UserError: a file is no text."""
    return batches_of(map(_text, files), len, least=_BLOCK)


def _text(file: Path) -> bytes:
    content = file.read_bytes()
    check_is_text(content, file)
    return content


def _tokenize(files: list[Path], name: str, home: Path, scratch: Path) -> Corpus:
    """Write the tokens of text files. name: of the tokenizer. home: where scratch will lie."""
    text_bytes = sum(file.stat().st_size for file in files)
    if not text_bytes:
        named = str(files[0]) if len(files) == 1 else counted(len(files), "file")
        raise UserError(
            f"the corpus is empty: {named}, 0 bytes",
            "a data.source with text in it",
            "data.source",
        )
    tokenizer: Tokenizer
    if name == "bytes":
        tokenizer = ByteTokenizer()
    elif name.startswith("bpe:"):
        train_bpe(
            int(name[4:]),
            (text.decode() for block in _texts(files) for text in block),
            scratch / "tokenizer.json",
        )
        tokenizer, name = LibraryTokenizer(scratch / "tokenizer.json"), str(home / "tokenizer.json")
    else:
        tokenizer = LibraryTokenizer(Path(name))
        sample = b"".join(next(_texts(files), []))[:PROBED]
        tokenizer.check_coverage(sample.decode("utf-8", "ignore"))
    dtype = np.min_scalar_type(max(0, tokenizer.size - 1)).name
    tally = _Tally()
    with open(scratch / "tokens.bin", "wb") as out:
        for block in _texts(files):
            ids = tokenizer.encode_bytes(block).astype(dtype)
            tally.add(ids)
            out.write(ids.tobytes())
    return tally.corpus(
        path=home / "tokens.bin",
        dtype=dtype,
        vocab_size=tokenizer.size,
        text_bytes=text_bytes,
        tokenizer=name,
    )


def _read_raw_tokens(data: LanguageData, cache: Path) -> Corpus:
    """A .bin file as a corpus; the file is read once for its largest id, hash and entropy."""
    if len(data.sources) > 1:
        raise UserError(
            f"{len(data.sources)} data sources of which one is a .bin file",
            "one .bin file alone, or text",
            "data.source",
        )
    path = _existing(data.sources[0]).resolve()
    check_whole_tokens(path, data.token_dtype)
    note = cache / "raw" / f"{cache_key([stamp_file(path), data.token_dtype])}.json"
    try:
        corpus = Corpus.read(note)
    except (OSError, ValueError, KeyError, TypeError):  # not there, or damaged
        tally, size = _Tally(), path.stat().st_size
        for ids in id_blocks(path, data.token_dtype):
            tally.add(ids)
        corpus = tally.corpus(
            path=path, dtype=data.token_dtype, vocab_size=0, text_bytes=size, tokenizer="bytes"
        )
        note.parent.mkdir(parents=True, exist_ok=True)
        corpus.write(note)
    if not data.tokenizer.endswith(".json"):
        return corpus
    tokenizer = LibraryTokenizer(Path(data.tokenizer))
    return replace(corpus, vocab_size=tokenizer.size, tokenizer=data.tokenizer)


class _Tally:
    """Count, largest id, hash and frequencies, in one pass."""

    def __init__(self) -> None:
        self._hash = hashlib.sha256()
        self._counts = np.zeros(0, dtype=np.int64)
        self._num_tokens = self._largest_id = 0

    def add(self, ids: NDArray[Any]) -> None:
        self._hash.update(np.ascontiguousarray(ids).astype("<u4").tobytes())
        self._num_tokens += len(ids)
        if not len(ids):
            return
        self._largest_id = max(self._largest_id, int(ids.max()))
        # ids beyond are refused by the vocabulary anyhow
        counts = np.bincount(ids[ids < 1 << 20].astype(np.int64))
        if len(counts) > len(self._counts):
            self._counts = np.pad(self._counts, (0, len(counts) - len(self._counts)))
        self._counts[: len(counts)] += counts

    def corpus(
        self, *, path: Path, dtype: str, vocab_size: int, text_bytes: int, tokenizer: str
    ) -> Corpus:
        shares = self._counts[self._counts > 0] / max(1, self._num_tokens)
        return Corpus(
            path=str(path),
            dtype=dtype,
            num_tokens=self._num_tokens,
            vocab_size=vocab_size,
            largest_id=self._largest_id,
            sha256=self._hash.hexdigest(),
            entropy=float(-(shares * np.log(shares)).sum()),
            text_bytes=text_bytes,
            tokenizer=tokenizer,
        )
