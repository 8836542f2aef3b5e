"""Links below the page's folders that lead out of them, in the data and models of a config.

places.py checks the paths themselves. Here are the files below a folder, and those that a pattern
finds. A folder is walked as the tasks walk it: past hidden names.
"""

import glob
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from samecurve.data.shards.paths import expand_ranges
from samecurve.seam import UserError
from samecurve_products.page.form.places import Roots, config_texts

_REMEDY = (
    "put a copy in the place of the link, or start the page with `samecurve ui . FOLDER`, where"
    " FOLDER has the link's target"
)


def check_links(values: Mapping[str, Any], roots: Roots, home: Path) -> None:
    """UserError: data or a model of the config is read through a link from outside of the roots.

    values: the config as a document. home: the folder that relative paths begin from
    """
    for key, text in config_texts(values):
        for path in _named(text, home):
            for place in (path, *_links_below(path)):
                if _leads_out(place, roots):
                    raise UserError(
                        f"{key}: {place} is a link to {place.resolve()}, outside of the page's"
                        " folders",
                        _REMEDY,
                        key,
                    )


def _leads_out(place: Path, roots: Roots) -> bool:
    try:
        return roots.root_of(place) is None
    except (OSError, RuntimeError):  # links in a circle: nothing is read there
        return False


def _named(text: str, home: Path) -> Iterator[Path]:
    """The files and folders that a text names, if it names any."""
    for name in expand_ranges(text):
        try:
            path = home / Path(name).expanduser()
            found = (
                [path] if os.path.lexists(path) else map(Path, glob.glob(str(path), recursive=True))
            )
            yield from found
        except (OSError, RuntimeError, ValueError):  # no path: no such user, too long, a zero byte
            continue


def _links_below(folder: Path) -> Iterator[Path]:
    """The links below a folder, and in the folders that such links lead to.

    A folder that can't be listed is passed over: no task can list it either.
    """
    waiting, seen = [folder], set()
    while waiting:
        where = waiting.pop()
        real = os.path.realpath(where)
        if real in seen or not os.path.isdir(real):
            continue
        seen.add(real)
        try:
            with os.scandir(where) as listed:
                entries = list(listed)
        except OSError:
            continue
        for entry in entries:
            if entry.name.startswith("."):
                continue
            if entry.is_symlink():
                yield where / entry.name
            if os.path.isdir(where / entry.name):  # False, too, for links in a circle
                waiting.append(where / entry.name)
