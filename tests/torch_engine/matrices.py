"""A task with parameters of every kind that an optimizer of whole matrices must tell apart, in a
file of its own as a user's is.
"""

from typing import Any

import numpy as np
import torch
from torch import nn

from samecurve import Mean

WORDS = 11


class Source:
    """27 rows of six words: batches of 10 leave a tail of 7."""

    def __len__(self) -> int:
        return 27

    def __getitem__(self, ids: Any) -> dict[str, Any]:
        words = [np.random.default_rng(int(i)).integers(WORDS, size=6) for i in ids]
        return {"words": np.stack(words), "next": np.stack(words)[:, ::-1].copy()}


class Block(nn.Module):
    """Matrices whose rows no number of ranks divides, one of a single row, and three experts."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, inner)
        self.down = nn.Linear(inner, width)
        self.gate = nn.Linear(width, 1, bias=False)
        self.experts = nn.Parameter(torch.randn(3, width, inner - 2) / 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = self.norm(x)
        mixed = torch.einsum("bti,eij->btj", inner, self.experts).tanh().sum(-1, keepdim=True)
        x = x + self.down(torch.tanh(self.up(inner))) + mixed
        return x * torch.sigmoid(self.gate(inner))


class Net(nn.Module):
    def __init__(self, width: int = 8, inner: int = 7) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, width)
        self.layers = nn.ModuleList([Block(width, inner), Block(width, inner)])
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.head = nn.Linear(width, WORDS)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        x = self.embed(words)
        for layer in self.layers:
            x = layer(x)
        logits: torch.Tensor = self.head(x * self.scale)
        return logits


class Matrices:
    """model: width and inner, of its layers."""

    def __init__(self, model: Any) -> None:
        self.sizes = dict(model)

    def model(self) -> nn.Module:
        return Net(**self.sizes)

    def train_data(self) -> Source:
        return Source()

    def loss(self, model: Any, batch: Any) -> Mean:
        logits = model(batch["words"]).flatten(0, 1)
        labels = batch["next"].flatten()
        return Mean(nn.functional.cross_entropy(logits, labels, reduction="sum"), len(labels))
