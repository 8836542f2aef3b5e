"""Parts that every task on text needs: files of text and of token ids, and the splits of a source.

Files of text are those that a source names (a file, a glob, a directory, the standard library).
Files of token ids hold one number after another: a user's `.bin`, and the cache's. Splits are found
by the names under which hubs and libraries leave data sets: `train.jsonl`, `val.bin`,
`data/test-00000-of-00001.parquet`, `validation/part-0.parquet`.
"""

import codecs
import glob
import os
import re
import sys
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath
from shlex import quote
from typing import Any, Generic, Literal, TypeVar

import numpy as np
from numpy.typing import NDArray

from samecurve.core.config.sections import ALL, TRAIN
from samecurve.seam import UserError, counted, some

STANDARD_LIBRARY = "python-stdlib"
_SHOWN = 8  # files named in a line
PACKED = (".gz", ".zst", ".bz2", ".xz", ".zip", ".tar", ".tgz")  # ends of compressed files' names


def files_of_source(source: str) -> list[Path]:
    """Files of the standard library, below a directory, or that a path or a glob names.

    Empty where there are none. Of objects in a store (s3://) the files are copies in the cache.
    """
    if source == STANDARD_LIBRARY:
        return standard_library()
    if source.startswith("s3://"):
        from samecurve.storage.object_cache import Listing, bring

        return [bring(file) for file in Listing("data.source").find(source)]
    path = Path(source).expanduser()
    if path.is_dir():
        return files_below(path)
    if path.is_file():
        return [path]
    matches = [Path(match) for match in glob.glob(str(path), recursive=True)]
    return sorted(match for match in matches if match.is_file())


def no_files(source: str, remedy: str) -> UserError:
    """The error for a source that names no file."""
    nothing = "no such file, directory or match"
    if Path(source).expanduser().is_dir():
        nothing = "an empty directory"
    return UserError(f"data source {source}: {nothing}", remedy, "data.source")


def standard_library() -> list[Path]:
    """The sorted .py files of this Python's standard library: real text without a download.

    Tests of the standard library are left out.
    """
    skipped = {"test", "tests", "idle_test", "lib2to3", "__pycache__"}
    skipped |= {"site-packages", "dist-packages"}
    files: list[Path] = []
    for folder, subfolders, names in os.walk(sysconfig.get_path("stdlib")):
        subfolders[:] = [name for name in subfolders if name not in skipped]
        files += [Path(folder, name) for name in names if name.endswith(".py")]
    return sorted(files)


def files_below(root: Path) -> list[Path]:
    """A directory's files, without hidden ones and run directories.

    A run that reads what it writes could never be resumed.
    """
    files: list[Path] = []
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [
            name
            for name in subfolders
            if not name.startswith(".") and not is_run_directory(Path(folder, name))
        ]
        files += [Path(folder, name) for name in names if not name.startswith(".")]
    return sorted(files)


def is_run_directory(folder: Path) -> bool:
    """Whether a run is kept in the folder; what it writes is no data."""
    return all((folder / part).exists() for part in ("plan.json", "checkpoints"))


def passed_over(sources: Sequence[str], read: Sequence[Path]) -> list[str]:
    """Lines for the user: the files below directories that a config names and that are not read.

    Hidden files and run directories are never looked at.
    """
    known = {file.resolve() for file in read}
    lines = []
    for source in sources:
        root = Path(source).expanduser()
        if source == STANDARD_LIBRARY or not root.is_dir():
            continue
        others = [
            str(file.relative_to(root)) for file in files_below(root) if file.resolve() not in known
        ]
        if others:
            lines.append(
                f"{source}: {counted(len(others), 'file')} not read: {some(others, _SHOWN)}"
            )
    return lines


_BLOCK = 1 << 22  # ids that are read at once
_DECODED = 1 << 22  # bytes decoded at once: a whole file's text would take several times its size
_UTF16 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
Item = TypeVar("Item")


def batches_of(
    items: Iterable[Item], size: Callable[[Item], int], *, least: int, most: int = sys.maxsize
) -> Iterator[list[Item]]:
    """Neighbouring items, several at a time.

    least: size of a batch at which it ends, though the last may be smaller. most: items of a batch
    """
    batch: list[Item] = []
    total = 0
    for item in items:
        batch.append(item)
        total += size(item)
        if total >= least or len(batch) >= most:
            yield batch
            batch, total = [], 0
    if batch:
        yield batch


