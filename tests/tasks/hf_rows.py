"""The huggingface task on rows that a test makes itself: ragged, padded to one width, or packed."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from samecurve.core.determinism.data_order import Ids
from samecurve_products.text.huggingface.sections import HFData, HFModel
from samecurve_products.text.huggingface.torch_task import TorchHuggingFace

IGNORED = -100
Row = dict[str, NDArray[Any]]


def row_of(lengths: list[int], width: int, tokens: NDArray[np.int64]) -> Row:
    """A row of documents of these lengths, then padding; the first token of each is not counted."""
    used = sum(lengths)
    positions = np.concatenate([np.arange(n) for n in lengths] + [np.zeros(width - used, int)])
    numbers = [np.full(n, k, np.int32) for k, n in enumerate(lengths, 1)]
    documents = np.concatenate([*numbers, np.zeros(width - used, np.int32)])
    ids = np.where(documents > 0, tokens[:width], 0)
    labels = np.where((documents > 0) & (ids % 5 != 0), ids, IGNORED)  # some count nothing
    return {"input_ids": ids, "labels": labels, "positions": positions, "documents": documents}


class Documents:
    """Row i has one document (or up to three) of lengths that follow from i."""

    def __init__(self, first: int, count: int, *, packed: bool, width: int = 16) -> None:
        self.first, self.count, self.packed, self.width = first, count, packed, width

    def __len__(self) -> int:
        return self.count

    def lengths(self, i: int) -> list[int]:
        random = np.random.default_rng(self.first + i)
        if not self.packed:
            return [int(random.integers(3, self.width + 1))]
        return [int(n) for n in random.integers(2, self.width // 3 + 1, 3)]

    def row(self, i: int) -> Row:
        tokens = np.random.default_rng([self.first, i]).integers(1, 60, self.width)
        return row_of(self.lengths(i), self.width, tokens)

    def __getitem__(self, ids: Ids) -> Row:
        rows = [self.row(int(i)) for i in ids]
        return {name: np.stack([row[name] for row in rows]) for name in rows[0]}


class Padded(TorchHuggingFace):
    Model, Data = HFModel, HFData
    packed = False

    def train_data(self) -> Any:
        return Documents(0, 23, packed=self.packed)

    def eval_data(self) -> Any:
        return Documents(1000, 7, packed=self.packed)

    def fingerprint(self) -> str:
        return type(self).__name__


class Packed(Padded):
    packed = True


class Ragged(Padded):
    """Each microbatch is padded to its own longest row."""

    def collate(self, samples: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
        width = max(int((sample["documents"] > 0).sum()) for sample in samples)
        return {name: np.stack([sample[name][:width] for sample in samples]) for name in samples[0]}


__all__ = ["Packed", "Padded", "Ragged"]
