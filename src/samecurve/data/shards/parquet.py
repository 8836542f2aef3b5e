"""Parquet: a row is {column: value}.

Parquet packs groups of rows column by column, so reading one row would unpack a whole group. The
cache therefore holds an unpacked copy in Arrow's own format, from which single rows are read.
"""

import errno
import hashlib
import shutil
import threading
from collections import OrderedDict
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from samecurve.core.determinism.data_order import Ids
from samecurve.core.system.installation import install_command
from samecurve.data.shards.index import Index, IndexWriter, Shard
from samecurve.errors import UserError
from samecurve.units import show_bytes

_BATCH = 1024  # rows of a record batch in the copy
_OPEN = 64  # most copies that are mapped at once


def check_installed() -> None:
    """UserError: pyarrow is not installed."""
    if find_spec("pyarrow") is None:
        raise UserError("parquet needs pyarrow: not installed", install_command("parquet"), "data")


def scan(shards: Sequence[Shard], writer: IndexWriter, columns: Sequence[str] | None) -> None:
    """Copy the shards into the cache and index the copies.

    UserError: a file is no parquet, columns differ between files, or the cache has no room.
    """
    from pyarrow import parquet

    schemas = [_schema(shard.path, columns) for shard in shards]
    _check_alike(shards, schemas)
    _check_room(writer.home, shards, schemas[0])
    rows = batches = 0
    for number, shard in enumerate(shards):
        writer.append("first_batch", np.array([batches]))
        first = rows
        with parquet.ParquetFile(shard.path, pre_buffer=False) as file:
            for size in _copy(file, shard.path, _copied(writer.home, number), schemas[0]):
                writer.append("batch", np.array([rows]))
                rows, batches = rows + size, batches + 1
        writer.file_done(rows - first, _digest(shard, schemas[0]))
    writer.append("batch", np.empty(0, np.int64))


class Parquet:
    """Rows by id, of the columns that were copied."""

    def __init__(self, index: Index) -> None:
        self._index = index
        self._copies: OrderedDict[int, Any] = OrderedDict()
        self._lock = threading.Lock()

    def read(self, ids: Ids) -> list[dict[str, Any]]:
        numbers = self._index.shards_of(ids)
        batches = np.searchsorted(self._index["batch"], ids, side="right") - 1
        within = batches - self._index["first_batch"][numbers]
        offsets = ids - self._index["batch"][batches]
        opened: dict[int, Any] = {}
        rows = []
        places = zip(
            numbers.tolist(), batches.tolist(), within.tolist(), offsets.tolist(), strict=True
        )
        for number, batch, in_file, offset in places:
            if batch not in opened:
                opened[batch] = self._copy_of(number).get_batch(in_file)
            columns = opened[batch]
            rows.append(
                {
                    name: _value(column, offset)
                    for name, column in zip(columns.schema.names, columns.columns, strict=True)
                }
            )
        return rows

    def place(self, row: int) -> str:
        """File, and the number of the row in it."""
        number = int(self._index.shards_of(np.array([row]))[0])
        return f"{self._index.shards[number].path}: row {row - self._index.first_rows[number]}"

    def _copy_of(self, number: int) -> Any:
        import pyarrow
        from pyarrow import ipc

        with self._lock:
            if number not in self._copies:
                file = pyarrow.memory_map(str(_copied(self._index.home, number)))
                self._copies[number] = ipc.open_file(file)
                if len(self._copies) > _OPEN:
                    self._copies.popitem(last=False)
            self._copies.move_to_end(number)
            return self._copies[number]


def _copied(home: Path, number: int) -> Path:
    return home / f"{number}.arrow"


def _schema(path: Path, columns: Sequence[str] | None) -> Any:
    """The types of the columns that are read."""
    import pyarrow
    from pyarrow import parquet

    try:
        schema = parquet.read_schema(path).remove_metadata()
    except (pyarrow.ArrowException, OSError) as error:
        raise UserError(
            f"{path}: no whole parquet file: {error}", "make it again, or copy it again", "data"
        ) from None
    missing = [name for name in columns or () if name not in schema.names]
    if missing:
        raise UserError(
            f"{path} has no column {missing[0]}",
            f"columns= of {', '.join(schema.names)}",
            "data",
        )
    return pyarrow.schema([schema.field(name) for name in columns or schema.names])


