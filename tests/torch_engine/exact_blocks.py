"""A model of all that sums of shards have to get right: a block that is called seldom, or twice
(kind "repeated"), complex and shared weights, single numbers, rows that no number of shards
divides, frozen blocks, dropout; a weight without numbers and single complex ones (kind "empty").
"""

from typing import Any

import torch
from layouts import Source
from torch import nn
from torch.utils.checkpoint import checkpoint

from samecurve import Mean


class Spectral(nn.Module):
    """A complex weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(7, dtype=torch.complex64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        turned = torch.fft.fft(x.to(self.weight.real.dtype)) * self.weight
        back: torch.Tensor = torch.fft.ifft(turned).real.to(x.dtype).clone()
        return back


class Block(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.up, self.down = nn.Linear(7, 11), nn.Linear(11, 7)
        self.norm = nn.LayerNorm(7)
        self.spectral = Spectral()
        self.scale = nn.Parameter(torch.tensor(0.5))
        if kind == "empty":
            self.turn = nn.Parameter(torch.tensor(0.5 + 0.1j))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        turned = self.spectral(x)
        hidden = torch.tanh(self.up(self.norm(x)))
        if self.kind == "reentrant":
            first = checkpoint(self.down, hidden, use_reentrant=True)
            moved = checkpoint(self.down, torch.tanh(self.up(first)), use_reentrant=True)
        else:
            moved = self.down(hidden)
        found: torch.Tensor = x + self.scale * moved + 0.1 * turned
        if self.kind == "empty":
            found = found + x * self.turn.real + moved * self.turn.imag
        return found


class Net(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        if kind == "empty":
            self.empty = nn.Parameter(torch.zeros(0, 7))
        self.begin = nn.Linear(8, 7)
        self.table = nn.Embedding(5, 7)
        self.blocks = nn.ModuleList([Block(kind) for _ in range(3)])
        self.frozen = nn.ModuleList([nn.Linear(7, 7) for _ in range(2)]).requires_grad_(False)
        self.drop = nn.Dropout(0.2)
        self.gain = nn.Parameter(torch.tensor(1.0))
        self.some = nn.Parameter(torch.randn(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.to(self.begin.weight.dtype)
        seldom = bool(x[0, 0] > 0)
        x = self.begin(x) + self.table((x[:, 0] > 0.5).long())
        if self.kind == "empty":
            x = x + self.empty.sum(0)
        first, second, third = self.blocks
        x = first(x)
        for block in self.frozen:
            x = block(x)
        if seldom or self.kind == "repeated":
            x = second(x)
        x = self.drop(third(third(x) if self.kind == "repeated" else x))
        found = self.gain * nn.functional.linear(x, self.table.weight[:2])
        return found + self.some if seldom else found


class Blocks:
    def __init__(self, model: Any, data: Any) -> None:  # noqa: ARG002 - given by name
        self.fields = model

    def model(self) -> nn.Module:
        return Net(self.fields.get("kind", ""))

    def loss(self, model: Any, batch: Any) -> Mean:
        found = nn.functional.cross_entropy(model(batch["x"]), batch["y"].long(), reduction="sum")
        return Mean(found, len(batch["x"]))

    def train_data(self) -> Source:
        return Source()
