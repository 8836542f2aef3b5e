"""Which code the page may run: files below the user's folders that came with no run."""

from collections.abc import Iterable
from pathlib import Path


def is_own_code(path: Path, roots: Iterable[Path]) -> bool:
    """Whether a file lies below a folder that the user has named, and in no run's directory.

    Links are resolved. roots: the folders, resolved
    """
    file = path.resolve()
    for root in roots:
        if file.is_relative_to(root):
            between = [folder for folder in file.parents if folder.is_relative_to(root)]
            return not any((folder / "plan.json").exists() for folder in between)
    return False
