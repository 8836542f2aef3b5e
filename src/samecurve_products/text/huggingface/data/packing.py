"""Pack pieces of documents into rows by best-fit decreasing, without a search over single rows.

Pieces of one length are interchangeable, and so are rows with equal contents. The longest pieces
are placed first, each into the fullest rows in which it still fits, whole groups of rows at a time.
The time grows with the number of different lengths; only writing the result grows with the number
of pieces. The result follows from the lengths alone.
"""

from bisect import bisect_left, insort
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Numbers = NDArray[np.int64]


@dataclass(frozen=True)
class _Group:
    """A number of rows with equal contents: (length, how many pieces of it), ..."""

    rows: int
    content: tuple[tuple[int, int], ...]


def pack(lengths: Numbers, width: int) -> tuple[Numbers, Numbers]:
    """Pack pieces into rows of at most `width` tokens.

    lengths: of the pieces, each from 1 to `width`.
    Returns the pieces' numbers, row by row, and where each row begins in them (one more than rows).
    """
    order = np.argsort(-lengths, kind="stable")
    unlike, counts = np.unique(lengths, return_counts=True)
    falling, counts = unlike[::-1], counts[::-1]
    groups = _fill(falling.tolist(), counts.tolist(), width)
    first = dict(zip(falling.tolist(), (np.cumsum(counts) - counts).tolist(), strict=True))
    pieces, sizes = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
    for group in groups:
        columns = []
        for length, number in group.content:
            begin = first[length]
            first[length] = begin + group.rows * number
            columns.append(order[begin : first[length]].reshape(group.rows, number))
        laid = np.concatenate(columns, axis=1)
        pieces.append(laid.reshape(-1))
        sizes.append(np.full(group.rows, laid.shape[1], np.int64))
    return np.concatenate(pieces), np.cumsum(np.concatenate([[0], *sizes]))


def _fill(lengths: list[int], counts: list[int], width: int) -> list[_Group]:
    """Groups of rows that hold all pieces. lengths: falling."""
    rooms: list[int] = []  # free tokens of rows, rising
    by_room: dict[int, list[_Group]] = {}

    def keep(group: _Group, room: int) -> None:
        if not group.rows:
            return
        if room not in by_room:
            insort(rooms, room)
        by_room.setdefault(room, []).append(group)

    for length, count in zip(lengths, counts, strict=True):
        left = count
        while left:
            place = bisect_left(rooms, length)
            if place == len(rooms):
                room, group = width, _Group(left, ())  # as many new rows as could be needed
            else:
                room = rooms[place]
                group = by_room[room].pop()
                if not by_room[room]:
                    del by_room[room]
                    rooms.pop(place)
            each = room // length
            full = min(group.rows, left // each)
            keep(_with(group, full, length, each), room - length * each)
            left -= full * each
            rest = group.rows - full
            if left and rest:  # fewer pieces than one row can take
                keep(_with(group, 1, length, left), room - length * left)
                left, rest = 0, rest - 1
            if group.content:
                keep(_Group(rest, group.content), room)
    return [group for groups in by_room.values() for group in groups]


def _with(group: _Group, rows: int, length: int, number: int) -> _Group:
    return _Group(rows, (*group.content, (length, number)))
