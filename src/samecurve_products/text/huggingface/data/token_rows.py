"""Rows of tokens as samples, by id.

input_ids, labels (not shifted; -100 where nothing counts), positions (from 0 in each document) are
int64, documents (1, 2, ... within the row; 0 is padding) int32.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from samecurve.core.determinism.sample_keys import mix
from samecurve.seam import IGNORED, Ids
from samecurve_products.text.huggingface.data.row_layout import Rows
from samecurve_products.text.huggingface.data.tokenized_source import TokenizedSource

Numbers = NDArray[np.int64]

_STEP = np.uint64(0x9E3779B97F4A7C15)


class TokenRows:
    """Rows of tokenized documents.

    width: of every row, padded; None: rows are as long as their tokens, as lists of arrays that
        collate() pads.
    """

    def __init__(
        self,
        corpora: Sequence[TokenizedSource],
        rows: Rows,
        *,
        width: int | None,
        pad: int,
        known_by: str,
    ) -> None:
        self._corpora, self._rows = list(corpora), rows
        self._bases = np.cumsum([0, *(corpus.notes.num_tokens for corpus in corpora)])
        self._width, self._pad, self._known_by = width, pad, known_by

    def __len__(self) -> int:
        return len(self._rows.row) - 1

    @property
    def row_lengths(self) -> Numbers:
        """Tokens of each row."""
        ends = np.concatenate([[0], np.cumsum(self._rows.length)])
        return np.diff(ends[self._rows.row])

    def fingerprint(self) -> str:
        return self._known_by

    def first_addresses(self, ids: Ids) -> Numbers:
        """The address of each row's first token, among the tokens of all sources."""
        addresses: Numbers = self._rows.start[self._rows.row[np.asarray(ids)]]
        return addresses

    def __getitem__(self, ids: Ids) -> Mapping[str, Any]:
        ids = np.asarray(ids)
        first, last = self._rows.row[ids], self._rows.row[ids + 1]
        pieces, of_row, number = _ranges(first, last - first)
        start, length = self._rows.start[pieces], self._rows.length[pieces]
        addresses, of_piece, positions = _ranges(start, length)
        tokens, counts = self._read(addresses, of_piece, start)
        flat = {
            "input_ids": tokens,
            "labels": np.where(counts & (positions > 0), tokens, IGNORED),
            "positions": positions,
            "documents": (number[of_piece] + 1).astype(np.int32),
        }
        sizes = np.bincount(of_row, length, len(ids)).astype(np.int64)
        if self._width is None:
            ends = np.cumsum(sizes)[:-1]
            return {name: np.split(column, ends) for name, column in flat.items()}
        return padded(flat, sizes, self._width, self._pad)

    def _read(
        self, addresses: Numbers, of_piece: Numbers, start: Numbers
    ) -> tuple[Numbers, NDArray[np.bool_]]:
        """Tokens, and for each whether it counts in the loss."""
        source = (np.searchsorted(self._bases, start, side="right") - 1)[of_piece]
        tokens = np.empty(len(addresses), np.int64)
        counts = np.ones(len(addresses), bool)
        for number in np.unique(source):
            corpus, here = self._corpora[number], source == number
            places = addresses[here] - self._bases[number]
            tokens[here] = corpus.tokens[places]
            if corpus.loss_mask is not None:
                counts[here] = corpus.loss_mask[places]
        return tokens, counts


class RandomRows:
    """Random tokens for benchmarks, a pure function of the sample's id.

    first: id of the first sample, in the stream of all samples.
    """

    def __init__(self, count: int, width: int, vocab_size: int, first: int = 0) -> None:
        self._count, self._width, self._vocab_size, self._first = count, width, vocab_size, first

    def __len__(self) -> int:
        return self._count

    @property
    def row_lengths(self) -> Numbers:
        return np.full(self._count, self._width)

    def fingerprint(self) -> str:
        return f"random/{self._first}/{self._count}/{self._width}/{self._vocab_size}"

    def __getitem__(self, ids: Ids) -> Mapping[str, Any]:
        ids = np.asarray(ids) + self._first
        columns = np.arange(self._width)
        at = (ids[:, None] * self._width + columns).astype(np.uint64)
        tokens = (mix(at * _STEP + _STEP) >> np.uint64(11)) % np.uint64(self._vocab_size)
        tokens = tokens.astype(np.int64)
        return {
            "input_ids": tokens,
            "labels": np.where(columns > 0, tokens, IGNORED),
            "positions": np.broadcast_to(columns, tokens.shape).copy(),
            "documents": np.ones(tokens.shape, np.int32),
        }


def collate(samples: Sequence[Mapping[str, Any]], pad: int = 0) -> dict[str, NDArray[Any]]:
    """A batch of rows of unlike length, padded to the longest; numbers are one for each row."""
    sizes = np.array([len(sample["input_ids"]) for sample in samples])
    rows = {name: [sample[name] for sample in samples] for name in samples[0]}
    flat = {name: np.concatenate(rows[name]) for name in rows if np.ndim(rows[name][0])}
    numbers = {name: np.array(rows[name], np.int64) for name in rows if name not in flat}
    return {**padded(flat, sizes, int(sizes.max()), pad), **numbers}


def padded(
    flat: Mapping[str, NDArray[Any]], sizes: Numbers, width: int, pad: int
) -> dict[str, NDArray[Any]]:
    """Columns [rows, width] from columns in which rows lie one after another."""
    filling = {"input_ids": pad, "labels": IGNORED, "positions": 0, "documents": 0, "types": 0}
    real = np.arange(width) < sizes[:, None]
    columns = {}
    for name, values in flat.items():
        columns[name] = np.full(real.shape, filling[name], values.dtype)
        columns[name][real] = values
    return columns


def _ranges(first: Numbers, count: Numbers) -> tuple[Numbers, Numbers, Numbers]:
    """All numbers of the ranges [first, first + count), one range after another.

    Returns the numbers, the range that each is in, and its index in the range.
    """
    of_range = np.repeat(np.arange(len(count)), count)
    within = np.arange(len(of_range)) - (np.cumsum(count) - count)[of_range]
    return first[of_range] + within, of_range, within
