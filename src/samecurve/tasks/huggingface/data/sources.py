"""The files that a source of the config names, and the form of each."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from samecurve.errors import UserError
from samecurve.tasks.huggingface.data_section import STANDARD_LIBRARY
from samecurve.tasks.text_files import files_below, files_matching, standard_library

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


def find_input_files(source: str) -> list[InputFile]:
    """The files of a source, each once. UserError: there are none, or they can't be read."""
    if source == STANDARD_LIBRARY:
        return [InputFile(path, "text") for path in standard_library()]
    path = Path(source).expanduser()
    if path.is_dir():
        files = _files_of_directory(path)
    elif path.is_file():
        files = [_input_file(path)]
    else:
        files = [_input_file(match) for match in files_matching(path)]
    if not files:
        nothing = "an empty directory" if path.is_dir() else "no such file, directory or match"
        raise UserError(
            f"data source {source}: {nothing}",
            "text, JSONL or parquet files, .bin files of token ids, globs or directories of them; a"
            " directory written by datasets' save_to_disk; python-stdlib; random",
            "data.source",
        )
    return list(dict.fromkeys(InputFile(file.path.resolve(), file.form) for file in files))


def _files_of_directory(root: Path) -> list[InputFile]:
    """A saved data set's; else the JSONL, parquet and token files, where there are any; else all,
    as text.

    What lies beside rows (a README) is no document.
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
    """Names, sizes and times. UserError: one is missing."""
    stamps: list[list[str | int]] = []
    for file in files:
        try:
            status = file.path.stat()
        except OSError as error:
            raise UserError(
                f"{file.path}: {error.strerror}", "make it again, or copy it again", "data.source"
            ) from None
        stamps.append([str(file.path), file.form, status.st_size, status.st_mtime_ns])
    return stamps
