"""The files that a source of text names: a file, a glob, a directory, the standard library."""

import glob
import os
import sysconfig
from pathlib import Path


def standard_library() -> list[Path]:
    """The sorted .py files of this Python's standard library: real text without a download.

    Its tests are left out.
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


def files_matching(pattern: Path) -> list[Path]:
    """The files that a glob names, sorted; ** is allowed."""
    matches = [Path(match) for match in glob.glob(str(pattern), recursive=True)]
    return sorted(match for match in matches if match.is_file())


def _is_run(folder: Path) -> bool:
    return (folder / "plan.json").exists() and (folder / "checkpoints").exists()
