"""The files that a source of the config names, the form of each, and the chunks of a file."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from samecurve.core.system.cache import stamp_file
from samecurve.errors import UserError
from samecurve.tasks.huggingface.data.document_columns import Kind
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
_SPLIT = "train"  # of a saved DatasetDict


@dataclass(frozen=True)
class InputFile:
    """A file, and how its documents lie in it."""

    path: Path
    form: Form


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


def find_input_files(source: str) -> list[InputFile]:
    """The files of a source, each once. UserError: there are none, or they can't be read."""
    path = Path(source).expanduser()
    if source != STANDARD_LIBRARY and path.is_dir():
        files = _files_of_directory(path)
    else:
        files = [_input_file(file) for file in files_of_source(source)]
    if not files:
        raise no_files(
            source,
            "text, JSONL or parquet files, .bin files of token ids, globs or directories of them; a"
            " directory written by datasets' save_to_disk; python-stdlib; random",
        )
    return list(dict.fromkeys(InputFile(file.path.resolve(), file.form) for file in files))


def _files_of_directory(root: Path) -> list[InputFile]:
    """The files that hold documents in a directory.

    Those of a saved data set; else the JSONL, parquet and token files; where there are none, all
    files, as text. A README beside files of rows is no document.
    """
    if (root / "dataset_dict.json").is_file():
        return _saved_dataset(_split_of(root))
    if (root / "state.json").is_file() and (root / "dataset_info.json").is_file():
        return _saved_dataset(root)
    files = files_below(root)
    rows = [path for path in files if _is_any(path, (*_LINES, *_PARQUET, *_TOKENS))]
    return [_input_file(path) for path in rows or files]


def _split_of(root: Path) -> Path:
    splits = json.loads((root / "dataset_dict.json").read_text())["splits"]
    if _SPLIT not in splits:
        raise UserError(
            f"{root} has no split {_SPLIT}; it has {', '.join(splits)}",
            f"data.source={root / splits[0]}" if splits else "save it again with a split",
            "data.source",
        )
    return root / _SPLIT


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
