"""Text files -> one token file, made once, mapped by every rank and found again by what it was made
from.
"""

import glob
import hashlib
import json
import os
import shutil
import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from samecurve.errors import UserError
from samecurve.tasks.language.sections import LanguageData
from samecurve.tasks.language.tokenizer import Bytes, Library, Tokenizer, train_bpe

_BLOCK = 1 << 22  # bytes of text tokenized at once
_FORMAT = 2  # of the cache
_PROBED = 1 << 18  # bytes of text on which a foreign tokenizer is tried
_LEAST_KNOWN = 0.99


@dataclass(frozen=True)
class Corpus:
    """path: token file of `count` ids of `dtype`.

    size: of the tokenizer (0: none, a .bin file). top: largest id. sha256: of the ids. entropy: of
    single tokens, in nats: what a model that knows only their frequencies would lose. text_bytes:
    before tokenizing.
    """

    path: str
    dtype: str
    count: int
    size: int
    top: int
    sha256: str
    entropy: float
    text_bytes: int
    tokenizer: str

    def decoder(self) -> Tokenizer:
        return Bytes() if self.tokenizer == "bytes" else Library(Path(self.tokenizer))


def prepare(data: LanguageData, cache: Path) -> Corpus:
    """The token file of a data section, from the cache if its files have not changed.

    UserError: missing, empty or unfit input.
    """
    if [source for source in data.sources if source.endswith(".bin")]:
        return _raw(data, cache)
    files = _files(data.sources)
    key = _key(
        {
            "files": [_stamp(file) for file in files],
            "tokenizer": _tokenizer_stamp(data.tokenizer),
            "format": _FORMAT,
        }
    )
    home = cache / "corpus" / key
    if not (home / "corpus.json").exists():
        _publish(home, lambda scratch: _tokenize(data, files, home, scratch))
    found = Corpus(
        **{**json.loads((home / "corpus.json").read_text()), "path": str(home / "tokens.bin")}
    )
    if os.path.getsize(found.path) != found.count * np.dtype(found.dtype).itemsize:
        raise UserError(
            f"the token file {found.path} has been cut off",
            f"remove {home}: it is made anew",
            "data",
        )
    made_here = home / "tokenizer.json"
    return replace(found, tokenizer=str(made_here)) if made_here.exists() else found


def stamp(data: LanguageData) -> object:
    """Names, sizes and times of what the corpus is made from."""
    files = [
        Path(source).expanduser() for source in data.sources if source.endswith(".bin")
    ] or _files(data.sources)
    missing = [file for file in files if not file.is_file()]
    if missing:
        raise UserError(
            f"there is no data file {missing[0]}",
            "check the path given with -d or data.source",
            "data.source",
        )
    return [*(_stamp(file) for file in files), _tokenizer_stamp(data.tokenizer)]


def _files(sources: tuple[str, ...]) -> list[Path]:
    found: list[Path] = []
    for source in sources:
        if source == "python-stdlib":
            found += _standard_library()
            continue
        path = Path(source).expanduser()
        if path.is_dir():
            found += _below(path)
        elif path.is_file():
            found.append(path)
        else:
            matches = sorted(
                Path(match)
                for match in glob.glob(str(path), recursive=True)
                if os.path.isfile(match)
            )
            if not matches:
                raise UserError(
                    f"data source {source}: no such file, directory or match",
                    "text files, globs or directories; python-stdlib; or one .bin file",
                    "data.source",
                )
            found += matches
    return list(dict.fromkeys(file.resolve() for file in found))


def _below(root: Path) -> list[Path]:
    """A directory's files, hidden ones and run directories left out (a run that reads what it
    writes could never be resumed).
    """
    found: list[Path] = []
    for folder, below, files in os.walk(root):
        below[:] = [
            name
            for name in below
            if not name.startswith(".")
            and not (
                Path(folder, name, "plan.json").exists()
                and Path(folder, name, "checkpoints").exists()
            )
        ]
        found += [Path(folder, name) for name in files if not name.startswith(".")]
    return sorted(found)


def _standard_library() -> list[Path]:
    """The sorted .py files of this Python's standard library, without its tests: real text that
    needs no download.
    """
    out = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__", "lib2to3"}
    found: list[Path] = []
    for folder, below, files in os.walk(sysconfig.get_path("stdlib")):
        below[:] = [name for name in below if name not in out]
        found += [Path(folder, name) for name in files if name.endswith(".py")]
    return sorted(found)


def _stamp(file: Path) -> list[Any]:
    status = file.stat()
    return [str(file), status.st_size, status.st_mtime_ns]


def _tokenizer_stamp(tokenizer: str) -> Any:
    return (
        _stamp(Path(tokenizer))
        if tokenizer.endswith(".json") and Path(tokenizer).is_file()
        else tokenizer
    )


def _key(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:24]


def _publish(home: Path, make: Callable[[Path], Corpus]) -> None:
    """Make a cache entry beside its place and rename it there, so that two runs at once, or a kill,
    leave it whole or absent.
    """
    home.parent.mkdir(parents=True, exist_ok=True)
    scratch = home.with_name(f"{home.name}.{os.getpid()}")
    scratch.mkdir(exist_ok=True)
    try:
        (scratch / "corpus.json").write_text(json.dumps(asdict(make(scratch))))
        try:
            scratch.rename(home)
        except OSError:
            if not home.is_dir():
                raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _texts(files: list[Path]) -> Iterator[list[bytes]]:
    """The files' bytes, several at a time."""
    block: list[bytes] = []
    size = 0
    for file in files:
        block.append(file.read_bytes())
        size += len(block[-1])
        if size >= _BLOCK:
            yield block
            block, size = [], 0
    if block:
        yield block


