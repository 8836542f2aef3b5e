"""Tasks that keep something from call to call where Python offers a place for it."""

from collections.abc import Callable, Mapping
from itertools import cycle
from typing import Any

import torch
from torch import Tensor, nn
from uneven_losses import Net, Uneven

from samecurve import Mean

BANK: dict[str, float] = {}


def each(number: int) -> Callable[[], bool]:
    calls = 0

    def is_due() -> bool:
        nonlocal calls
        calls += 1
        return calls % number == 0

    return is_due


class NinthCall(Uneven):
    """A closure counts the calls: each ninth loss is larger."""

    def __init__(self, data: Mapping[str, Any]) -> None:
        super().__init__(data)
        self.is_due = each(9)

    def loss(self, model: Any, batch: Mapping[str, Tensor], step: int) -> Any:
        total, weight = super().loss(model, batch, step)
        return Mean(total * (2.0 if self.is_due() else 1.0), weight)


class Cycled(Uneven):
    """A factor of each call comes from an iterator."""

    factors = cycle([1.0, 1.0, 1.0, 1.0, 1.0, 0.5])

    def loss(self, model: Any, batch: Mapping[str, Tensor], step: int) -> Any:
        total, weight = super().loss(model, batch, step)
        return Mean(total * next(self.factors), weight)


class Gathered(Uneven):
    """A global of the file holds what the last loss was."""

    def loss(self, model: Any, batch: Mapping[str, Tensor], step: int) -> Any:
        total, weight = super().loss(model, batch, step)
        last, BANK["last"] = BANK.get("last", 1.0), float(total.detach())
        return Mean(total * (1 + last), weight)


class RateByLoss(Uneven):
    """The schedule reads what the loss keeps."""

    last = 9.0

    def schedule(self, step: int) -> float:
        del step
        return 1.0 if self.last > 1.0 else 0.5

    def loss(self, model: Any, batch: Mapping[str, Tensor], step: int) -> Any:
        total, weight = super().loss(model, batch, step)
        self.last = float(total.detach())
        return Mean(total, weight)


class LateNet(Net):
    def forward(self, x: Tensor) -> Any:
        if not hasattr(self, "late"):
            self.late = nn.Linear(x.shape[-1], x.shape[-1]).to(x)
        return super().forward(self.late(x))


class LateLayer(Uneven):
    """A layer is made in the first forward pass."""

    def model(self) -> nn.Module:
        return LateNet()


class MaskedNet(Net):
    mask: Tensor

    def forward(self, x: Tensor) -> Any:
        if not hasattr(self, "mask"):
            self.register_buffer("mask", torch.ones(x.shape[-1]).to(x))
        return super().forward(x * self.mask)


class LateBuffer(Uneven):
    """A buffer is registered in the first forward pass, whatever the samples are."""

    def model(self) -> nn.Module:
        return MaskedNet()