def check_is_text(content: bytes, path: Path, begin: int = 0) -> None:
    """UserError: the content has a zero byte, or is no UTF-8.

    content: whole lines of the file, from the byte `begin` on
    """
    if content.startswith(_UTF16) and begin == 0:
        raise UserError(
            f"{path} is no UTF-8: it is UTF-16", _convert("utf-16", path), "data.source"
        )
    if b"\0" in content:
        raise UserError(
            f"{path} is no text: it has zero bytes",
            "name the text files, or a glob that leaves it out; raw token ids are in .bin files",
            "data.source",
        )
    decoder, view = codecs.getincrementaldecoder("utf-8")(), memoryview(content)
    try:
        for first in range(0, len(content), _DECODED):
            decoder.decode(view[first : first + _DECODED])
        decoder.decode(b"", final=True)
    except UnicodeDecodeError:
        raise _no_utf8(content, path, begin) from None


def _no_utf8(content: bytes, path: Path, begin: int) -> UserError:
    start = len(content)
    try:
        content.decode()
    except UnicodeDecodeError as error:
        start = error.start
    from samecurve.data.shards.json_lines import line_number  # of use to few

    line = line_number(path, begin + start)
    return UserError(
        f"{path} is no text: the byte {content[start]:#04x} of line {line} is no UTF-8",
        f"{_convert('latin1', path)} (latin1, or the encoding that it has); or a glob that leaves"
        " it out",
        "data.source",
    )


def _convert(encoding: str, path: Path) -> str:
    return f"iconv -f {encoding} -t utf-8 {quote(str(path))} > new.txt"


def check_whole_tokens(path: Path, dtype: str) -> None:
    """UserError: the file's size is no multiple of a token's size."""
    size = path.stat().st_size
    if size % np.dtype(dtype).itemsize == 0:
        return
    remedy = "was it copied whole?"
    if size % 2 == 0:
        remedy = "--set data.token_dtype=uint16, if that is what it holds"
    raise UserError(
        f"{path} has {size} bytes, which are no whole number of {dtype} tokens",
        remedy,
        "data.token_dtype",
    )


def id_blocks(path: Path, dtype: str) -> Iterator[NDArray[Any]]:
    """The ids of a file, several at a time."""
    if not path.stat().st_size:  # an empty file can't be mapped
        return
    ids = np.memmap(path, dtype, "r")
    for first in range(0, len(ids), _BLOCK):
        yield np.asarray(ids[first : first + _BLOCK])


Role = Literal["train", "validation", "test"]  # what a split is used for

_WORDS = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "val", "dev", "eval", "evaluation"),
    "test": ("test", "testing"),
}
_BY_WORD = {word: name for name, words in _WORDS.items() for word in words}
_SHARD = re.compile(r"(?P<name>\w+(?:\.\w+)*)-\d{5}-of-\d{5}\..*")  # as hubs name shards
_BESIDE = ("readme", "license", "licence")  # text that is no part of the data


@dataclass(frozen=True)
class SourceSplits(Generic[Item]):
    """The files of a source by what they are used for.

    files: `train` is always there. line: for the user, what each split is used for; "" where the
    source has no splits.
    """

    files: Mapping[Role, Sequence[Item]]
    line: str = ""


def canonical_split(name: str) -> str:
    """The split's one name: dev -> validation. Other names stay."""
    return _BY_WORD.get(name.lower(), name)


def split_in_name(path: PurePath) -> str | None:
    """The split that a file's path below its source names; None: it names none."""
    shard = _SHARD.fullmatch(path.name)
    if shard is not None:
        return canonical_split(shard["name"])
    for part in path.parts:  # a directory before the file's own name
        words = re.split(r"[^a-z]+", part.lower())
        named = next((_BY_WORD[word] for word in words if word in _BY_WORD), None)
        if named is not None:
            return named
    return None


def are_splits(paths: Sequence[PurePath], *, hold_rows: bool) -> bool:
    """Whether the names of a source's files tell splits apart.

    Among files of text, `test.md` may be a page like the others: each of them must name a split.
    """
    if hold_rows:
        return any(split_in_name(path) in _WORDS for path in paths)
    pages = [path for path in paths if not path.name.lower().startswith(_BESIDE)]
    return bool(pages) and all(split_in_name(path) in _WORDS for path in pages)


