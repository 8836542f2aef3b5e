"""Tasks that bring their own optimizers, in a file of their own as a user's are.

model.kind: which.
"""

import copy
from typing import Any

import numpy as np
import torch
from torch import nn

from samecurve import Mean


class Rows:
    def __len__(self) -> int:
        return 64

    def __getitem__(self, ids: Any) -> dict[str, Any]:
        rows = np.stack([np.random.default_rng(int(i)).normal(size=8) for i in ids]).astype(
            np.float32
        )
        return {"x": rows, "y": rows.sum(1) > 0, "real": np.ones(len(ids), np.float32)}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            [nn.Linear(8, 8, dtype=torch.complex64), nn.Linear(8, 8, dtype=torch.complex64)]
        )
        self.scale = nn.Parameter(torch.ones(1))
        self.head = nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.complex(x, torch.zeros_like(x)).to(next(self.layers.parameters()).dtype)
        for layer in self.layers:
            x = layer(x)
            x = x / (1 + x.abs())
        return self.head(x.real * self.scale)  # type: ignore[no-any-return]


class Signs(torch.optim.Optimizer):
    """By the sign of the gradient, less and less.

    What it counts is a plain number; fault: what else it keeps.
    """

    def __init__(self, params: Any, lr: float, fault: str = "") -> None:
        super().__init__(params, {"lr": lr, "steps": 0})
        self.fault = fault

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        del closure
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                state["count"], state["pace"] = (
                    state.get("count", 0) + 1,
                    state.get("pace", 1.0) * 0.9,
                )
                parameter.sub_(parameter.grad.sign(), alpha=group["lr"] * state["pace"])
                if self.fault == "list":
                    state["all"] = [0]
                if self.fault == "narrow":
                    state["low"] = parameter.bfloat16()
            if self.fault == "group":
                group["steps"] += 1
        if self.fault == "noise":
            torch.rand(1)
        if self.fault == "global":
            self.state[torch.zeros(1)] = {"norm": 1.0}


class SAM(torch.optim.SGD):
    """It asks for the loss anew at another place, and says so itself; step() has its default."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        assert closure is not None, "it was not provided"
        with torch.enable_grad():
            closure()
        super().step()


class Brings:
    """Its optimizer's learning rate is the config's."""

    def __init__(self, model: Any, data: Any) -> None:  # noqa: ARG002 - given by name
        self.kind = model.get("kind", "RAdam")

    def model(self) -> nn.Module:
        return Net()

    def loss(self, model: Any, batch: Any) -> Mean:
        return Mean(
            nn.functional.cross_entropy(model(batch["x"]), batch["y"].long(), reduction="sum")
            * batch["real"].mean(),
            len(batch["x"]),
        )

    def train_data(self) -> Rows:
        return Rows()

    def optimizer(self, params: Any, lr: float) -> Any:
        kind, _, fault = self.kind.partition(" ")
        if kind == "SAM":
            return SAM(params, lr)
        if kind == "Signs":
            return Signs(params, lr, fault)
        if kind == "Groups":  # biases at a tenth
            biases, rest = (
                [pair for pair in params if pair[0].endswith("bias") == bias]
                for bias in (True, False)
            )
            parts: list[dict[str, Any]] = [{"params": rest}, {"params": biases, "lr": lr / 10}]
            return torch.optim.RAdam(parts, lr=lr)
        if kind == "Some":
            return torch.optim.RAdam(params[1:], lr=lr)
        if kind == "Others":
            return torch.optim.RAdam([*params, ("mine", nn.Parameter(torch.ones(1)))], lr=lr)
        if kind == "Copies":
            return torch.optim.RAdam(copy.deepcopy(params), lr=lr)
        if kind == "None":
            return None
        if kind == "Raises":
            return torch.optim.RAdam(params, lr=lr, betas=(2, 2))
        return getattr(torch.optim, kind)(
            params, lr=lr, **({"fused": True} if fault == "fused" else {})
        )


class Elementwise(Brings):
    elementwise = True


class Fixed(Elementwise):
    """Its learning rate is its own."""

    def optimizer(self, params: Any) -> Any:  # type: ignore[override]
        return torch.optim.RAdam(params, lr=2e-2)
