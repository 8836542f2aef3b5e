"""The update of a step by the config's optimizer, and what of its state a checkpoint holds. A task's own: own.py."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch

from lockstep.core.config import Optimizer
from lockstep.core.protocols import Stored
from lockstep.on_torch.trained import Weight

_SLOTS = {"adamw": ("exp_avg", "exp_avg_sq"), "sgd": ("momentum_buffer",)}


class Update(Protocol):
    """What moves the weights, once a step."""

    def step(self, lr: float, finite: torch.Tensor) -> None:
        """One update from the gradients that weights see; none at all where `finite` is False."""
        ...

    def slots(self, weight: Weight) -> Mapping[str, torch.Tensor]:
        """Its state of one weight, by slot: tensors of what `weight.seen` is, or single numbers."""
        ...

    def shared(self) -> Iterator[tuple[str, torch.Tensor]]:
        """What it holds once for all weights, by a checkpoint's name."""
        ...

    def begin(self) -> None:
        """Make all slots exist, so that a checkpoint can fill them. What they, and the weights, hold afterwards is of no meaning."""
        ...

    def restored(self, saved: Stored, filled: Mapping[str, torch.Tensor]) -> None:
        """After slots() were filled from a checkpoint. filled: by the checkpoint's names."""
        ...


class Configured:
    """adamw or sgd, in groups of one learning rate and decay each. Fused, so that it leaves a step out on the device itself; its slots exist from the start."""

    def __init__(self, fields: Optimizer, trained: Sequence[Weight]) -> None:
        self._slots = _SLOTS[fields.name]
        groups = _grouped(fields, trained)
        self._optimizer: torch.optim.Optimizer
        if fields.name == "adamw":
            self._optimizer = torch.optim.AdamW(groups, lr=fields.lr, betas=fields.betas, eps=fields.eps, fused=True)
        else:
            self._optimizer = torch.optim.SGD(groups, lr=fields.lr, momentum=fields.momentum, fused=True)
        self._device = trained[0].seen.device
        self._steps = []
        for weight in trained:
            slots: dict[str, torch.Tensor] = {slot: torch.zeros_like(weight.seen) for slot in self._slots}
            if fields.name == "adamw":
                slots["step"] = torch.zeros((), dtype=torch.float32, device=weight.seen.device)
                self._steps.append(slots["step"])
            self._optimizer.state[weight.seen] = slots

    def step(self, lr: float, finite: torch.Tensor) -> None:
        for group in self._optimizer.param_groups:
            group["lr"] = lr * group["lr_scale"]
        fused: Any = self._optimizer
        fused.grad_scale = None
        fused.found_inf = (~finite).float().to(self._device)
        self._optimizer.step()

    def slots(self, weight: Weight) -> Mapping[str, torch.Tensor]:
        state = self._optimizer.state[weight.seen]
        return {slot: state[slot] for slot in self._slots}

    def shared(self) -> Iterator[tuple[str, torch.Tensor]]:
        if self._steps:
            yield "optimizer/step", self._steps[0]

    def begin(self) -> None: ...

    def restored(self, saved: Stored, filled: Mapping[str, torch.Tensor]) -> None:
        for step in self._steps:
            step.fill_(float(saved["optimizer/step"]))


def _grouped(fields: Optimizer, trained: Sequence[Weight]) -> list[dict[str, Any]]:
    """Decay reaches matrices only, where no group of the config says otherwise."""
    found: dict[tuple[float, float], list[torch.Tensor]] = {}
    rules = fields.rules
    for weight in trained:
        rule = rules.of(weight.name, weight.parameter.ndim >= 2)
        found.setdefault((rule.lr_scale, rule.weight_decay), []).append(weight.seen)
    return [{"params": seen, "lr_scale": scale, "weight_decay": decay} for (scale, decay), seen in found.items()]
