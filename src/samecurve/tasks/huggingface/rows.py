"""Rows of tokens as every objective takes them.

A row: input_ids int64 [width]; labels int64 [width], not shifted, IGNORED where nothing counts;
positions int64 [width], from 0 in each document; documents int32 [width], 0 where there is padding,
else the number of the document within the row, from 1.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from samecurve.core.determinism.data_order import Ids
from samecurve.core.protocols import Source


class RandomRows:
    """Random tokens, one document a row: row i is a function of i alone."""

    def __init__(self, first: int, count: int, length: int, vocab_size: int) -> None:
        self._first, self._count = first, count
        self._length, self._vocab_size = length, vocab_size

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, ids: Ids) -> dict[str, NDArray[Any]]:
        rows = [np.random.default_rng(self._first + int(i)) for i in ids]
        tokens = [row.integers(self._vocab_size, size=self._length) for row in rows]
        return one_document(np.stack(tokens).astype(np.int64))


class WindowRows:
    """Windows of a token file, each of them one document."""

    def __init__(self, windows: Source) -> None:
        self._windows = windows

    def __len__(self) -> int:
        return len(self._windows)

    def __getitem__(self, ids: Ids) -> Mapping[str, NDArray[Any]]:
        return one_document(self._windows[ids]["tokens"])


def one_document(tokens: NDArray[np.int64]) -> dict[str, NDArray[Any]]:
    """tokens: [rows, width], all of them real."""
    return {
        "input_ids": tokens,
        "labels": tokens,
        "positions": np.broadcast_to(np.arange(tokens.shape[1]), tokens.shape),
        "documents": np.ones(tokens.shape, np.int32),
    }
