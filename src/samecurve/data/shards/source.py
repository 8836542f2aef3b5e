"""Shards as the data of a task: rows by id, in any order."""

import inspect
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from samecurve.core.determinism.data_order import Ids
from samecurve.core.system.cache import cache_home
from samecurve.data.shards import json_lines, parquet, tar
from samecurve.data.shards.index import Index
from samecurve.data.shards.index import open_index as index_files
from samecurve.data.shards.paths import Paths, find_files, kind_of
from samecurve.errors import UserError

if TYPE_CHECKING:  # most shards are files
    from samecurve.data.shards.stored import Stored
    from samecurve.storage.object_cache import StoredFile


class _Reader(Protocol):
    def read(self, ids: Ids) -> list[dict[str, Any]]: ...
    def place(self, row: int) -> str: ...


class Shards:
    """Files of rows, too many to be held or indexed in memory, read by id.

    paths: a path, a glob, or a list of these: JSON lines, parquet, or tar in webdataset's naming.
    columns: the names that are read of each row (of a tar, extensions); None: all.
    decode: called with each row, a dict; its result replaces the row. Its parameters may be named
        `id` and `epoch` too (samecurve.sample_rng(id, epoch)).
    cache: the directory of the index; None: the program's cache.
    cache_bytes: of copies of objects (`s3://bucket/shard-*.tar`) on this machine, such as "50GiB".
        Shards beyond it are read from the store, range by range.

    One process finds once where rows begin, and keeps this index in the cache. UserError: no such
    files, files of several kinds, a broken file (the error names its line).
    """

    def __init__(
        self,
        paths: Paths,
        *,
        columns: Sequence[str] | None = None,
        decode: Callable[..., Any] | None = None,
        cache: Path | str | None = None,
        cache_bytes: int | str = "50GiB",
    ) -> None:
        files = find_files(paths)
        self._columns = None if columns is None else tuple(columns)
        self._decode = decode
        self._parameters = _named_parameters(decode)
        home = Path(cache) if cache else cache_home() / "shards"
        self._stored = _stored_among(files, cache_bytes)
        with self._naming_objects():
            self._index, self._reader = _open(files, self._columns, home, self._stored)

    def __len__(self) -> int:
        return len(self._index)

    def __getitem__(self, ids: Any, epoch: int = 0) -> Any:
        """A list of rows for an array of ids; one row for one id."""
        if isinstance(ids, int | np.integer):
            return self._rows(np.array([range(len(self))[ids]]), epoch)[0]
        return self._rows(np.asarray(ids, np.int64), epoch)

    def fingerprint(self) -> str:
        """A digest of the content that the index has read, without names and times of the files.

        It covers all of JSON lines, names and sizes of a tar's members, and parquet's footers; of
        objects in a store also their names, sizes and tags.
        """
        if self._stored is not None:
            return self._stored.fingerprint(self._index.digest)
        return self._index.digest

    def _naming_objects(self) -> AbstractContextManager[None]:
        return nullcontext() if self._stored is None else self._stored.naming_objects()

    def _rows(self, ids: Ids, epoch: int) -> list[Any]:
        with self._naming_objects():
            rows = self._reader.read(ids)
        if self._decode is None:
            return rows
        return [
            self._decoded(row, row_id, epoch)
            for row, row_id in zip(rows, ids.tolist(), strict=True)
        ]

    def _decoded(self, row: dict[str, Any], row_id: int, epoch: int) -> Any:
        assert self._decode is not None
        by_name = {"id": row_id, "epoch": epoch}
        try:
            return self._decode(row, **{name: by_name[name] for name in self._parameters})
        except Exception as error:
            error.add_note(f"row {row_id} ({self._reader.place(row_id)})")
            raise


def _named_parameters(decode: Callable[..., Any] | None) -> tuple[str, ...]:
    """The parameters `id` and `epoch`, as far as a function has them."""
    if decode is None:
        return ()
    try:
        parameters = inspect.signature(decode).parameters
    except (TypeError, ValueError):  # some functions of libraries have no signature
        return ()
    return tuple(name for name in ("id", "epoch") if name in parameters)


def _stored_among(files: "Sequence[Path | StoredFile]", cache_bytes: int | str) -> "Stored | None":
    """The objects in a store among the files; None: all are files of this machine."""
    if all(isinstance(file, Path) for file in files):
        return None
    from samecurve.data.shards.stored import Stored

    return Stored(files, cache_bytes)


def _open(
    files: "Sequence[Path | StoredFile]",
    columns: Sequence[str] | None,
    cache: Path,
    stored: "Stored | None",
) -> tuple[Index, _Reader]:
    kind = kind_of(files)
    open_index = partial(index_files, bring=stored.brought) if stored else index_files
    if stored and kind != "parquet":
        stored.bring()
    if kind == "parquet":
        parquet.check_installed()
        scan = partial(parquet.scan, columns=columns)
        index = open_index(cache, kind, files, columns, scan)
        return _checked(index), parquet.Parquet(index)
    if kind == "tar":
        index = open_index(cache, kind, files, None, tar.scan)
        return _checked(index), tar.Tar(index, columns)
    index = open_index(cache, kind, files, None, json_lines.scan)
    return _checked(index), json_lines.JsonLines(index, columns)


def _checked(index: Index) -> Index:
    if not len(index):
        raise UserError(
            f"{index.shards[0].path} and all other shards hold no row", "files with rows", "data"
        )
    return index
