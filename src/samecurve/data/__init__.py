"""Sources of samples: windows of a token file, for the next token; parts of another source; and
which of a task's sources an evaluation reads.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from samecurve.core.determinism.data_order import Ids
from samecurve.core.protocols import Held, RowReader, Source, Task

_SORTED = 1 << 20  # numbers at most of an array whose most frequent number is looked for
IGNORED = -100  # the label of a place that has no next token


class TokenWindows:
    """Samples of `length` tokens; labels are the tokens shifted by one.

    Sample i begins at token first + i*length of the file. The last window may be short: its rest
    has the label IGNORED. So each token but the first is predicted once an epoch.
    Rows: tokens int64 [length], labels int64 [length].
    """

    def __init__(self, path: Path, dtype: str, first: int, last: int, length: int) -> None:
        self._tokens: NDArray[Any] = np.memmap(path, dtype=dtype, mode="r")[first:last]
        self._length = length
        self._steps = np.arange(length + 1)

    def __len__(self) -> int:
        return window_count(len(self._tokens), self._length)

    def __getitem__(self, ids: Ids) -> dict[str, NDArray[np.int64]]:
        at = np.asarray(ids)[:, None] * self._length + self._steps
        end = len(self._tokens)
        if at.size and at[:, -1].max() < end:
            rows = self._tokens[at].astype(np.int64)
            return {"tokens": rows[:, :-1], "labels": rows[:, 1:]}
        rows = self._tokens[np.minimum(at, end - 1)].astype(np.int64)
        return {"tokens": rows[:, :-1], "labels": np.where(at[:, 1:] < end, rows[:, 1:], IGNORED)}


def window_count(tokens: int, length: int) -> int:
    """The number of windows of `length` predictions in this many tokens; the last may be short."""
    return max(0, -(-(tokens - 1) // length))


def spread_out(source: Source, count: int | None) -> Source | None:
    """The held-out samples that an evaluation reads; None: there are none.

    count: how many at most; None: all
    """
    if not len(source) or count == 0:
        return None
    return Spread(source, min(len(source), count or len(source)))


class Spread:
    """`count` samples spread evenly over a source."""

    def __init__(self, source: Source, count: int) -> None:
        self._source, self._count = source, count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, ids: Ids) -> Mapping[str, Any]:
        return self._source[np.asarray(ids) * len(self._source) // self._count]


def unlike_rows(rows: Mapping[str, NDArray[Any]], count: int, most: int) -> list[int]:
    """Choose at most `most` of `count` rows for the split check; their numbers, ascending.

    The emptiest rows come first, as the loss of a sample with nothing to count often differs; up to
    half of the places. Then rows that have a whole number (a class, a domain) that no earlier row
    has: a loss may weigh a rare class differently, which shows only if one of its samples is tried.
    """
    columns = [
        array.tolist() for array in rows.values() if array.ndim == 1 and array.dtype.kind in "iub"
    ]
    seen: list[set[int]] = [set() for _ in columns]
    chosen: list[int] = list(dict.fromkeys(_emptiest_rows(rows, count)))[: most // 2]
    for row in chosen:
        for column, values in zip(columns, seen, strict=True):
            values.add(column[row])
    for row in range(count):
        is_new = [column[row] not in values for column, values in zip(columns, seen, strict=True)]
        if any(is_new) and row not in chosen and len(chosen) < most:
            chosen.append(row)
            for column, values in zip(columns, seen, strict=True):
                values.add(column[row])
    others = (row for row in range(count) if row not in set(chosen))
    chosen += [row for row, _ in zip(others, range(most - len(chosen)), strict=False)]
    return sorted(chosen)


def _emptiest_rows(rows: Mapping[str, NDArray[Any]], count: int) -> Iterator[int]:
    """The rows with the fewest whole numbers that are not the array's most frequent one (padding,
    the class "no object"), or not negative (labels of -100); then those with the most zeros.
    """
    whole = [a for a in rows.values() if a.dtype.kind in "iub" and a.ndim > 1 and a.size]
    ways = [a != _most_frequent(a) for a in whole if a.size <= _SORTED]
    ways += [a >= 0 for a in whole if a.dtype.kind == "i"]
    ways += [a != 0 for a in rows.values() if a.dtype.kind == "f" and a.size]
    for is_filled in ways:
        filled = is_filled.reshape(count, -1).sum(1)
        if filled.min() < filled.max():
            yield int(filled.argmin())


def _most_frequent(array: NDArray[Any]) -> Any:
    ordered = np.sort(array, axis=None)  # np.unique would import numpy's masked arrays
    begins = np.flatnonzero(np.concatenate([[True], ordered[1:] != ordered[:-1]]))
    return ordered[begins[np.diff(np.append(begins, len(ordered))).argmax()]]


def held_out_data(task: Task, evaluate: str | None) -> dict[Held, RowReader | None]:
    """The data of evaluations.

    evaluate: what a start that only evaluates reads, "held-out", "train" or "test"; None: it trains
    """
    test = task.test_data()
    evaluation = task.eval_data()
    if evaluate == "train":
        evaluation = task.train_data()
    if evaluate == "test":
        evaluation = test
    return {"eval": evaluation, "test": test}
