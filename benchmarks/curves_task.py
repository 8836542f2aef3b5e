"""The model and data of benchmarks/curves.py, and the task that gives both to Samecurve.

The data are lines of text of unequal length. The model is a small convolutional reader with
dropout.
"""

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import nn

from samecurve import Mean

LENGTH, WIDTH, DEPTH = 40, 48, 3


class Lines:
    """Lines with sums; the model predicts the next character.

    ragged: 14 to 38 characters, padded to 40; else 28 each
    """

    def __init__(self, first: int, count: int, *, ragged: bool) -> None:
        self.first, self.count, self.ragged = first, count, ragged

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, ids: NDArray[np.int64]) -> dict[str, NDArray[np.int64]]:
        text = np.zeros((len(ids), LENGTH), np.int64)
        labels = np.full((len(ids), LENGTH), -100)
        for row, number in enumerate(int(self.first + i) for i in ids):
            codes = self._line(number).encode()
            text[row, : len(codes)] = list(codes)
            labels[row, : len(codes) - 1] = list(codes[1:])
        return {"text": text, "labels": labels, "ids": np.asarray(ids, np.int64)}

    def _line(self, number: int) -> str:
        a = number * 7919 % 1000
        if self.ragged:
            b = number * 104729 % 10 ** (number % 12)
            return f"{a} and {b} make {a + b}\n"
        b = number * 104729 % 10**6
        return f"{a:03d} and {b:06d} make {a + b:07d}\n"


class Reader(nn.Module):
    """[rows, 40] characters -> [rows, 40, 128] logits of the next."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(128, WIDTH), nn.Linear(WIDTH, 128)
        self.layers = nn.ModuleList(
            nn.Conv1d(WIDTH, WIDTH, 3, dilation=2**depth) for depth in range(DEPTH)
        )
        self.drop = nn.Dropout(dropout)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        x = self.embed(text).transpose(1, 2)
        for depth, layer in enumerate(
            self.layers
        ):  # padded on the left, so that only earlier characters are seen
            x = x + self.drop(F.gelu(layer(F.pad(x, (2 * 2**depth, 0)))))
        logits: torch.Tensor = self.head(x.transpose(1, 2))
        return logits


def loss_of(logits: torch.Tensor, labels: torch.Tensor, reduction: str) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction=reduction)


class Curves:
    def __init__(self, model: dict[str, Any], data: dict[str, Any]) -> None:
        self.fields, self.data = model, data

    def model(self) -> nn.Module:
        """The model with the same first weights as under the other trainers."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return Reader(self.fields["dropout"])

    def loss(self, model: nn.Module, batch: dict[str, torch.Tensor]) -> Mean:
        labels = batch["labels"]
        return Mean(loss_of(model(batch["text"]), labels, "sum"), (labels != -100).sum())

    def train_data(self) -> Lines:
        return Lines(0, self.data["samples"], ragged=self.data["ragged"])
