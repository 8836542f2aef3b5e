"""The files that a source of the config names, the form of each, and the chunks of a file."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from samecurve.core.config.sections import ALL
from samecurve.seam import UserError, stamp_file
from samecurve_products.text.huggingface.data.document_columns import Kind
from samecurve_products.text_files import (
    PACKED,
    STANDARD_LIBRARY,
    SourceSplits,
    canonical_split,
    has_suffix,
    no_files,
    paths_by_split,
    use_splits,
)

Form = Literal["text", "lines", "parquet", "arrow", "tokens"]

_LINES = (".jsonl", ".ndjson")
_PARQUET = (".parquet", ".pq")
_TOKENS = (".bin",)  # raw ids
_DICT = "dataset_dict.json"  # of a saved DatasetDict


@dataclass(frozen=True)
class InputFile:
    """A file, and how its documents lie in it."""

    path: Path
    form: Form


_BySplit = dict[str | None, list[InputFile]]


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


def find_splits(source: str, split: str) -> SourceSplits[InputFile]:
    """The files of a source, by what they are used for.

    split: the name of the split to train on; all: every file, whatever its name. A file that the
    source names itself is trained on.
    UserError: there are none, or they can't be read, or there is no such split.
    """
    by_split = _files_by_split(source, split)
    if not any(by_split.values()):
        raise no_files(
            source,
            "text, JSONL or parquet files, .bin files of token ids, globs or directories of them; a"
            " directory written by datasets' save_to_disk; python-stdlib; random",
        )
    return use_splits(by_split, split, source)


def _files_by_split(source: str, split: str) -> _BySplit:
    """The files that hold documents, by split; under None where none is named.

    Those of a saved data set; else the JSONL, parquet and token files; where there are none, all
    files, as text. A README beside files of rows is no document.
    """
    root = Path(source).expanduser()
    if source != STANDARD_LIBRARY and (root / _DICT).is_file():
        return _splits_saved(root, split)
    saved = (root / "state.json").is_file() and (root / "dataset_info.json").is_file()
    if source != STANDARD_LIBRARY and saved:
        return {None: _saved_dataset(root)}
    by_split = paths_by_split(source, split, (*_LINES, *_PARQUET, *_TOKENS))
    return {name: [_input_file(path) for path in paths] for name, paths in by_split.items()}


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
    files = [root / file["filename"] for file in state["_data_files"]]
    return [InputFile(file.resolve(), "arrow") for file in files]


def _input_file(path: Path) -> InputFile:
    if has_suffix(path, PACKED):
        raise UserError(
            f"{path} is compressed",
            "unpack it first, and name what that makes",
            "data.source",
        )
    return InputFile(path.resolve(), _form(path))


def _form(path: Path) -> Form:
    """How documents lie in a file, by its name."""
    if has_suffix(path, _PARQUET):
        return "parquet"
    if has_suffix(path, _TOKENS):
        return "tokens"
    return "lines" if has_suffix(path, (*_LINES, ".json")) else "text"


def stamp_files(files: Sequence[InputFile]) -> list[list[str | int]]:
    """Path, form, size and time of each file. UserError: one is missing."""
    stamps = [(file.form, stamp_file(file.path)) for file in files]
    return [[path, form, *rest] for form, (path, *rest) in stamps]
