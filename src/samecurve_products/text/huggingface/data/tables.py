"""Parquet files and saved datasets: their row groups, and the rows of each."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from samecurve.data.shards.parquet import check_installed
from samecurve.seam import UserError
from samecurve_products.text.huggingface.data.document_columns import (
    COLUMNS,
    Kind,
    Learns,
    kind_of,
    wanted_columns,
)
from samecurve_products.text.huggingface.data.sources import Chunk


def row_groups(path: Path, *, learns: Learns) -> tuple[Kind, list[int]]:
    """The kind of a parquet file's documents, and the bytes of each row group."""
    check_installed()
    import pyarrow
    from pyarrow import parquet

    try:
        footer = parquet.read_metadata(path)
        columns = parquet.read_schema(path).names
    except (pyarrow.ArrowException, OSError) as error:
        raise UserError(
            f"{path}: no whole parquet file: {error}",
            "make it again, or copy it again",
            "data.source",
        ) from None
    kind = kind_of(columns, path, learns=learns)
    _check_filled(path, footer, kind)
    return kind, [footer.row_group(n).total_byte_size for n in range(footer.num_row_groups)]


def _check_filled(path: Path, footer: Any, kind: Kind) -> None:
    """UserError: a column that is needed is empty in all rows."""
    filled: set[str] = set()
    for number in range(footer.num_row_groups):
        group = footer.row_group(number)
        for index in range(group.num_columns):
            column = group.column(index)
            statistics = column.statistics
            unknown = statistics is None or not statistics.has_null_count
            if unknown or statistics.null_count < column.num_values:
                filled.add(column.path_in_schema.partition(".")[0])
    for name in COLUMNS[kind]:
        if name not in filled:
            raise UserError(
                f"{path}: the column `{name}` is empty: {footer.num_rows} rows, none with a value",
                "a file with something in it, or leave it out of data.source",
                "data.source",
            )


def parquet_rows(chunk: Chunk) -> Iterator[tuple[str, dict[str, Any]]]:
    from pyarrow import parquet

    with parquet.ParquetFile(chunk.path, pre_buffer=False) as file:
        row = sum(file.metadata.row_group(number).num_rows for number in range(chunk.begin))
        columns = wanted_columns(file.schema_arrow.names, chunk.kind)
        groups = list(range(chunk.begin, chunk.end))
        for batch in file.iter_batches(1024, groups, columns=columns, use_threads=False):
            for values in batch.to_pylist():
                yield f"{chunk.path}: row {row}", values
                row += 1


def arrow_columns(path: Path) -> list[str]:
    check_installed()
    import pyarrow
    from pyarrow import ipc

    try:
        with pyarrow.memory_map(str(path)) as file:
            return list(ipc.open_stream(file).schema.names)
    except (pyarrow.ArrowException, OSError) as error:
        raise UserError(
            f"{path}: not as datasets' save_to_disk writes it: {error}",
            "save it again, or copy it again",
            "data.source",
        ) from None


def arrow_rows(chunk: Chunk) -> Iterator[tuple[str, dict[str, Any]]]:
    import pyarrow
    from pyarrow import ipc

    row = 0
    with pyarrow.memory_map(chunk.path) as file:
        stream = ipc.open_stream(file)
        columns = wanted_columns(stream.schema.names, chunk.kind)
        for batch in stream:
            for values in batch.select(columns).to_pylist():
                yield f"{chunk.path}: row {row}", values
                row += 1
