"""Models that train.exact has to do with: sound ones of odd form, and ones whose result would
follow the devices.
"""

import random
from typing import Any

import torch
from layouts import Source
from torch import nn
from torch.utils.checkpoint import checkpoint

from samecurve import Mean


class Net(nn.Module):
    mean: torch.Tensor

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.layer, self.head = nn.Linear(8, 8), nn.Linear(8, 2)
        self.table = nn.Embedding(4, 8, sparse=kind == "sparse")
        self.turned = nn.Parameter(torch.randn(8, 4).t())
        self.some = nn.Parameter(torch.randn(2))
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.to(self.head.weight.dtype)
        if self.kind == "running":
            self.mean.mul_(0.9).add_(x.detach().mean(0))
        if self.kind == "random":
            x = x * (1 + random.random())
        seldom = bool(x[0, 0] > 0)
        x = x + self.table((x[:, 0] > 0).long()) + self.turned.sum() * 0.1
        for _ in range(2):
            x = x + (
                checkpoint(self.layer, x, use_reentrant=True)
                if self.kind == "reentrant"
                else self.layer(x)
            )
        found: torch.Tensor = self.head(x)
        return found + self.some if seldom else found


class Odd:
    def __init__(self, model: Any, data: Any) -> None:  # noqa: ARG002 - given by name
        self.fields = model

    def model(self) -> nn.Module:
        return Net(self.fields.get("kind", ""))

    def loss(self, model: Any, batch: Any) -> Mean:
        return Mean(
            nn.functional.cross_entropy(model(batch["x"]), batch["y"].long(), reduction="sum"),
            len(batch["x"]),
        )

    def train_data(self) -> Source:
        return Source()
