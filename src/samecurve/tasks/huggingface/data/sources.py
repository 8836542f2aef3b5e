"""The files that a source of the config names, the form of each, and the chunks of a file."""

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from samecurve.core.system.cache import stamp_file
from samecurve.errors import UserError
from samecurve.tasks.huggingface.data.document_columns import Kind
from samecurve.tasks.huggingface.data.splits import (
    ALL,
    Role,
    are_splits,
    canonical_split,
    choose_splits,
    describe_splits,
    split_in_name,
)
from samecurve.tasks.text import (
    STANDARD_LIBRARY,
    files_below,
    files_of_source,
    no_files,
)

Form = Literal["text", "lines", "parquet", "arrow", "tokens"]

_LINES = (".jsonl", ".ndjson")
_PARQUET = (".parquet", ".pq")
_TOKENS = (".bin",)  # raw ids
_PACKED = (".gz", ".zst", ".bz2", ".xz", ".zip", ".tar", ".tgz")
_SPLIT = "train"  # what is trained on by default
_DICT = "dataset_dict.json"  # of a saved DatasetDict


@dataclass(frozen=True)
class InputFile:
    """A file, and how its documents lie in it."""

    path: Path
    form: Form


_BySplit = dict[str | None, list[InputFile]]


@dataclass(frozen=True)
class SourceSplits:
    """The files of a source by what they are used for. line: for the user, where splits are named.

    `train` is always there.
    """

    files: Mapping[Role, list[InputFile]]
    line: str = ""


@dataclass(frozen=True)
class Chunk:
    """A part of an input file, which one process reads.

    Bytes [begin, end) of the file, or row groups of parquet. size: bytes, about.
    """

    path: str
    form: Form
    kind: Kind
    begin: int
    end: int
    size: int
    last: bool  # of its file


def find_splits(source: str, split: str) -> SourceSplits:
    """The files of a source, by what they are used for.

    split: the name of the split to train on; all: every file, whatever its name. A file that the
    source names itself is trained on.
    UserError: there are none, or they can't be read, or there is no such split.
    """
    path = Path(source).expanduser()
    if source != STANDARD_LIBRARY and path.is_dir():
        by_split = _splits_of_directory(path, split)
    else:
        by_split = _splits_of_glob(source, split)
    if not any(by_split.values()):
        raise no_files(
            source,
            "text, JSONL or parquet files, .bin files of token ids, globs or directories of them; a"
            " directory written by datasets' save_to_disk; python-stdlib; random",
        )
    if set(by_split) == {None}:
        return SourceSplits({"train": _each_once(by_split[None])})
    chosen = choose_splits(by_split, split, source)
    line = describe_splits(chosen, by_split, split, source) if len(by_split) > 1 else ""
    return SourceSplits({role: _each_once(files) for role, files in chosen.items()}, line)


def _each_once(files: Sequence[InputFile]) -> list[InputFile]:
    return list(dict.fromkeys(InputFile(file.path.resolve(), file.form) for file in files))


def _splits_of_directory(root: Path, split: str) -> _BySplit:
    """The files that hold documents in a directory, by split; under None where none is named.

    Those of a saved data set; else the JSONL, parquet and token files; where there are none, all
    files, as text. A README beside files of rows is no document.
    """
    if (root / _DICT).is_file():
        return _splits_saved(root, split)
    if (root / "state.json").is_file() and (root / "dataset_info.json").is_file():
        return {None: _saved_dataset(root)}
    files = files_below(root)
    rows = [path for path in files if _is_any(path, (*_LINES, *_PARQUET, *_TOKENS))]
    if not rows and split != ALL:  # `train.json` and `test.json`, beside a README
        rows = [path for path in files if _is_any(path, (".json",)) and _named(path, root)]
    return _by_split(rows or files, root, split, hold_rows=bool(rows))


def _splits_of_glob(source: str, split: str) -> _BySplit:
    """The files that a glob matches, by split; files of one split were meant as they are."""
    files = files_of_source(source)
    if len(files) < 2 or source == STANDARD_LIBRARY:
        return {None: [_input_file(file) for file in files]}
    root = Path(os.path.commonpath([file.parent for file in files]))
    hold_rows = all(_is_any(path, (*_LINES, *_PARQUET, *_TOKENS, ".json")) for path in files)
    by_split = _by_split(files, root, split, hold_rows=hold_rows)
    if len(by_split) == 1 and split == _SPLIT:
        return {None: next(iter(by_split.values()))}
    return by_split


def _by_split(paths: Sequence[Path], root: Path, split: str, *, hold_rows: bool) -> _BySplit:
    below = [path.relative_to(root) for path in paths]
    if split == ALL or (split == _SPLIT and not are_splits(below, hold_rows=hold_rows)):
        return {None: [_input_file(path) for path in paths]}
    by_split: _BySplit = {}
    for path, name in zip(paths, below, strict=True):
        by_split.setdefault(split_in_name(name), []).append(_input_file(path))
    return by_split


def _named(path: Path, root: Path) -> bool:
    return split_in_name(path.relative_to(root)) is not None


def _splits_saved(root: Path, split: str) -> _BySplit:
    """The splits of a saved DatasetDict."""
    names = json.loads((root / _DICT).read_text())["splits"]
    by_split: _BySplit = {}
    for name in names:
        key = None if split == ALL else canonical_split(str(name))
        by_split.setdefault(key, []).extend(_saved_dataset(root / str(name)))
    return by_split


def _saved_dataset(root: Path) -> list[InputFile]:
    """The Arrow files that `datasets` has written."""
    state = json.loads((root / "state.json").read_text())
    return [InputFile(root / file["filename"], "arrow") for file in state["_data_files"]]


def _input_file(path: Path) -> InputFile:
    if _is_any(path, _PACKED):
        raise UserError(
            f"{path} is compressed",
            "unpack it first, and name what that makes",
            "data.source",
        )
    if _is_any(path, _PARQUET):
        return InputFile(path, "parquet")
    if _is_any(path, _TOKENS):
        return InputFile(path, "tokens")
    return InputFile(path, "lines" if _is_any(path, (*_LINES, ".json")) else "text")


def _is_any(path: Path, suffixes: Iterable[str]) -> bool:
    return path.name.lower().endswith(tuple(suffixes))


def stamp_files(files: Sequence[InputFile]) -> list[list[str | int]]:
    """Path, form, size and time of each file. UserError: one is missing."""
    stamps = [(file.form, stamp_file(file.path)) for file in files]
    return [[path, form, *rest] for form, (path, *rest) in stamps]