def _check_alike(shards: Sequence[Shard], schemas: Sequence[Any]) -> None:
    first = schemas[0]
    for shard, schema in zip(shards, schemas, strict=True):
        if schema.equals(first):
            continue
        unlike = [
            f"{name}: {_type(schema, name)}, there {_type(first, name)}"
            for name in dict.fromkeys([*first.names, *schema.names])
            if _type(schema, name) != _type(first, name)
        ]
        raise UserError(
            f"{shard.path} has other columns than {shards[0].path.name}:"
            f" {'; '.join(unlike) or 'in another order'}",
            "columns= of columns that are alike in all files, or make this file again",
            "data",
        )


def _type(schema: Any, name: str) -> str:
    return str(schema.field(name).type) if name in schema.names else "none"


def _check_room(home: Path, shards: Sequence[Shard], schema: Any) -> None:
    """UserError: the copy can't fit. (Some columns need even more than their footer says.)"""
    needed = sum(_unpacked_bytes(shard.path, schema) for shard in shards)
    free = shutil.disk_usage(home).free
    if needed > free:
        raise UserError(
            f"the unpacked copy of {len(shards)} parquet files needs {show_bytes(needed)};"
            f" {home.parent} has {show_bytes(free)}",
            "SAMECURVE_CACHE names a place with room; or columns= of fewer columns",
            "data",
        )


def _unpacked_bytes(path: Path, schema: Any) -> int:
    from pyarrow import parquet

    footer = parquet.read_metadata(path)
    groups = [footer.row_group(number) for number in range(footer.num_row_groups)]
    chunks = [group.column(number) for group in groups for number in range(group.num_columns)]
    return sum(
        chunk.total_uncompressed_size
        for chunk in chunks
        if chunk.path_in_schema.partition(".")[0] in schema.names
    )


def _copy(file: Any, path: Path, target: Path, schema: Any) -> list[int]:
    """Copy a file; returns the number of rows of each record batch.

    UserError: the copy does not fit: some columns need far more than their footer says.
    """
    from pyarrow import ipc

    sizes: list[int] = []
    rows, written = file.metadata.num_rows, 0
    free = shutil.disk_usage(target.parent).free
    try:
        with ipc.new_file(str(target), schema) as out:
            for batch in file.iter_batches(_BATCH, columns=schema.names, use_threads=False):
                written += batch.nbytes
                if written > free:
                    break
                out.write_batch(batch.replace_schema_metadata(None))
                sizes.append(batch.num_rows)
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        written = free + 1
    if written > free:
        done = max(1, sum(sizes))
        raise UserError(
            f"the unpacked copy of {path} does not fit: {rows} rows, of which {done} need"
            f" {show_bytes(written)}; {target.parent.parent} had {show_bytes(free)}",
            "SAMECURVE_CACHE names a place with room; or columns= of fewer columns",
            "data",
        )
    return sizes


def _digest(shard: Shard, schema: Any) -> bytes:
    """A digest of the footer, which describes each column, and of the columns that are read."""
    with open(shard.path, "rb") as file:
        file.seek(-8, 2)
        size = int.from_bytes(file.read(4), "little")
        file.seek(-8 - size, 2)
        return hashlib.sha256(file.read(size) + str(schema).encode()).digest()


def _value(column: Any, row: int) -> Any:
    """A value of a column: numbers and lists of them as numpy's, all else as Python's own types."""
    from pyarrow import types

    scalar, kind = column[row], column.type
    if not scalar.is_valid:
        return None
    if types.is_integer(kind) or types.is_floating(kind) or types.is_boolean(kind):
        return np.dtype(kind.to_pandas_dtype()).type(scalar.as_py())
    is_list = types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)
    if is_list and types.is_primitive(kind.value_type) and not scalar.values.null_count:
        return np.array(scalar.values.to_numpy(zero_copy_only=False))
    return scalar.as_py()
