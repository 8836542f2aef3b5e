"""Memory that a data worker shares with the process that asked for its rows.

A worker lays the rows of a job into a block of one file without a name, and says which block; the
asking process sees them there, so no row is copied through a pipe. A block is used again once the
arrays over it are gone: the first page of the file holds a byte for each block, which the worker
sets and the asking process clears. The system frees the memory with the last process, however that
one ends. Blocks are mapped once on each side.
"""

import mmap
import os
import tempfile
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Rows = Mapping[str, NDArray[Any]]
_BLOCKS = 256  # most of a worker; rows for which none is left go through the pipe
_PAGE = mmap.ALLOCATIONGRANULARITY
_ALIGNED = 64  # bytes; where a column begins


def open_shared() -> int:
    """A file descriptor of memory without a name, which child processes may be given."""
    if hasattr(os, "memfd_create"):  # Linux: no limit of /dev/shm applies to it
        shared = os.memfd_create("rows")
    else:
        with tempfile.TemporaryFile() as file:
            shared = os.dup(file.fileno())
    os.ftruncate(shared, _PAGE)
    return shared


@dataclass(frozen=True)
class _Block:
    number: int
    offset: int
    memory: mmap.mmap


class SharedWriter:
    """A worker's side: it lays rows into blocks."""

    def __init__(self, shared: int) -> None:
        self._shared = shared
        self._in_use = mmap.mmap(shared, _PAGE)
        self._blocks: list[_Block] = []
        self._end = _PAGE

    def write(self, rows: Rows) -> dict[str, Any] | None:
        """Lay rows into a free block. Returns what SharedReader.read() is given, in JSON's types.

        None: the asking process holds the rows of all blocks.
        """
        columns, size = [], 0
        for name, array in rows.items():
            columns.append((name, array.dtype.str, array.shape, size))
            size += -(-array.nbytes // _ALIGNED) * _ALIGNED
        block = self._free_block(max(size, 1))
        if block is None:
            return None
        self._in_use[block.number] = 1
        whole = np.frombuffer(block.memory, np.uint8)
        for (*_, first), array in zip(columns, rows.values(), strict=True):
            np.copyto(_column(whole, array.dtype, array.shape, first), array)
        return {
            "block": (block.number, block.offset, len(block.memory)),
            "columns": columns,
        }

    def _free_block(self, size: int) -> _Block | None:
        """The smallest free block that is large enough, or a new one."""
        free = [
            block
            for block in self._blocks
            if not self._in_use[block.number] and len(block.memory) >= size
        ]
        if free:
            return min(free, key=lambda block: len(block.memory))
        if len(self._blocks) == _BLOCKS:
            return None
        length = max(_PAGE, 1 << (size - 1).bit_length())  # a page takes memory once it is written
        os.ftruncate(self._shared, self._end + length)
        memory = mmap.mmap(self._shared, length, offset=self._end)
        self._blocks.append(_Block(len(self._blocks), self._end, memory))
        self._end += length
        return self._blocks[-1]


class SharedReader:
    """The asking process's side: it sees a worker's rows where they lie."""

    def __init__(self, shared: int) -> None:
        self._shared = shared
        self._in_use = mmap.mmap(shared, _PAGE)
        self._blocks: dict[int, mmap.mmap] = {}

    def read(self, head: Mapping[str, Any]) -> dict[str, NDArray[Any]]:
        """The arrays of a block. The block is free when all of them, and their views, are gone."""
        number, offset, length = head["block"]
        if number not in self._blocks:
            self._blocks[number] = mmap.mmap(self._shared, length, offset=offset)
        whole = np.frombuffer(self._blocks[number], np.uint8)  # each array below refers to it
        release = weakref.finalize(whole, self._in_use.__setitem__, number, 0)
        release.atexit = False
        return {
            name: _column(whole, np.dtype(dtype), tuple(shape), first)
            for name, dtype, shape, first in head["columns"]
        }


def _column(
    whole: NDArray[np.uint8], dtype: np.dtype[Any], shape: tuple[int, ...], first: int
) -> NDArray[Any]:
    size = dtype.itemsize * int(np.prod(shape, dtype=np.int64))
    return whole[first : first + size].view(dtype).reshape(shape)
