"""Tasks for tests of layouts, in a file of their own as a user's are."""

from typing import Any

import numpy as np
import torch
from torch import nn

from samecurve import Mean


class Source:
    def __len__(self) -> int:
        return 64

    def __getitem__(self, ids: Any) -> dict[str, Any]:
        rows = np.stack([np.random.default_rng(int(i)).normal(size=8) for i in ids]).astype(
            np.float32
        )
        return {"x": rows, "y": rows.sum(1) > 0}


class Net(nn.Module):
    def __init__(self, *, frozen: bool, dropout: float) -> None:
        super().__init__()
        self.register_buffer(
            "mask", torch.full((2, 2), float("-inf")).triu(1)
        )  # as causal attention has it; its infinities are no fault
        self.layers = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])
        self.drop = nn.Dropout(dropout)
        self.head = nn.Linear(8, 2)
        self.spare = nn.Linear(8, 2)
        self.spare.requires_grad_(not frozen)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.to(self.head.weight.dtype)
        for layer in self.layers:
            x = self.drop(torch.relu(layer(x)))
        return self.head(x)  # type: ignore[no-any-return]


class Small:
    """model.frozen: whether what the loss does not use is frozen.

    model.dropout: its probability.
    """

    def __init__(self, model: Any, data: Any) -> None:  # noqa: ARG002 - given by name
        self.fields = model

    def model(self) -> nn.Module:
        return Net(
            frozen=self.fields.get("frozen", True),
            dropout=self.fields.get("dropout", 0.0),
        )

    def loss(self, model: Any, batch: Any) -> Mean:
        return Mean(
            nn.functional.cross_entropy(model(batch["x"]), batch["y"].long(), reduction="sum"),
            len(batch["x"]),
        )

    def train_data(self) -> Source:
        return Source()
