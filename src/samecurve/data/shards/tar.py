"""Tar files in webdataset's naming: neighbouring members `000123.jpg` and `000123.cls` make the row
{"__key__": "000123", "jpg": bytes, "cls": bytes}. The index holds where each member's bytes begin.
"""

import hashlib
import re
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from samecurve.core.determinism.data_order import Ids
from samecurve.data.shards.index import Index, IndexWriter, Shard
from samecurve.data.shards.open_files import OpenFiles
from samecurve.data.shards.tar_headers import NAMES, read_members
from samecurve.errors import UserError

_NAME = re.compile(r"^((?:.*/|)[^./]+)\.([^/]*)$", re.DOTALL)
_AT_ONCE = 4096  # rows that are written together


def scan(shards: Sequence[Shard], writer: IndexWriter) -> None:
    """Index the members of each row; only headers are read.

    UserError: a file is no tar or is cut off, or members of one key are not neighbours.
    """
    rows = _RowWriter(writer)
    for shard in shards:
        digest = hashlib.sha256()
        keys: set[str] = set()
        for key, members in _rows(shard):
            if key in keys:
                raise UserError(
                    f"{shard.path}: members of {key} stand apart: another key is between them",
                    "make it again with tar --sort=name: the members of a key are neighbours then",
                    "data",
                )
            keys.add(key)
            digest.update(
                f"{key}: {[(name, size) for name, _, size in members]}".encode("utf-8", NAMES)
            )
            rows.add(key, members)
        writer.file_done(len(keys), digest.digest())
    rows.close()


_Value = tuple[str, int, int]  # extension, offset and number of its bytes


class _RowWriter:
    """Writes rows into the index's arrays, many at once."""

    def __init__(self, writer: IndexWriter) -> None:
        self._writer = writer
        self._extensions: dict[str, int] = {}
        self._kept: list[tuple[bytes, list[_Value]]] = []
        self._num_members, self._key_bytes = 0, 0

    def add(self, key: str, members: list[_Value]) -> None:
        self._kept.append((key.encode("utf-8", NAMES), members))
        if len(self._kept) == _AT_ONCE:
            self._write()

    def close(self) -> None:
        self._write()
        self._writer.append("row", np.array([[self._num_members, self._key_bytes]]))
        self._writer.notes["extensions"] = list(self._extensions)

    def _write(self) -> None:
        begins, kept = [], []
        for key, members in self._kept:
            begins.append((self._num_members, self._key_bytes))
            self._num_members += len(members)
            self._key_bytes += len(key)
            for name, offset, size in members:
                number = self._extensions.setdefault(name, len(self._extensions))
                kept.append((number, offset, size))
        self._writer.append("row", np.array(begins, np.int64).reshape(-1, 2))
        self._writer.append("member", np.array(kept, np.int64).reshape(-1, 3))
        keys = b"".join(key for key, _ in self._kept)
        self._writer.append("key", np.frombuffer(keys, np.uint8))
        self._kept = []


class Tar:
    """Rows by id. columns: the extensions that are read; None: all."""

    def __init__(self, index: Index, columns: Sequence[str] | None) -> None:
        self._index = index
        self._files = OpenFiles(index.shards)
        self._rows = index["row"].reshape(-1, 2)
        self._members = index["member"].reshape(-1, 3)
        self._extensions: list[str] = index.notes["extensions"]
        missing = [name for name in columns or () if name not in self._extensions]
        if missing:
            raise UserError(
                f"no member of the shards ends in .{missing[0]}",
                f"columns= of {', '.join(self._extensions)}",
                "data",
            )
        self._columns = columns

    def read(self, ids: Ids) -> list[dict[str, Any]]:
        numbers = self._index.shards_of(ids)
        return [
            self._row(number, row)
            for number, row in zip(numbers.tolist(), ids.tolist(), strict=True)
        ]

    def place(self, row: int) -> str:
        """File and key of a row."""
        number = int(self._index.shards_of(np.array([row]))[0])
        return f"{self._index.shards[number].path}:{self._key(row)}"

    def _row(self, number: int, row: int) -> dict[str, Any]:
        members = self._members[self._rows[row, 0] : self._rows[row + 1, 0]].tolist()
        values: dict[str, Any] = {"__key__": self._key(row)}
        for extension, offset, size in members:
            name = self._extensions[extension]
            if self._columns is None or name in self._columns:
                values[name] = self._files.read(number, offset, size)
        lacking = [name for name in self._columns or () if name not in values]
        if lacking:
            raise UserError(
                f"no member .{lacking[0]} for this key",
                "leave it out of columns=, or make the shard again with it",
                self.place(row),
            )
        return values

    def _key(self, row: int) -> str:
        begin, end = self._rows[row : row + 2, 1]
        return self._index["key"][begin:end].tobytes().decode("utf-8", NAMES)


def _rows(shard: Shard) -> Iterator[tuple[str, list[_Value]]]:
    """Neighbouring members of one key.

    As in webdataset, names without an extension and its own notes (`__meta__.json`) are left out.
    """
    key, values = None, list[_Value]()
    for name, offset, size in read_members(shard.path, shard.size):
        match = _NAME.match(name)
        if match is None or match[1].rpartition("/")[2].startswith("__"):
            continue
        if match[1] != key:
            if key is not None:
                yield key, values
            key, values = match[1], []
        extension = match[2].lower()
        if any(other == extension for other, _, _ in values):
            raise UserError(
                f"{shard.path}: {name} comes twice", "make it again, each member once", "data"
            )
        values.append((extension, offset, size))
    if key is not None:
        yield key, values
