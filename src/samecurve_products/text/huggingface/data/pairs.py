"""Rows of texts that belong together, by id: an anchor, its positive, and perhaps a negative.

input_ids int64 [texts, width], documents int32 [texts, width] (1; 0 is padding).
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from samecurve.seam import IGNORED, Ids
from samecurve_products.text.huggingface.data.token_rows import TokenRows, padded
from samecurve_products.text.huggingface.data.tokenized_source import TokenizedSource, has_column

Numbers = NDArray[np.int64]


class PairRows:
    """Rows of texts that belong together.

    rows: without padding; a label marks the begin of the second text, and of the third. longest:
    tokens of a text at most; a longer text keeps its beginning and its last `suffix` tokens.
    """

    def __init__(self, rows: TokenRows, *, longest: int, suffix: int) -> None:
        self._rows, self._longest, self._suffix = rows, longest, suffix

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def row_lengths(self) -> Numbers:
        """The number of tokens in all texts of each row."""
        return self._rows.row_lengths

    def fingerprint(self) -> str:
        return f"{self._rows.fingerprint()}/pairs"

    def __getitem__(self, ids: Ids) -> Mapping[str, Any]:
        columns = self._rows[ids]
        texts = [
            [self._cut(text) for text in np.split(tokens, np.flatnonzero(labels != IGNORED))]
            for tokens, labels in zip(columns["input_ids"], columns["labels"], strict=True)
        ]
        filled = [_filled(row, 0) for row in texts]
        return {name: [row[name] for row in filled] for name in ("input_ids", "documents")}

    def _cut(self, text: Numbers) -> Numbers:
        if len(text) <= self._longest:
            return text
        begin = self._longest - min(self._suffix, self._longest - 1)
        return np.concatenate([text[:begin], text[len(text) - (self._longest - begin) :]])


def count_texts(corpora: Sequence[TokenizedSource]) -> int:
    """How many texts a row has: 2 or 3. UserError: some rows have a negative, and others none."""
    has_negative = has_column(
        corpora,
        "negative",
        having="triple",
        lacking="pair",
        reason="a batch of both has no one loss",
    )
    return 3 if has_negative else 2


def collate_pairs(samples: Sequence[Mapping[str, Any]], pad: int = 0) -> dict[str, NDArray[Any]]:
    """A batch [rows, texts, width], padded to its longest text."""
    texts = [
        text[real > 0]
        for sample in samples
        for text, real in zip(sample["input_ids"], sample["documents"], strict=True)
    ]
    columns = _filled(texts, pad)
    shape = len(samples), -1, columns["documents"].shape[1]
    return {name: column.reshape(shape) for name, column in columns.items()}


def _filled(texts: Sequence[Numbers], pad: int) -> dict[str, NDArray[Any]]:
    """Texts padded to the longest: [texts, width]."""
    sizes = np.array([len(text) for text in texts])
    flat = {"input_ids": np.concatenate(list(texts)), "documents": np.ones(sizes.sum(), np.int32)}
    return padded(flat, sizes, int(sizes.max()), pad)
