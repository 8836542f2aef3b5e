"""The index of shards: where each row begins. One process makes it once, and it stays in the cache.

The names, sizes and times of the files identify an index, so a changed file makes a new one. Its
arrays are written as they are made, and memory-mapped: neither needs memory for each row.
"""

import hashlib
import json
import os
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from samecurve.core.system import write_json
from samecurve.core.system.cache import cache_entry, cache_key
from samecurve.errors import RunError

if TYPE_CHECKING:  # most shards are files
    from samecurve.storage.object_cache import StoredFile

_FORMAT = 1  # the version of an index's files


@dataclass(frozen=True)
class Shard:
    """A file as it was indexed. stored: the object in a store of which `path` is a copy, if it is
    one; the copy may be absent.
    """

    path: Path
    size: int
    mtime_ns: int
    rows: int = 0
    stored: "StoredFile | None" = None

    def at_hand(self) -> Path:
        """The path of the file, which is brought if it lies in a store and is not here."""
        if self.stored is None:
            return self.path
        from samecurve.storage.object_cache import bring

        return bring(self.stored)


class IndexWriter:
    """The arrays that a scan of the files fills."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.notes: dict[str, Any] = {}  # further facts for the reader of the index
        self._arrays: dict[str, tuple[IO[bytes], str]] = {}
        self._digest = hashlib.sha256()
        self._rows: list[int] = []

    def append(self, name: str, values: NDArray[Any]) -> None:
        """Append to an array; its first values determine its type."""
        if name not in self._arrays:
            opened = open(self.home / f"{name}.bin", "wb")  # noqa: SIM115 - until close()
            self._arrays[name] = (opened, values.dtype.str)
        file, dtype = self._arrays[name]
        file.write(np.ascontiguousarray(values, dtype).tobytes())

    def file_done(self, rows: int, digest: bytes) -> None:
        """End a file. digest: of the part of its content that was read."""
        self._rows.append(rows)
        self._digest.update(f"{rows}/".encode() + digest)

    def close(self) -> None:
        for file, _ in self._arrays.values():
            file.close()

    def finish(self, kind: str, shards: Sequence[Shard]) -> None:
        self.close()
        write_json(
            self.home / "index.json",
            {
                "kind": kind,
                "files": [str(shard.path) for shard in shards],
                "rows": self._rows,
                "arrays": {name: dtype for name, (_, dtype) in self._arrays.items()},
                "notes": self.notes,
                "digest": self._digest.hexdigest(),
            },
        )


class Index:
    """An opened index. `first_rows`: the first row of each shard, then the number of all rows."""

    def __init__(self, home: Path, shards: Sequence[Shard]) -> None:
        values = json.loads((home / "index.json").read_text())
        self.home = home
        self.shards = [
            replace(shard, rows=rows) for shard, rows in zip(shards, values["rows"], strict=True)
        ]
        self.first_rows = np.cumsum([0, *values["rows"]])
        self.notes: dict[str, Any] = values["notes"]
        self.digest: str = values["digest"]
        self._arrays = {
            name: _mapped(home / f"{name}.bin", dtype) for name, dtype in values["arrays"].items()
        }

    def __len__(self) -> int:
        return int(self.first_rows[-1])

    def __getitem__(self, name: str) -> NDArray[Any]:
        return self._arrays[name]

    def shards_of(self, ids: NDArray[np.int64]) -> NDArray[np.int64]:
        """The number of each row's shard."""
        return np.searchsorted(self.first_rows, ids, side="right") - 1


def open_index(
    cache: Path,
    kind: str,
    files: "Sequence[Path | StoredFile]",
    made_by: Any,
    scan: Callable[..., None],
    *,
    bring: "Callable[[Sequence[Shard]], Sequence[Shard]] | None" = None,
) -> Index:
    """The index of these files; it is made if the cache has none.

    made_by: what the index depends on beside the files. scan: (shards, writer) fills it.
    bring: gives the shards again, each at hand when it is given; None: they are
    """
    shards = [_shard(file) for file in files]
    stamp = [_stamp(shard) for shard in shards]
    home = cache / cache_key([_FORMAT, kind, made_by, stamp])
    return Index(
        cache_entry(home, partial(_make, kind, bring(shards) if bring else shards, scan)), shards
    )


def _shard(file: "Path | StoredFile") -> Shard:
    if isinstance(file, Path):
        status = file.stat()
        return Shard(file, status.st_size, status.st_mtime_ns)
    return Shard(file.path, file.size, file.mtime_ns, stored=file)


def _stamp(shard: Shard) -> list[str | int]:
    """What identifies a file's content; of an object, its tag, wherever the cache lies."""
    if shard.stored is not None:
        return [str(shard.stored.url), shard.size, shard.stored.etag]
    return [str(shard.path), shard.size, shard.mtime_ns]


def _make(kind: str, shards: Sequence[Shard], scan: Callable[..., None], scratch: Path) -> None:
    with closing(IndexWriter(scratch)) as writer:
        scan(shards, writer)
        writer.finish(kind, shards)
    for shard in shards:
        if shard.stored is None:
            check_unchanged(shard, shard.path.stat())


def check_unchanged(shard: Shard, status: os.stat_result) -> None:
    """Compare a file with the index. RunError: the file has changed since it was indexed."""
    if (status.st_size, status.st_mtime_ns) != (shard.size, shard.mtime_ns):
        raise RunError(
            f"{shard.path} has changed since it was indexed",
            "run the same command again, once nothing writes to the files",
            "data",
        )


def _mapped(file: Path, dtype: str) -> NDArray[Any]:
    if not file.stat().st_size:  # an empty file can't be mapped
        return np.empty(0, dtype)
    return np.memmap(file, dtype, "r")
