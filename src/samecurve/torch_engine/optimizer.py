"""The update of a step by the config's optimizer, and what of its state a checkpoint holds.

A task's own: own.py.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from samecurve.core.config.sections import Optimizer
from samecurve.core.protocols import StoredArrays
from samecurve.torch_engine.optimizer_params import OptimizerParam

_SLOTS = {"adamw": ("exp_avg", "exp_avg_sq"), "sgd": ("momentum_buffer",)}


class OptimizerUpdate(Protocol):
    """What moves the weights, once a step."""

    def step(self, lr: float, finite: torch.Tensor | bool) -> None:
        """One update from the gradients that weights see; none at all where `finite` is False.

        A tensor is on the device that clips, and nobody waits for it.
        """
        ...

    def state_of(self, weight: OptimizerParam) -> Mapping[str, torch.Tensor]:
        """Its state of one weight, by slot: tensors of what `weight.seen` is, or single numbers."""
        ...

    def shared_state(self) -> Iterator[tuple[str, torch.Tensor]]:
        """What it holds once for all weights, by a checkpoint's name."""
        ...

    def create_state(self) -> None:
        """Make all slots exist, so that a checkpoint can fill them.

        What they, and the weights, hold afterwards is of no meaning.
        """
        ...

    def after_restore(self, saved: StoredArrays, filled: Mapping[str, torch.Tensor]) -> None:
        """After slots() were filled from a checkpoint. filled: by the checkpoint's names."""
        ...


@dataclass(frozen=True)
class _Group:
    """Weights of one learning rate (times the schedule's), decay and number format, with their
    state in the same order: one list for each slot.
    """

    lr_scale: float
    weight_decay: float
    weights: list[OptimizerParam]
    slots: list[list[torch.Tensor]]

    def with_gradients(
        self,
    ) -> "tuple[list[torch.Tensor], list[torch.Tensor], list[list[torch.Tensor]]]":
        """(weights, gradients, slots) of those that have a gradient."""
        gradients = [weight.view.grad for weight in self.weights]
        if not any(gradient is None for gradient in gradients):
            return [weight.view for weight in self.weights], gradients, self.slots  # type: ignore[return-value]
        places = [place for place, gradient in enumerate(gradients) if gradient is not None]
        return (
            [self.weights[place].view for place in places],
            [gradient for gradient in gradients if gradient is not None],
            [[slot[place] for place in places] for slot in self.slots],
        )


class BuiltInOptimizer:
    """adamw or sgd by torch's fused kernels, which leave a step out on the device itself; their
    slots exist from the start.

    Called without torch.optim: its optimizers import torch._dynamo (2 s of every rank's start), and
    spend more of a small step than their kernels do.
    """

    def __init__(self, fields: Optimizer, trained: Sequence[OptimizerParam]) -> None:
        self._fields = fields
        self._device = trained[0].view.device
        self._state = {
            id(weight): {
                slot: torch.zeros_like(weight.view, requires_grad=False)
                for slot in _SLOTS[fields.name]
            }
            for weight in trained
        }
        self._done = torch.zeros(
            (), dtype=torch.float32, device=self._device
        )  # updates, as adamw's kernel wants them
        used = _SLOTS[fields.name] if fields.name == "adamw" or fields.momentum else ()
        self._groups = [
            _Group(
                *how,
                weights,
                [[self._state[id(weight)][slot] for weight in weights] for slot in used],
            )
            for how, weights in _grouped(fields, trained)
        ]

    @torch.no_grad()
    def step(self, lr: float, finite: torch.Tensor | bool) -> None:
        if finite is False:
            return
        left_out = None
        if isinstance(finite, torch.Tensor):
            left_out = (~finite).float().to(self._device)
            self._done.add_(1 - left_out)
        else:
            self._done.add_(1)
        for group in self._groups:
            weights, gradients, slots = group.with_gradients()
            if weights:
                (self._adamw if self._fields.name == "adamw" else self._sgd)(
                    group, weights, gradients, slots, lr * group.lr_scale, left_out
                )

    def _adamw(
        self,
        group: _Group,
        weights: list[torch.Tensor],
        gradients: list[torch.Tensor],
        slots: list[list[torch.Tensor]],
        lr: float,
        left_out: torch.Tensor | None,
    ) -> None:
        beta1, beta2 = self._fields.betas
        torch._fused_adamw_(
            weights,
            gradients,
            slots[0],
            slots[1],
            [],
            [self._done] * len(weights),
            lr=lr,
            beta1=beta1,
            beta2=beta2,
            weight_decay=group.weight_decay,
            eps=self._fields.eps,
            amsgrad=False,
            maximize=False,
            grad_scale=None,
            found_inf=left_out,
        )

    def _sgd(
        self,
        group: _Group,
        weights: list[torch.Tensor],
        gradients: list[torch.Tensor],
        slots: list[list[torch.Tensor]],
        lr: float,
        left_out: torch.Tensor | None,
    ) -> None:
        torch._fused_sgd_(
            weights,
            gradients,
            slots[0] if slots else [],
            weight_decay=group.weight_decay,
            momentum=self._fields.momentum,
            lr=lr,
            dampening=0.0,
            nesterov=False,
            maximize=False,
            is_first_step=False,
            grad_scale=None,
            found_inf=left_out,
        )

    def state_of(self, weight: OptimizerParam) -> Mapping[str, torch.Tensor]:
        return self._state[id(weight)]

    def shared_state(self) -> Iterator[tuple[str, torch.Tensor]]:
        if self._fields.name == "adamw":
            yield "optimizer/step", self._done

    def create_state(self) -> None: ...

    def after_restore(self, saved: StoredArrays, filled: Mapping[str, torch.Tensor]) -> None:
        if self._fields.name == "adamw":
            self._done.fill_(float(saved["optimizer/step"]))


def _grouped(
    fields: Optimizer, trained: Sequence[OptimizerParam]
) -> list[tuple[tuple[float, float], list[OptimizerParam]]]:
    """Weights by (lr_scale, weight decay), those of unlike number formats apart.

    Decay reaches matrices only, where no group of the config says otherwise.
    """
    found: dict[tuple[float, float, torch.dtype], list[OptimizerParam]] = {}
    for weight in trained:
        rule = fields.rules.rule_for(weight.name, weight.parameter.ndim >= 2)
        found.setdefault((rule.lr_scale, rule.weight_decay, weight.view.dtype), []).append(weight)
    return [((scale, decay), weights) for (scale, decay, _), weights in found.items()]
