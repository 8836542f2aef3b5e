"""A model so small that a step is mostly what a trainer adds to it, and its data: 4,096 rows of 16
numbers, 4 classes.
"""

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import nn

from samecurve import Mean


class Rows:
    def __init__(self) -> None:
        drawn = np.random.default_rng(0)
        self.x = drawn.standard_normal((4096, 16), dtype=np.float32)
        self.y = drawn.integers(0, 4, 4096)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, ids: NDArray[np.int64]) -> dict[str, NDArray[np.generic]]:
        return {"x": self.x[ids], "y": self.y[ids]}


class Tiny:
    def model(self) -> nn.Module:
        return nn.Sequential(
            nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 4)
        )

    def loss(self, model: nn.Module, batch: dict[str, torch.Tensor]) -> Mean:
        return Mean(
            F.cross_entropy(model(batch["x"]), batch["y"], reduction="sum"), len(batch["y"])
        )

    def train_data(self) -> Rows:
        return Rows()
