"""Windows of a token file, as next-token samples.

The file is memory-mapped; a batch is one vectorised gather.
"""

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from samecurve.core.determinism.data_order import Ids

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
