"""Sources of samples: windows of a token file, for the next token; and a part of another source."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from samecurve.core.determinism.data_order import Ids
from samecurve.core.protocols import Source

IGNORED = -100  # the label of a place that has no next token


class TokenWindows:
    """Samples of `length` tokens; labels are the tokens shifted by one.

    Sample i begins at token first + i*length of the file. The last window may be short: its rest
    has the label IGNORED. So each token but the first is predicted exactly once an epoch.
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