def _tokenize(data: LanguageData, files: list[Path], home: Path, scratch: Path) -> Corpus:
    text_bytes = sum(file.stat().st_size for file in files)
    if not text_bytes:
        raise UserError(
            f"the corpus is empty: {len(files)} files, 0 bytes",
            "a data.source with text in it",
            "data.source",
        )
    tokenizer: Tokenizer
    name = data.tokenizer
    if name == "bytes":
        tokenizer = Bytes()
    elif name.startswith("bpe:"):
        train_bpe(
            int(name[4:]),
            (text.decode("utf-8", "replace") for block in _texts(files) for text in block),
            scratch / "tokenizer.json",
        )
        tokenizer, name = Library(scratch / "tokenizer.json"), str(home / "tokenizer.json")
    else:
        tokenizer = Library(Path(name))
        sample = b"".join(next(_texts(files), []))[:_PROBED].decode("utf-8", "ignore")
        known = tokenizer.coverage(sample)
        if known < _LEAST_KNOWN:
            raise UserError(
                f"{name} knows {known:.1%} of the text's characters and would leave the rest out",
                "a tokenizer made for such text (bpe:N makes one)",
                "data.tokenizer",
            )
    dtype = (
        np.uint8 if tokenizer.size <= 256 else np.uint16 if tokenizer.size <= 65536 else np.uint32
    )
    tally = _Tally()
    with open(scratch / "tokens.bin", "wb") as out:
        for block in _texts(files):
            ids = tokenizer.encode(block).astype(dtype)
            tally.add(ids)
            out.write(ids.tobytes())
    return tally.corpus(
        str(home / "tokens.bin"), np.dtype(dtype).name, tokenizer.size, text_bytes, name
    )


def _raw(data: LanguageData, cache: Path) -> Corpus:
    """A .bin file as it is, read once for its largest id, its hash and its entropy."""
    if len(data.sources) > 1:
        raise UserError(
            f"{len(data.sources)} data sources of which one is a .bin file",
            "one .bin file alone, or text",
            "data.source",
        )
    path = Path(data.sources[0]).expanduser()
    if not path.is_file():
        raise UserError(
            f"there is no data file {path}",
            "check the path given with -d or data.source",
            "data.source",
        )
    path = path.resolve()
    width = np.dtype(data.token_dtype).itemsize
    size = path.stat().st_size
    if size % width:
        remedy = (
            "--set data.token_dtype=uint16, if that is what it holds"
            if size % 2 == 0
            else "was it copied whole?"
        )
        raise UserError(
            f"{path} has {size} bytes, which are no whole number of {data.token_dtype} tokens",
            remedy,
            "data.token_dtype",
        )
    tokenizer = Library(Path(data.tokenizer)) if data.tokenizer.endswith(".json") else None
    note = cache / "raw" / f"{_key([_stamp(path), data.token_dtype])}.json"
    if not note.exists():
        tally = _Tally()
        ids: NDArray[Any] = (
            np.memmap(path, dtype=data.token_dtype, mode="r")
            if size
            else np.zeros(0, data.token_dtype)
        )
        for first in range(0, len(ids), _BLOCK):
            tally.add(np.asarray(ids[first : first + _BLOCK]))
        note.parent.mkdir(parents=True, exist_ok=True)
        scratch = note.with_suffix(f".{os.getpid()}")
        scratch.write_text(
            json.dumps(asdict(tally.corpus(str(path), data.token_dtype, 0, size, "bytes")))
        )
        scratch.replace(note)
    found = Corpus(**json.loads(note.read_text()))
    return replace(
        found,
        size=tokenizer.size if tokenizer else 0,
        tokenizer=data.tokenizer if tokenizer else "bytes",
    )


class _Tally:
    """Count, largest id, hash and frequencies, in one pass."""

    def __init__(self) -> None:
        self._hash = hashlib.sha256()
        self._counts = np.zeros(0, dtype=np.int64)
        self._total = self._top = 0

    def add(self, ids: NDArray[Any]) -> None:
        self._hash.update(np.ascontiguousarray(ids).astype("<u4").tobytes())
        self._total += len(ids)
        if not len(ids):
            return
        self._top = max(self._top, int(ids.max()))
        counts = np.bincount(
            ids[ids < 1 << 20].astype(np.int64)
        )  # ids beyond are refused by the vocabulary anyhow
        if len(counts) > len(self._counts):
            self._counts = np.pad(self._counts, (0, len(counts) - len(self._counts)))
        self._counts[: len(counts)] += counts

    def corpus(self, path: str, dtype: str, size: int, text_bytes: int, tokenizer: str) -> Corpus:
        shares = self._counts[self._counts > 0] / max(1, self._total)
        entropy = float(-(shares * np.log(shares)).sum())
        return Corpus(
            path,
            dtype,
            self._total,
            size,
            self._top,
            self._hash.hexdigest(),
            entropy,
            text_bytes,
            tokenizer,
        )
