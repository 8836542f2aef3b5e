"""Lines of unlike length, other ones in each epoch, padded by the task's own collate()."""

from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import Dataset

from samecurve import Mean, Shards, sample_rng

KINDS, WIDTH = 13, 6


def line(index: int, epoch: int) -> np.ndarray:
    """3 to 11 tokens of a line that is known by its index, some of them changed in each epoch."""
    rng = sample_rng(index, epoch, seed=1)
    tokens = (np.arange(3 + index * 7 % 9) * (index + 2)) % KINDS
    changed = rng.random(len(tokens)) < 0.2
    return np.where(changed, rng.integers(KINDS, size=len(tokens)), tokens)[epoch % 2 :]


class Items(Dataset[Any]):
    def __init__(self, first: int, count: int) -> None:
        self.first, self.count = first, count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int, epoch: int = 0) -> Any:
        return torch.from_numpy(line(self.first + index, epoch))


class Source:
    """The same lines, many at once; lines of about one length meet in a microbatch."""

    def __init__(self, first: int, count: int) -> None:
        self.first, self.count = first, count
        self.row_lengths = [len(line(first + index, 0)) for index in range(count)]

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, ids: Any, epoch: int = 0) -> dict[str, Any]:
        return {"tokens": [line(self.first + i, epoch) for i in ids]}


class Reader(nn.Module):
    """Each position sees the mean of those before it."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(KINDS, WIDTH, dtype=torch.float64)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, dtype=torch.float64) for _ in "ab")
        self.head = nn.Linear(WIDTH, KINDS, dtype=torch.float64)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            places = torch.arange(1, x.shape[1] + 1, dtype=x.dtype)
            x = x + torch.tanh(layer(x.cumsum(1) / places[:, None]))
        logits: torch.Tensor = self.head(x)
        return logits


class Ragged:
    def __init__(self, model: Any, data: Any) -> None:  # noqa: ARG002 - given by name
        self.kind = Source if data.get("columns") else Items
        self.shards = data.get("shards")

    def model(self) -> nn.Module:
        return Reader()

    def loss(self, model: Any, batch: Any) -> Mean:
        tokens, labels = batch["tokens"], batch["labels"]
        logits = model(tokens).transpose(1, 2)
        total = nn.functional.cross_entropy(logits, labels, reduction="sum")
        return Mean(total, (labels != -100).sum())

    def metrics(self, model: Any, batch: Any) -> dict[str, Mean]:
        right = model(batch["tokens"]).argmax(-1) == batch["labels"]
        return {"accuracy": Mean(right.sum(), (batch["labels"] != -100).sum())}

    def collate(self, samples: list[Any]) -> dict[str, Any]:
        lines = [sample["tokens"] if isinstance(sample, dict) else sample for sample in samples]
        lines = [torch.as_tensor(one) for one in lines]
        pad = nn.utils.rnn.pad_sequence
        return {
            "tokens": pad([one[:-1] for one in lines], batch_first=True),
            "labels": pad([one[1:] for one in lines], batch_first=True, padding_value=-100),
        }

    def train_data(self) -> Any:
        if self.shards:
            return Shards(self.shards, decode=lambda row, epoch: line(row["index"], epoch))
        return self.kind(0, 23)

    def eval_data(self) -> Any:
        return self.kind(100, 7)


class Counted(Ragged):
    """The weight counts what is padded."""

    def loss(self, model: Any, batch: Any) -> Mean:
        return Mean(super().loss(model, batch).sum, batch["labels"].numel())


class Meaned(Ragged):
    """The fault that ragged rows bring to light: a mean over each microbatch's tokens."""

    def loss(self, model: Any, batch: Any) -> Mean:
        total, weight = super().loss(model, batch)
        rows = len(batch["tokens"])
        return Mean(total / weight * rows, rows)
