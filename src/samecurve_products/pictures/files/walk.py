"""The files below a folder, in an order that no locale and no file system changes."""

import os
from collections.abc import Iterator
from pathlib import Path

from samecurve.seam import UserError, explain_os_error
from samecurve_products.text_files import is_run_directory


def files_below(root: Path) -> Iterator[Path]:
    """A folder's files, without hidden ones and run directories. Links to folders are followed.

    UserError: a folder can't be read.
    """

    def refuse(error: OSError) -> None:
        place = Path(os.fsdecode(error.filename or root))
        raise UserError(*explain_os_error(error, place, "start again"), "data.source") from None

    seen = set()
    for folder, subfolders, names in os.walk(root, onerror=refuse, followlinks=True):
        where = os.path.realpath(folder)
        if where in seen:  # links that lead round in a circle
            subfolders[:] = []
            continue
        seen.add(where)
        subfolders[:] = sorted(
            name
            for name in subfolders
            if not name.startswith(".") and not is_run_directory(Path(folder, name))
        )
        yield from (Path(folder, name) for name in sorted(names) if not name.startswith("."))


def check_is_file(path: Path) -> None:
    """UserError: to read it would wait for ever, or never end."""
    if path.exists() and not path.is_file():
        raise UserError(
            f"{path} is a pipe, a socket or a device, and no file",
            "remove it, or put a file in its place",
            "data.source",
        )