def paths_by_split(source: str, split: str, rows: tuple[str, ...]) -> dict[str | None, list[Path]]:
    """The files that a source names, by split; all of them under None where no name tells splits.

    rows: how the names of files of rows end. If a directory has such files, its other files (a
    README) are left out. Files of one split that a glob matches are meant as they are.
    """
    root = Path(source).expanduser()
    if source != STANDARD_LIBRARY and root.is_dir():
        files = files_below(root)
        of_rows = [path for path in files if has_suffix(path, rows)]
        if not of_rows and split != ALL:  # `train.json` and `test.json`, beside a README
            named = [path for path in files if split_in_name(path.relative_to(root)) is not None]
            of_rows = [path for path in named if has_suffix(path, (".json",))]
        return _group(of_rows or files, root, split, hold_rows=bool(of_rows))
    files = files_of_source(source)
    if len(files) < 2 or source == STANDARD_LIBRARY:
        return {None: files}
    root = Path(os.path.commonpath([file.parent for file in files]))
    hold_rows = all(has_suffix(path, (*rows, ".json")) for path in files)
    by_split = _group(files, root, split, hold_rows=hold_rows)
    if len(by_split) == 1 and split == TRAIN:
        return {None: next(iter(by_split.values()))}
    return by_split


def _group(
    paths: Sequence[Path], root: Path, split: str, *, hold_rows: bool
) -> dict[str | None, list[Path]]:
    below = [path.relative_to(root) for path in paths]
    if split == ALL or (split == TRAIN and not are_splits(below, hold_rows=hold_rows)):
        return {None: list(paths)}
    by_split: dict[str | None, list[Path]] = {}
    for path, name in zip(paths, below, strict=True):
        by_split.setdefault(split_in_name(name), []).append(path)
    return by_split


def has_suffix(path: Path, suffixes: Iterable[str]) -> bool:
    return path.name.lower().endswith(tuple(suffixes))


def use_splits(
    by_split: Mapping[str | None, Sequence[Item]], split: str, source: str
) -> SourceSplits[Item]:
    """Choose what each split of a source is used for. UserError: there is no such split.

    by_split: the files of each split; under None those that name no split, which are trained on
    where no other is. split: the one to train on
    """
    if set(by_split) == {None}:
        return SourceSplits({"train": list(dict.fromkeys(by_split[None]))})
    name = canonical_split(split)
    train = by_split.get(name) or (by_split.get(None) if name == "train" else None)
    if not train:
        there = [split for split in by_split if split is not None]
        raise UserError(
            f"{source} has no split {split}; it has {', '.join(there) or 'none'}",
            _remedy_of_missing_split(by_split),
            "data.split",
        )
    chosen: dict[Role, Sequence[Item]] = {"train": train}
    others: tuple[Role, ...] = ("validation", "test")
    chosen |= {role: by_split[role] for role in others if role != name and by_split.get(role)}
    line = _describe(chosen, by_split, name, source) if len(by_split) > 1 else ""
    return SourceSplits({role: list(dict.fromkeys(files)) for role, files in chosen.items()}, line)


def _remedy_of_missing_split(by_split: Mapping[str | None, Sequence[object]]) -> str:
    """The remedy: a split to train on, never one that is kept for a measurement."""
    if by_split.get(TRAIN) or by_split.get(None):
        there = TRAIN
    else:
        others = [split for split in by_split if split not in (None, "validation", "test")]
        if not others:
            return (
                f"a data.source with a split to train on, or data.split={ALL} to train on all of"
                " this one"
            )
        there = others[0]
    return f"data.split={there}, or data.split={ALL} to train on all of it"


def _describe(
    chosen: Mapping[Role, Sequence[object]],
    by_split: Mapping[str | None, Sequence[object]],
    name: str,
    source: str,
) -> str:
    """A line for the user: what each split of a source is used for. name: trained on"""
    used = {"validation": "validation is evaluated on", "test": "test is measured at the end"}
    parts = [
        f"trained on the split {name}" if by_split.get(name) else "trained on what is no split"
    ]
    parts += [used[role] for role in chosen if role != "train"]
    unused = [
        "files that name no split" if split is None else split
        for split, files in by_split.items()
        if files and split not in {name, *chosen} and files != chosen["train"]
    ]
    parts += [f"not read: {', '.join(unused)}"] if unused else []
    return f"{source}: {'; '.join(parts)} (data.split={ALL}: trained on all of them)"


def check_split_is_somewhere(sources: Sequence[SourceSplits[Item]], split: str) -> None:
    """UserError: the config names a split to train on, and no source has splits."""
    if split in (TRAIN, ALL) or any(source.line for source in sources):
        return
    raise UserError(
        f"data.split is {split}, and no source has splits: no file's name says train, validation or"
        " test below a directory or among the matches of a glob",
        "leave data.split out; or name the directory that holds the splits",
        "data.split",
    )
