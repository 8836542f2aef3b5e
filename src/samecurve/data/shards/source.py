"""Shards as the data of a task: rows by id, in any order."""

import inspect
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from samecurve.core.determinism.data_order import Ids
from samecurve.core.system.cache import cache_home
from samecurve.data.shards import json_lines, parquet, tar
from samecurve.data.shards.index import Index, open_index
from samecurve.data.shards.paths import Paths, find_files, kind_of
from samecurve.errors import UserError


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
    ) -> None:
        files = find_files(paths)
        self._columns = None if columns is None else tuple(columns)
        self._decode = decode
        self._parameters = _named_parameters(decode)
        self._index, self._reader = _open(
            files, self._columns, Path(cache) if cache else cache_home() / "shards"
        )

    def __len__(self) -> int:
        return len(self._index)

    def __getitem__(self, ids: Any, epoch: int = 0) -> Any:
        """A list of rows for an array of ids; one row for one id."""
        if isinstance(ids, int | np.integer):
            return self._rows(np.array([range(len(self))[ids]]), epoch)[0]
        return self._rows(np.asarray(ids, np.int64), epoch)

    def fingerprint(self) -> str:
        """A digest of the content that the index has read, without names and times of the files.

        It covers all of JSON lines, names and sizes of a tar's members, and parquet's footers.
        """
        return self._index.digest

    def _rows(self, ids: Ids, epoch: int) -> list[Any]:
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


def _open(
    files: Sequence[Path], columns: Sequence[str] | None, cache: Path
) -> tuple[Index, _Reader]:
    kind = kind_of(files)
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
