"""Gradients for the split check. A loss may add up over samples while its gradient does not: where
a backward function, a hook or a detached statistic depends on the microbatch.
"""

from collections.abc import Callable
from typing import Any

import torch

from samecurve.core.protocols import MicroBatch
from samecurve.core.split_check import GradientNorms
from samecurve.torch_engine.optimizers import own_part
from samecurve.torch_engine.step.setup import EngineSetup

Gradients = dict[str, torch.Tensor]  # by the parameter's name; of sharded ones this process's part


def gradients_of(
    setup: EngineSetup, microbatch: MicroBatch, loss_sum: Callable[[Any], torch.Tensor]
) -> Gradients:
    """Gradients of a loss's sum by the parameters of this process's first device.

    loss_sum: is given train() or call() of the strategy, with which it runs the task's loss

    RuntimeError: a checkpoint of torch's reentrant kind, which gives gradients in a step only.
    """
    strategy, model = setup.strategy, setup.strategy.models[0]
    strategy.reset()
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    parameters = list(named.values())
    if setup.plan.layout.shards == 1:
        total = loss_sum(strategy.call)
        gradients = torch.autograd.grad(total, parameters, allow_unused=True)
        return {
            name: _dense(gradient)
            for name, gradient in zip(named, gradients, strict=True)
            if gradient is not None
        }
    strategy.begin_step(parameters, setup.comm.world_size)  # a microbatch for each rank
    try:
        strategy.begin_microbatch(0, microbatch, is_last=True)
        torch.autograd.backward(loss_sum(strategy.train))
        strategy.end_microbatch(0, microbatch)
        strategy.reduce(parameters)
    finally:
        strategy.reset()
    of_shards = {name: _dense(own_part(p.grad)) for name, p in named.items() if p.grad is not None}
    for parameter in parameters:
        parameter.grad = None
    return of_shards


class GradientRest:
    """The gradient of all samples less those of its parts. Only one gradient is held beside that of
    a part, as a step holds the gradient and the optimizer's state.

    whole: the gradient of all samples, which this object takes over
    """

    def __init__(self, whole: Gradients) -> None:
        self._rest: dict[str, torch.Tensor | None] = dict(whole)
        self._squares = [{name: _squared(gradient) for name, gradient in whole.items()}]

    def subtract(self, part: Gradients) -> None:
        """Subtract the gradient of a part, whose tensors are let go of."""
        self._squares.append({name: _squared(gradient) for name, gradient in part.items()})
        while part:
            name, gradient = part.popitem()
            rest = self._rest.pop(name, None)
            self._rest[name] = -gradient if rest is None else rest - gradient

    def norms(self, setup: EngineSetup) -> dict[str, GradientNorms]:
        """Norms of each parameter's gradient, over its shards; all ranks call it together."""
        setup.strategy.reset()
        names = [name for name, p in setup.strategy.models[0].named_parameters() if p.requires_grad]
        copies = setup.comm.world_size / setup.plan.layout.shards
        rows = []
        for name in names:
            whole, *parts = (squares.get(name, 0.0) for squares in self._squares)
            rows.append([whole, _squared(self._rest.get(name)), *parts])
        table = torch.tensor(rows, dtype=torch.float64).to(setup.device)
        squares = (setup.comm.all_reduce(table)() / copies).sqrt().tolist()
        return {
            name: GradientNorms(whole=row[0], difference=row[1], parts=row[2:])
            for name, row in zip(names, squares, strict=True)
        }


def _dense(gradient: torch.Tensor) -> torch.Tensor:
    return gradient.to_dense() if gradient.is_sparse else gradient


def _squared(gradient: torch.Tensor | None) -> float:
    if gradient is None:
        return 0.0
    wide = torch.complex128 if gradient.is_complex() else torch.float64
    return float(torch.linalg.vector_norm(gradient, dtype=wide)) ** 2
