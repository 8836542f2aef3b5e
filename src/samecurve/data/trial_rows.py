"""The choice of the rows of the first steps that the split check tries."""

from collections.abc import Mapping
from typing import Any

from numpy.typing import NDArray

LOOKED_AT = 128  # samples among which those are chosen


def unlike_rows(rows: Mapping[str, NDArray[Any]], count: int, most: int) -> list[int]:
    """Numbers of at most so many of `count` rows, in their order: first those with a whole number
    (a class, a domain) that no row before has, then the first ones. A rare class may weigh
    otherwise than the others, which shows only where one of its samples is tried.
    """
    columns = [
        array.tolist() for array in rows.values() if array.ndim == 1 and array.dtype.kind in "iub"
    ]
    seen: list[set[int]] = [set() for _ in columns]
    chosen: list[int] = []
    for row in range(count):
        is_new = [column[row] not in values for column, values in zip(columns, seen, strict=True)]
        if any(is_new) and len(chosen) < most:
            chosen.append(row)
            for column, values in zip(columns, seen, strict=True):
                values.add(column[row])
    others = (row for row in range(count) if row not in set(chosen))
    chosen += [row for row, _ in zip(others, range(most - len(chosen)), strict=False)]
    return sorted(chosen)
