"""A layer whose gradient comes in two parts, and weights of two number formats side by side."""

import torch
from layouts import Source
from torch import nn
from torch.utils.checkpoint import checkpoint

from samecurve import Mean


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.begin, self.inner, self.end = nn.Linear(8, 7), nn.Linear(7, 7), nn.Linear(7, 3)
        self.turn = nn.Parameter(torch.randn(7, dtype=torch.complex64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.begin(x.to(self.begin.weight.dtype))
        for _ in range(2):
            x = torch.tanh(checkpoint(self.inner, x, use_reentrant=True))
        logits: torch.Tensor = self.end(x + (torch.fft.fft(x) * self.turn).real)
        return logits


class InParts:
    def model(self) -> nn.Module:
        return Twice()

    def loss(self, model: nn.Module, batch: dict[str, torch.Tensor]) -> Mean:
        losses = nn.functional.cross_entropy(model(batch["x"]), batch["y"].long(), reduction="none")
        return Mean(losses.sum(), len(losses))

    def train_data(self) -> Source:
        return Source()
