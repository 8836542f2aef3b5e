"""JSON lines: a row is the object of one line. The index holds where each line begins."""

import json
import zlib
from collections.abc import Sequence
from pathlib import Path
from shlex import quote
from typing import Any

import numpy as np
from numpy.typing import NDArray

from samecurve.core.determinism.data_order import Ids
from samecurve.data.shards.index import Index, IndexWriter, Shard
from samecurve.data.shards.open_files import OpenFiles
from samecurve.errors import UserError

_BLOCK = 1 << 20  # bytes scanned at once
MARK = b"\xef\xbb\xbf"  # the mark with which some editors begin a UTF-8 file
_SHOWN = 60  # characters of a line in an error


def scan(shards: Sequence[Shard], writer: IndexWriter) -> None:
    """Index where each line begins. UserError: a line is no object."""
    for shard in shards:
        _Scan(shard.path, writer).run()


class _Scan:
    """A scan of a file, block by block; a line that a block cuts is scanned with the next block."""

    def __init__(self, path: Path, writer: IndexWriter) -> None:
        self._path, self._writer = path, writer
        self._rows, self._lines = 0, 0

    def run(self) -> None:
        checksum = 0
        at, rest = 0, b""
        with open(self._path, "rb", buffering=0) as file:
            while block := file.read(_BLOCK):
                checksum = zlib.crc32(block, checksum)
                if at == 0 and not rest and block.startswith(MARK):
                    at, block = len(MARK), block[len(MARK) :]
                text = rest + block
                end = text.rfind(b"\n") + 1
                self._add_lines(np.frombuffer(text, np.uint8, end), at)
                at, rest = at + end, text[end:]
        if rest.strip():
            self._add_lines(np.frombuffer(rest + b"\n", np.uint8), at)
        self._writer.append("begin", np.empty(0, np.int64))
        self._writer.file_done(self._rows, checksum.to_bytes(4, "big"))

    def _add_lines(self, text: NDArray[np.uint8], at: int) -> None:
        """Add whole lines. at: the byte of the file where they begin."""
        ends = np.flatnonzero(text == ord("\n"))
        begins = np.concatenate(([0], ends[:-1] + 1))[: len(ends)]
        is_row = ends > begins
        last = np.maximum(ends - 1, 0)
        last = np.maximum(last - (text[last] == ord("\r")), 0)
        plain = is_row & (text[begins] == ord("{")) & (text[last] == ord("}"))
        for line in np.flatnonzero(is_row & ~plain):
            content = text[begins[line] : ends[line]].tobytes().strip()
            is_row[line] = bool(content)
            if content and not (content.startswith(b"{") and content.endswith(b"}")):
                raise no_object(content, f"{self._path}:{self._lines + int(line) + 1}")
        self._writer.append("begin", at + begins[is_row])
        self._rows += int(is_row.sum())
        self._lines += len(ends)


class JsonLines:
    """Rows by id. columns: the names to keep; None: all."""

    def __init__(self, index: Index, columns: Sequence[str] | None) -> None:
        self._index, self._columns = index, columns
        self._files = OpenFiles(index.shards)

    def read(self, ids: Ids) -> list[dict[str, Any]]:
        numbers = self._index.shards_of(ids)
        begins, ends = self._index["begin"][ids], self._ends(ids, numbers)
        return [
            self._row(number, begin, end)
            for number, begin, end in zip(
                numbers.tolist(), begins.tolist(), ends.tolist(), strict=True
            )
        ]

    def place(self, row: int) -> str:
        """File and line of a row, in the form that editors open: path:line."""
        number = int(self._index.shards_of(np.array([row]))[0])
        return self._line(number, int(self._index["begin"][row]))

    def _ends(self, ids: Ids, numbers: NDArray[np.int64]) -> NDArray[np.int64]:
        """Where the next row begins, or the file ends."""
        sizes = np.array([self._index.shards[number].size for number in numbers.tolist()])
        begin = self._index["begin"]
        next_begins = begin[np.minimum(ids + 1, len(begin) - 1)]
        is_last = ids + 1 == self._index.first_rows[numbers + 1]
        return np.where(is_last, sizes, next_begins)

    def _row(self, number: int, begin: int, end: int) -> dict[str, Any]:
        text = self._files.read(number, begin, end - begin)
        try:
            row: dict[str, Any] = json.loads(text.decode())
        except UnicodeDecodeError:
            raise no_object(text, self._line(number, begin)) from None
        except (ValueError, RecursionError) as error:
            raise UserError(
                f"not JSON: {error}", "correct this line", self._line(number, begin)
            ) from None
        if self._columns is None:
            return row
        try:
            return {name: row[name] for name in self._columns}
        except KeyError as error:
            raise UserError(
                f"this line has no {error}; it has {', '.join(row)}",
                "leave the name out of columns=, or add it to the line",
                self._line(number, begin),
            ) from None

    def _line(self, number: int, begin: int) -> str:
        """File and line of a byte; lines are counted here, since the index has only rows."""
        path = self._index.shards[number].at_hand()
        return f"{path}:{line_number(path, begin)}"


def line_number(path: Path, offset: int) -> int:
    """The number of the line that begins at this byte, counted from 1."""
    lines = 1
    with open(path, "rb") as file:
        while offset > 0 and (block := file.read(min(offset, _BLOCK))):
            lines += block.count(b"\n")
            offset -= len(block)
    return lines


def no_object(content: bytes, place: str) -> UserError:
    """The error for a line that is not one JSON object."""
    try:
        content.decode()
    except UnicodeDecodeError as error:
        path = place.rpartition(":")[0]
        return UserError(
            f"the byte {content[error.start]:#04x} is no UTF-8: the file has another encoding",
            f"iconv -f latin1 -t utf-8 {quote(path)} > new.jsonl (latin1, or the encoding that it"
            " has)",
            place,
        )
    shown = content[:_SHOWN].decode("utf-8", "replace")
    dots = " ..." if len(content) > _SHOWN else ""
    return UserError(
        f"not one JSON object in a line: {shown}{dots}",
        "JSON lines: each line a whole {...}. A file that is one array: jq -c '.[]' old.json >"
        " new.jsonl; one that was cut off: make it again",
        place,
    )
