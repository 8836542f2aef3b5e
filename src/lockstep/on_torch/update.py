"""The update of a step by the config's optimizer, and what of its state a checkpoint holds. A task's own: own.py."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

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


@dataclass(frozen=True)
class _Group:
    """Weights of one learning rate (times the schedule's), decay and number format, with their state in the same order."""

    lr_scale: float
    weight_decay: float
    weights: list[Weight]


class Configured:
    """adamw or sgd by torch's fused kernels, which leave a step out on the device itself; their slots exist from the start.

    Called without torch.optim: its optimizers import torch._dynamo (2 s of every rank's start), and spend more of a small step than their kernels do.
    """

    def __init__(self, fields: Optimizer, trained: Sequence[Weight]) -> None:
        self._fields = fields
        self._groups = _grouped(fields, trained)
        self._device = trained[0].seen.device
        self._state: dict[int, dict[str, torch.Tensor]] = {}
        self._steps: dict[int, torch.Tensor] = {}
        for weight in trained:
            self._state[id(weight)] = {slot: torch.zeros_like(weight.seen, requires_grad=False) for slot in _SLOTS[fields.name]}
            if fields.name == "adamw":
                self._steps[id(weight)] = torch.zeros((), dtype=torch.float32, device=weight.seen.device)

    @torch.no_grad()
    def step(self, lr: float, finite: torch.Tensor) -> None:
        left_out = (~finite).float().to(self._device)
        for group in self._groups:
            weights = [weight for weight in group.weights if weight.seen.grad is not None]
            if weights:
                (self._adamw if self._steps else self._sgd)(group, weights, lr * group.lr_scale, left_out)

    def _adamw(self, group: _Group, weights: list[Weight], lr: float, left_out: torch.Tensor) -> None:
        steps = [self._steps[id(weight)] for weight in weights]
        beta1, beta2 = self._fields.betas
        torch._foreach_add_(steps, 1)
        torch._fused_adamw_(
            [weight.seen for weight in weights], _gradients(weights), self._slot(weights, "exp_avg"), self._slot(weights, "exp_avg_sq"), [], steps, lr=lr, beta1=beta1, beta2=beta2,
            weight_decay=group.weight_decay, eps=self._fields.eps, amsgrad=False, maximize=False, grad_scale=None, found_inf=left_out)
        torch._foreach_sub_(steps, [left_out] * len(steps))

    def _sgd(self, group: _Group, weights: list[Weight], lr: float, left_out: torch.Tensor) -> None:
        momentum = self._fields.momentum
        torch._fused_sgd_(
            [weight.seen for weight in weights], _gradients(weights), self._slot(weights, "momentum_buffer") if momentum else [], weight_decay=group.weight_decay, momentum=momentum, lr=lr,
            dampening=0.0, nesterov=False, maximize=False, is_first_step=False, grad_scale=None, found_inf=left_out)

    def _slot(self, weights: Sequence[Weight], name: str) -> list[torch.Tensor]:
        return [self._state[id(weight)][name] for weight in weights]

    def slots(self, weight: Weight) -> Mapping[str, torch.Tensor]:
        return self._state[id(weight)]

    def shared(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from (("optimizer/step", step) for step in list(self._steps.values())[:1])

    def begin(self) -> None: ...

    def restored(self, saved: Stored, filled: Mapping[str, torch.Tensor]) -> None:
        for step in self._steps.values():
            step.fill_(float(saved["optimizer/step"]))


def _gradients(weights: Sequence[Weight]) -> list[torch.Tensor]:
    return [weight.seen.grad for weight in weights if weight.seen.grad is not None]


def _grouped(fields: Optimizer, trained: Sequence[Weight]) -> list[_Group]:
    """Decay reaches matrices only, where no group of the config says otherwise."""
    found: dict[tuple[float, float, torch.dtype], list[Weight]] = {}
    for weight in trained:
        rule = fields.rules.of(weight.name, weight.parameter.ndim >= 2)
        found.setdefault((rule.lr_scale, rule.weight_decay, weight.seen.dtype), []).append(weight)
    return [_Group(scale, decay, weights) for (scale, decay, _), weights in found.items()]
