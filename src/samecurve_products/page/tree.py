"""A walk through a user's folders, bounded in depth and number, past links and hidden folders."""

import os
from collections.abc import Collection, Iterator
from pathlib import Path

SKIPPED = frozenset({"node_modules", "__pycache__", "site-packages"})


def walk(
    root: Path, depth: int, most: int, *, skipped: Collection[str] = SKIPPED, leaf: str = ""
) -> Iterator[tuple[Path, list[str]]]:
    """Each directory with the names of its plain files, the upper ones first.

    depth: of the lowest directories below the root. most: directories that are looked into
    skipped: names of directories that are left out
    leaf: the name of a file below whose directory nothing is looked for
    """
    level = [root]
    for _ in range(depth + 1):
        below: list[Path] = []
        for directory in level[:most]:
            folders, files = _look(directory, skipped)
            yield directory, files
            if leaf not in files:
                below += sorted(folders)
        most -= min(most, len(level))
        level = below


def _look(directory: Path, skipped: Collection[str]) -> tuple[list[Path], list[str]]:
    folders, files = [], []
    try:
        with os.scandir(directory) as entries:
            for entry in entries:
                name = entry.name
                if entry.is_file(follow_symlinks=False):
                    files.append(name)
                elif name.startswith(".") or name in skipped:
                    continue
                elif entry.is_dir(follow_symlinks=False):
                    folders.append(directory / name)
    except OSError:  # not ours to read, or just removed
        pass
    return folders, files
