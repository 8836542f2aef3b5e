"""The directories that the page may show, and the runs that are found below them.

A run is known to the browser by an id, never by a path: only ids that a scan has found are
accepted, so nothing in a request can name another directory.
"""

import stat
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from samecurve.seam import Run, UserError
from samecurve_products.page.tree import walk

_DEPTH = 3  # directories below a root in which runs are looked for
_MOST_DIRECTORIES = 20_000  # below a root that a scan looks into
_FRESH = 1.0  # seconds in which a scan counts
_MOST_OF_TIME = 0.05  # share of the time that scans of a large tree may take
_LEAF = "plan.json"  # the file that a run has


def opaque_id(root: Path, relative: str) -> str:
    """The id of a file or directory below a root."""
    return sha256(f"{root}\0{relative}".encode(errors="surrogateescape")).hexdigest()[:16]


@dataclass(frozen=True)
class Root:
    """A directory that the user has named on the command line."""

    id: str
    name: str
    path: Path

    @classmethod
    def of(cls, directory: Path) -> "Root":
        """UserError: the directory is not there."""
        if not directory.is_dir():
            raise UserError(
                f"{directory} is no directory", "name a directory with runs or configs", "DIR"
            )
        path = directory.resolve()
        return cls(opaque_id(path, ""), path.name or str(path), path)


@dataclass(frozen=True)
class ListedRun:
    """A run below a root."""

    id: str
    name: str  # the path below the root, with slashes
    root: Root
    home: Path

    @property
    def run(self) -> Run:
        return Run(self.home)


class Catalogue:
    """The runs below the roots, as the last scan has found them."""

    def __init__(self, roots: Sequence[Root]) -> None:
        self.roots = tuple(dict.fromkeys(roots))
        self._lock = threading.Lock()
        self._found: dict[str, ListedRun] = {}
        self._fresh_until = 0.0

    def runs(self) -> dict[str, ListedRun]:
        """id -> run. A scan counts for a second, and longer where it takes long."""
        with self._lock:
            if time.monotonic() > self._fresh_until:
                began = time.monotonic()
                self._found = self._scan()
                took = time.monotonic() - began
                self._fresh_until = time.monotonic() + max(_FRESH, took / _MOST_OF_TIME)
            return self._found

    def find(self, run_id: str) -> ListedRun | None:
        """The run of an id. None: no scan has found one."""
        if len(run_id) != 16:
            return None
        listed = self.runs().get(run_id)
        return listed if listed and is_plain_directory(listed.home) else None

    def look_again(self) -> None:
        """Scan at the next look: something was started or removed."""
        with self._lock:
            self._fresh_until = 0.0

    def _scan(self) -> dict[str, ListedRun]:
        by_directory: dict[Path, ListedRun] = {}
        for root in self.roots:
            for directory, files in walk(root.path, _DEPTH, _MOST_DIRECTORIES, leaf=_LEAF):
                if _LEAF in files:
                    relative = directory.relative_to(root.path).as_posix()
                    relative, name = ("", root.name) if relative == "." else (relative, relative)
                    run = ListedRun(opaque_id(root.path, relative), name, root, directory)
                    by_directory.setdefault(directory, run)
        return {run.id: run for run in by_directory.values()}


def is_plain_directory(path: Path) -> bool:
    """Whether the path is a directory, and no link to one."""
    try:
        return stat.S_ISDIR(path.lstat().st_mode)
    except OSError:
        return False
