"""Rows by id from shards beside the same files read from their beginning, in rows a second of
processor time, and what memory an index takes as rows grow.

    python -m benchmarks.shards [directory]
"""

import json
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterable
from io import BytesIO
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from samecurve import Shards

ROWS, BATCH, READ = 100_000, 64, 12_800
TEXT = "some words of a line " * 10


def write_lines(path: Path, rows: int) -> None:
    with open(path, "w") as file:
        for row in range(rows):
            file.write(f'{{"id": {row}, "text": "{TEXT}"}}\n')


def write_tar(path: Path, rows: int) -> None:
    with tarfile.open(path, "w") as tar:
        for row in range(rows):
            for extension, value in (("bin", bytes(3000)), ("cls", b"%d" % row)):
                member = tarfile.TarInfo(f"{row:08d}.{extension}")
                member.size = len(value)
                tar.addfile(member, BytesIO(value))


def write_parquet(path: Path, rows: int) -> None:
    import pyarrow
    from pyarrow import parquet

    text = [f"{TEXT}{row}" for row in range(rows)]
    parquet.write_table(pyarrow.table({"id": np.arange(rows), "text": text}), path)


def plain_lines(path: Path) -> Iterable[Any]:
    with open(path, "rb") as file:
        yield from map(json.loads, file)


def plain_tar(path: Path) -> Iterable[Any]:
    with tarfile.open(path) as tar:
        members = iter(tar)
        for first, second in zip(members, members, strict=True):
            yield [tar.extractfile(member).read() for member in (first, second)]  # type: ignore[union-attr]


def plain_parquet(path: Path) -> Iterable[Any]:
    from pyarrow import parquet

    for batch in parquet.ParquetFile(path).iter_batches(1024):
        yield from batch.to_pylist()


def seconds(call: Callable[[], Any]) -> float:
    began = time.process_time()
    call()
    return time.process_time() - began


def private_bytes() -> int:
    """Of this process, that no file backs."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon"):
            return int(line.split()[1]) << 10
    raise OSError("this system does not tell")


def compare(name: str, path: Path, cache: Path, plain: Callable[[Path], Iterable[Any]]) -> None:
    index_seconds = seconds(lambda: Shards(path, cache=cache))
    shards = Shards(path, cache=cache)
    ids = np.random.default_rng(0).permutation(len(shards))[:READ]

    def read(order: Any) -> None:
        for first in range(0, READ, BATCH):
            shards[order[first : first + BATCH]]

    in_sequence = seconds(lambda: list(islice(plain(path), READ)))
    shuffled = seconds(lambda: read(ids))
    in_order = seconds(lambda: read(np.arange(READ)))
    print(
        f"{name:12s} index {len(shards) / index_seconds:9,.0f} rows/s  shuffled"
        f" {READ / shuffled:8,.0f} rows/s  in order {READ / in_order:8,.0f}  plain, from the"
        f" beginning {READ / in_sequence:8,.0f}  ({in_sequence / shuffled:.2f} x)"
    )


def grow(home: Path, cache: Path) -> None:
    for rows in (ROWS, 10 * ROWS, 40 * ROWS):
        path = home / f"grown-{rows}.jsonl"
        with open(path, "w") as file:
            file.writelines(f'{{"id": {row}}}\n' for row in range(rows))
        before = private_bytes()
        shards = Shards(path, cache=cache)
        for first in range(0, READ, BATCH):
            shards[np.random.default_rng(first).integers(rows, size=BATCH)]
        kept = sum(file.stat().st_size for file in shards._index.home.iterdir())  # noqa: SLF001
        print(
            f"{rows:10,d} rows: {(private_bytes() - before) / 2**20:6.1f} MiB of memory,"
            f" {kept / rows:.1f} bytes a row on disk"
        )


def main(home: Path) -> None:
    cache = home / "cache"
    for name, write, plain in (
        ("JSON lines", write_lines, plain_lines),
        ("tar", write_tar, plain_tar),
        ("parquet", write_parquet, plain_parquet),
    ):
        suffix = {"JSON lines": "jsonl"}.get(name, name)
        write(home / f"a.{suffix}", ROWS)
        compare(name, home / f"a.{suffix}", cache, plain)
    grow(home, cache)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(scratch))
