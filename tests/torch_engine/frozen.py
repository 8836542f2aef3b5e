"""Tasks whose models are frozen but for adapters.

The model is built as a UNet is: layers inside of stages, which are called in another order than
they are registered in, with connections that skip stages.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import nn

from samecurve.core.determinism import Mean
from samecurve.core.determinism.data_order import Ids
from samecurve.core.protocols import Arrays

WIDTH = 24
INPUTS = 16


class Lora(nn.Module):
    """A frozen linear layer, and small matrices beside it."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.base = nn.Linear(inputs, outputs).requires_grad_(False)
        self.a = nn.Parameter(torch.randn(3, inputs) / inputs**0.5)
        self.b = nn.Parameter(0.1 * torch.randn(outputs, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.base(x) + F.linear(F.linear(x, self.a), self.b)
        return result


class Product(torch.autograd.Function):
    """x W^T. Backward asks for the weight first, then for x, which a checkpoint has to compute."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(weight, x)
        return x @ weight.T

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        weight, x = ctx.saved_tensors
        return gradients[0].to(weight.dtype) @ weight + 0 * x, None


class Layer(nn.Module):
    """A residual layer; its inner layers are two parts of a Sequential."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH).requires_grad_(False)
        self.scale = nn.Parameter(torch.ones(WIDTH), requires_grad=False)
        self.gate = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.mix = nn.Linear(WIDTH, WIDTH, bias=False).requires_grad_(False)
        nn.init.orthogonal_(self.mix.weight)
        self.inner = nn.Sequential(
            Lora(WIDTH, 2 * WIDTH), nn.GELU(), nn.Dropout(0.1), Lora(2 * WIDTH, WIDTH)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        product: Any = Product.apply
        x = x + self.scale * self.inner(self.norm(x)) * torch.sigmoid(self.gate(x))
        mixed: torch.Tensor = product(x, self.mix.weight)
        return mixed


class Stage(nn.Module):
    """Layers, and a skip that they are given."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer() for _ in range(count)])

    def forward(self, x: torch.Tensor, skip: torch.Tensor | None = None) -> torch.Tensor:
        x = x if skip is None else x + skip
        for layer in self.layers:
            x = layer(x)
        return x


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inlet = nn.Linear(INPUTS, WIDTH).requires_grad_(False)
        self.down = nn.ModuleList([Stage(2), Stage(3)])
        self.up = nn.ModuleList([Stage(2), Stage(1)])
        self.middle = Stage(2)
        self.outlet = nn.Linear(WIDTH, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = first = self.inlet(x)
        skips = [x := stage(x) for stage in self.down]
        x = self.middle(x)
        for stage, skip in zip(self.up, reversed(skips), strict=True):
            x = stage(x, skip)
        result: torch.Tensor = self.outlet(x + first)
        return result


class Points:
    """Rows that follow from their numbers.

    Their arrays begin at multiples of 64 bytes, as torch's own do: numpy's begin anywhere, and
    kernels add unaligned numbers in another order.
    """

    def __init__(self, seed: int, count: int) -> None:
        rows = np.random.default_rng(seed).standard_normal((count, INPUTS))
        self._x = rows.astype(np.float32)

    def __len__(self) -> int:
        return len(self._x)

    def __getitem__(self, ids: Ids) -> Mapping[str, Any]:
        x = self._x[ids]
        return {"x": _aligned(x), "y": _aligned(np.sin(x).sum(1, keepdims=True))}


def _aligned(array: NDArray[np.float32]) -> NDArray[np.float32]:
    room = np.empty(array.size + 16, np.float32)
    first = -room.ctypes.data % 64 // 4
    result = room[first : first + array.size].reshape(array.shape)
    result[:] = array
    return result


class Adapted:
    """The task. Its frozen weights are those of the seed, and checkpoints leave them out."""

    frozen_base = True
    metric_names = ("error",)
    build: type[nn.Module] = Net

    def model(self) -> nn.Module:
        return self.build()

    def loss(self, model: nn.Module, batch: Arrays) -> Mean:
        return Mean((model(batch["x"]) - batch["y"]).square().sum(), len(batch["x"]))

    def metrics(self, model: nn.Module, batch: Arrays) -> Mapping[str, Mean]:
        return {"error": self.loss(model, batch)}

    def train_data(self) -> Points:
        return Points(0, 23)

    def eval_data(self) -> Points:
        return Points(1, 9)

    def sample(self, model: nn.Module, seed: int) -> Sequence[str]:
        x = torch.ones(1, INPUTS, device=next(model.parameters()).device) * seed
        return [float(model(x.to(next(model.parameters()).dtype)).sum()).hex()]


class Kept(Adapted):
    """Checkpoints hold the frozen weights, too."""

    frozen_base = False


class Trained(Adapted):
    """Nothing is frozen."""

    def model(self) -> nn.Module:
        return super().model().requires_grad_(True)
