"""Gradients as a few numbers: sums of squares, and projections onto fixed random directions.

A loss may add up over samples while its gradient does not: where a backward function, a hook or a
detached statistic depends on the microbatch. Projections add up as gradients do. So the gradient of
all samples is compared with those of its parts, or with another device's, and only one gradient is
held at a time.
"""

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch

from samecurve.core.protocols import MicroBatch
from samecurve.features.guard.additivity import GradientNorms
from samecurve.torch_engine.optimizers import own_part
from samecurve.torch_engine.step import EngineSetup

# float64 [1 + DIRECTIONS] by the parameter's name: the sum of squares, and the projections
Digests = dict[str, torch.Tensor]
DIRECTIONS = 4
_CHUNK = 1 << 10  # numbers that have directions of their own
_ROWS = 1 << 8  # chunks that have signs of their own
_AT_ONCE = 1 << 22  # numbers that are made float64 at once


def digest(gradient: torch.Tensor) -> torch.Tensor:
    """The digest of a gradient, or of this process's part of it; on its device."""
    dense = gradient.detach()
    if dense.is_sparse:
        dense = dense.to_dense()
    if dense.is_complex():
        dense = torch.view_as_real(dense.resolve_conj())
    flat, total = dense.reshape(-1), torch.zeros(1 + DIRECTIONS, dtype=torch.float64)
    total = total.to(flat.device)
    directions, signs = (table.to(flat.device) for table in _tables())
    for part in torch.split(flat, _AT_ONCE):
        wide = part.double()
        total[0] += wide.dot(wide)
        even = len(wide) // _CHUNK * _CHUNK
        for rows in torch.split(wide[:even].view(-1, _CHUNK), _ROWS):
            total[1:] += ((rows @ directions) * signs[: len(rows)]).sum(0)
        total[1:] += (wide[even:] @ directions[: len(wide) - even]) * signs[-1]
    return total


@cache
def _tables() -> tuple[torch.Tensor, torch.Tensor]:
    """Numbers 1 and -1 in random order: [numbers of a chunk, directions], [chunks, directions]."""
    generator = torch.Generator().manual_seed(0)
    shape = (_CHUNK + _ROWS, DIRECTIONS)
    ones = torch.randint(2, shape, generator=generator, device="cpu").mul(2).sub(1).double()
    return ones[:_CHUNK], ones[_CHUNK:]


def gradients_of(
    setup: EngineSetup, microbatch: MicroBatch, loss_sum: Callable[[Any], torch.Tensor]
) -> Digests:
    """Gradients of a loss's sum by the parameters of this process's first device.

    loss_sum: is given train() or call() of the strategy, with which it runs the task's loss

    RuntimeError: a checkpoint of torch's reentrant kind, which gives gradients in a step only.
    """
    strategy, model = setup.strategy, setup.strategy.models[0]
    strategy.reset()
    if setup.plan.layout.shards == 1:
        total = loss_sum(strategy.call)  # it may freeze layers until some step
        named = {name: p for name, p in model.named_parameters() if p.requires_grad}
        gradients = torch.autograd.grad(total, list(named.values()), allow_unused=True)
        return {
            name: digest(gradient)
            for name, gradient in zip(named, gradients, strict=True)
            if gradient is not None
        }
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    parameters = list(named.values())
    strategy.begin_step(parameters, setup.comm.world_size)  # a microbatch for each rank
    try:
        strategy.begin_microbatch(0, microbatch, is_last=True)
        torch.autograd.backward(loss_sum(strategy.train))
        strategy.end_microbatch(0, microbatch)
        strategy.reduce(parameters)
    finally:
        strategy.reset()
    of_shards = {name: digest(own_part(p.grad)) for name, p in named.items() if p.grad is not None}
    for parameter in parameters:
        parameter.grad = None
    return of_shards


def norms_of(
    setup: EngineSetup, whole: Digests, parts: Sequence[Digests]
) -> dict[str, GradientNorms]:
    """Norms of each parameter's gradient, over its shards; all ranks call it together."""
    setup.strategy.reset()
    names = [name for name, p in setup.strategy.models[0].named_parameters() if p.requires_grad]
    copies = setup.comm.world_size / setup.plan.layout.shards
    none = torch.zeros(1 + DIRECTIONS, dtype=torch.float64)
    each = [
        torch.stack([of_one.get(name, none).to(setup.device) for name in names])
        for of_one in (whole, *parts)
    ]
    squares = torch.stack([of_one[:, 0] for of_one in each], dim=1)
    rest = each[0][:, 1:] - sum(of_one[:, 1:] for of_one in each[1:])
    table = setup.comm.all_reduce(torch.cat([squares, rest], dim=1))() / copies
    norms = table[:, : len(each)].sqrt().tolist()
    differences = table[:, len(each) :].square().mean(1).sqrt().tolist()
    return {
        name: GradientNorms(whole=row[0], difference=difference, parts=row[1:])
        for name, row, difference in zip(names, norms, differences, strict=True)
    }
