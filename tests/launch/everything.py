"""A user's task whose model has all that weights can be: complex, frozen, tied, and a buffer with
infinities. In a file of its own, as a user's is.
"""

from typing import Any

import numpy as np
import torch
from torch import nn

from samecurve import Mean


class Filter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(5, dtype=torch.complex64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = torch.fft.irfft(torch.fft.rfft(x) * self.weight, n=8)
        return found


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.filter, self.into, self.out = (
            Filter(),
            nn.Linear(8, 8, bias=False),
            nn.Linear(8, 8, bias=False),
        )
        self.out.weight = self.into.weight
        self.scale = nn.Parameter(torch.rand(8), requires_grad=False)
        self.register_buffer("mask", torch.full((2, 2), float("-inf")).triu(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.out(
            torch.tanh(self.into(self.filter(x.to(self.scale.dtype) * self.scale)))
        )
        return found


class Everything:
    def model(self) -> nn.Module:
        return Net()

    def loss(self, model: Any, batch: Any) -> Mean:
        return Mean((model(batch["x"]) - batch["x"]).square().sum(), len(batch["x"]))

    def train_data(self) -> Any:
        return Rows()


class Rows:
    def __len__(self) -> int:
        return 40

    def __getitem__(self, ids: Any) -> dict[str, Any]:
        return {"x": np.stack([np.random.default_rng(int(i)).normal(size=8) for i in ids])}
