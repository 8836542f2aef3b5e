"""The files that a source of text names, and the stamps and keys by which the cache knows them."""

import glob
import hashlib
import json
import os
import sysconfig
from pathlib import Path

from samecurve.errors import UserError

STANDARD_LIBRARY = "python-stdlib"


def files_of_source(source: str) -> list[Path]:
    """Files of the standard library, below a directory, or that a path or a glob names.

    Empty where there are none.
    """
    if source == STANDARD_LIBRARY:
        return standard_library()
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
            if not name.startswith(".") and not _is_run(Path(folder, name))
        ]
        files += [Path(folder, name) for name in names if not name.startswith(".")]
    return sorted(files)


def _is_run(folder: Path) -> bool:
    return (folder / "plan.json").exists() and (folder / "checkpoints").exists()


def stamp_file(file: Path) -> list[str | int]:
    """Path, size and time of the last change. UserError: the file is missing."""
    try:
        status = file.stat()
    except OSError as error:
        raise UserError(
            f"{file}: {error.strerror}", "make it again, or copy it again", "data.source"
        ) from None
    return [str(file), status.st_size, status.st_mtime_ns]


def cache_key(identity: object) -> str:
    """The name of an entry of the cache.

    identity: everything that the entry is made from, as JSON can hold it.
    """
    return hashlib.sha256(json.dumps(identity).encode()).hexdigest()[:24]
