"""Losses that nothing is wrong with until the weights have moved, in a file of their own as a
user's are.
"""

import os
from typing import Any

import numpy as np
import torch
from torch import nn

from samecurve import Mean


class Rows:
    def __len__(self) -> int:
        return 40

    def __getitem__(self, ids: Any) -> dict[str, Any]:
        x = np.stack([np.random.default_rng(int(i)).normal(size=6) for i in ids])
        return {"x": x, "y": np.tanh(x.sum(1))}


class Net(nn.Module):
    begun: torch.Tensor
    head: nn.Linear

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(8, 1)
        self.body = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), self.head)
        self.spare = nn.Parameter(torch.ones(()))
        self.register_buffer("begun", self.head.weight.detach().clone())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.body(x)[:, 0] + 0 * self.spare
        return out

    @property
    def has_moved(self) -> bool:
        return not torch.equal(self.head.weight, self.begun)


class Plain:
    def model(self) -> nn.Module:
        return Net()

    def train_data(self) -> Rows:
        return Rows()

    def loss(self, model: Any, batch: Any) -> Mean:
        out = model(batch["x"])
        if model.has_moved:
            out = self.late(out, model)
        return Mean(((out - batch["y"]) ** 2).sum(), len(out))

    def late(self, out: torch.Tensor, model: Any) -> torch.Tensor:
        del model
        return out


class Again(Plain):
    """Other last digits each time."""

    def late(self, out: torch.Tensor, _model: Any) -> torch.Tensor:
        return out * (1 + 1e-14 * os.urandom(1)[0])


class Parts(Plain):
    """Samples see each other."""

    def late(self, out: torch.Tensor, _model: Any) -> torch.Tensor:
        return out - 0.1 * out.mean()


class Rank(Plain):
    """Each process has its own."""

    def late(self, out: torch.Tensor, _model: Any) -> torch.Tensor:
        return out * (1 + 1e-4 * (os.getpid() % 1000))


class Write(Plain):
    """Through `.data`, which torch does not count, into a weight that nothing depends on yet."""

    def late(self, out: torch.Tensor, model: Any) -> torch.Tensor:
        model.spare.data += 1
        return out


class Counting(Plain):
    """A number that a trial has to put back."""

    def __init__(self) -> None:
        self.calls = 0

    def loss(self, model: Any, batch: Any) -> Mean:
        self.calls += 1
        return super().loss(model, batch)
