"""Objects that are read as data: which there are, and copies of them on this machine.

A copy is named by the object's URL, size and tag, so a changed object is another copy. One process
of a machine makes a copy, and others wait. Copies have a bounded size together: beyond it those go
that were used least recently. The copy's time is the object's: what is made from its files is found
again in the cache wherever it was brought.
"""

import os
import shutil
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath

from samecurve.core.system import directory_made_once, one_at_a_time
from samecurve.core.system.cache import cache_home, cache_key
from samecurve.errors import UserError
from samecurve.storage.failures import StorageError
from samecurve.storage.place import Place, StoredObject, open_place
from samecurve.storage.url import ObjectUrl, parse_url
from samecurve.units import show_bytes

CACHE_BYTES = 50 << 30
_WILD = frozenset("*?[")


@dataclass(frozen=True)
class StoredFile:
    """An object, and the path of its copy. Two of the same URL, size and tag are equal."""

    url: ObjectUrl
    size: int
    etag: str
    modified: float
    place: Place = field(compare=False, repr=False)  # the whole bucket

    @property
    def name(self) -> str:
        return PurePosixPath(self.url.prefix).name

    @property
    def suffix(self) -> str:
        return PurePosixPath(self.url.prefix).suffix

    @property
    def mtime_ns(self) -> int:
        return int(self.modified) * 1_000_000_000

    @property
    def path(self) -> Path:
        """Where its copy is, or would be."""
        key = cache_key([str(self.url), self.size, self.etag])
        return cache_home() / "objects" / key / self.name

    def read_range(self, begin: int, size: int) -> bytes:
        """Bytes of the object itself. StorageError: it has changed, or can't be reached."""
        return self.place.read_range(self.url.prefix, begin, size, etag=self.etag)


class Listing:
    """The objects that patterns name; each folder of the store is listed once."""

    def __init__(self, where: str) -> None:
        self._where = where
        self._places: dict[str, Place] = {}
        self._folders: dict[ObjectUrl, dict[str, StoredObject]] = {}

    def find(self, pattern: str) -> list[StoredFile]:
        """The objects of a URL, sorted by name. `*` and `?` match within a folder, `**` folders.

        UserError: there are none.
        """
        url = parse_url(pattern, self._where)
        parts = url.prefix.split("/")
        wild = next((n for n, part in enumerate(parts) if _WILD & set(part)), len(parts) - 1)
        folder = ObjectUrl(url.bucket, "/".join(parts[:wild]))
        place = self._place(url.bucket)
        if folder not in self._folders:
            under = f"{folder.prefix}/" if folder.prefix else ""
            try:
                self._folders[folder] = place.list(under)
            except StorageError as error:
                raise error.as_user_error(self._where) from None
        matching = [
            StoredFile(ObjectUrl(url.bucket, name), item.size, item.etag, item.modified, place)
            for name, item in sorted(self._folders[folder].items())
            if _matches(name.split("/"), parts)
        ]
        if not matching:
            raise UserError(
                f"{pattern}: no such object or match",
                f"an object or a glob: {folder / '*.jsonl'}; `aws s3 ls {folder}/` shows them",
                self._where,
            )
        return matching

    def _place(self, bucket: str) -> Place:
        if bucket not in self._places:
            self._places[bucket] = open_place(ObjectUrl(bucket, ""), self._where)
        return self._places[bucket]


def bring(file: StoredFile, limit: int = CACHE_BYTES) -> Path:
    """The path of an object's copy, which is made if it is not there.

    limit: bytes of all copies, but this one is brought however large it is
    """
    path = file.path
    if not _touch(path, file):
        with one_at_a_time(path.parent.with_suffix(".lock")):
            if not _touch(path, file):
                _make(path, file)
        _evict(path.parent, limit)
    return path


def _make(path: Path, file: StoredFile) -> None:
    free = shutil.disk_usage(_existing(path)).free
    if free < file.size:
        raise UserError(
            f"no room for a copy of {file.url}: it has {show_bytes(file.size)},"
            f" {show_bytes(free)} are free at {path}",
            "free some space; or SAMECURVE_CACHE names a place with room",
            "data",
        )
    with directory_made_once(path.parent) as scratch:
        file.place.download(file.url.prefix, file.size, scratch / file.name, etag=file.etag)
        os.utime(scratch / file.name, ns=(time.time_ns(), file.mtime_ns))


def _touch(path: Path, file: StoredFile) -> bool:
    """Note that a copy is used. Returns whether there is one."""
    try:
        if path.stat().st_size != file.size:
            return False
        os.utime(path, ns=(time.time_ns(), file.mtime_ns))
    except OSError:
        return False
    return True


def _evict(keep: Path, limit: int) -> None:
    """Remove the copies that were used least recently, until all together fit."""
    copies = []
    for path in keep.parent.glob("*/*"):
        with suppress(OSError):
            status = path.stat()
            copies.append((status.st_atime_ns, status.st_size, path.parent))
    total = sum(size for _, size, _ in copies)
    for _, size, folder in sorted(copies):
        if total <= limit:
            return
        if folder != keep and not folder.name.endswith(".part"):
            shutil.rmtree(folder, ignore_errors=True)
            total -= size


def first_that_fit(files: Sequence[StoredFile], limit: int) -> list[StoredFile]:
    """The first files that have at most `limit` bytes together."""
    kept: list[StoredFile] = []
    for file in files:
        limit -= file.size
        if limit < 0:
            break
        kept.append(file)
    return kept


def _matches(name: list[str], pattern: list[str]) -> bool:
    if not pattern or not name:
        return not pattern and not name
    if pattern[0] == "**":
        return any(_matches(name[skipped:], pattern[1:]) for skipped in range(len(name)))
    return fnmatchcase(name[0], pattern[0]) and _matches(name[1:], pattern[1:])


def _existing(path: Path) -> Path:
    return next(parent for parent in path.parents if parent.is_dir())
