"""Gradients for the split check: a loss may add up over samples while its gradient does not, where
a backward pass of its own, a hook, or what was detached follows the microbatch.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch
from torch import nn

from samecurve.core.protocols import MicroBatch
from samecurve.core.split_check.split_errors import Backward
from samecurve.core.split_check.split_verdicts import GradientNorms
from samecurve.torch_engine.optimizers.optimizer_params import is_sharded
from samecurve.torch_engine.split_check.user_code import is_users, place_of
from samecurve.torch_engine.step.setup import EngineSetup
from samecurve.torch_engine.strategies.base import Strategy

Gradients = dict[str, torch.Tensor]  # of parameters, by name; sharded: this process's part
_MOVED, _GATE = 0.1, 0.05  # of a parameter's own numbers; of one that is all zeros


def gradients_of(
    setup: EngineSetup, microbatch: MicroBatch, loss_sum: Callable[[Any], torch.Tensor]
) -> Gradients:
    """Of the sum of a loss by the parameters of this process's first device.

    loss_sum: takes what runs a task's function of the model: train() or call() of the strategy

    RuntimeError: a checkpoint of torch's reentrant kind, which gives gradients in a step only.
    """
    strategy, model = setup.strategy, setup.strategy.models[0]
    strategy.reset()
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if setup.plan.shards == 1:
        in_order = torch.autograd.grad(
            loss_sum(strategy.call), list(named.values()), allow_unused=True
        )
        return {
            name: _dense(gradient)
            for name, gradient in zip(named, in_order, strict=True)
            if gradient is not None
        }
    parameters = list(named.values())
    strategy.begin_step(parameters, 1)
    try:
        strategy.begin_microbatch(0, microbatch, is_last=True)
        torch.autograd.backward(loss_sum(strategy.train))
        strategy.end_microbatch(0, microbatch)
        strategy.reduce(parameters)
    finally:
        strategy.reset()
    gradients = {name: _local(p.grad) for name, p in named.items() if p.grad is not None}
    for parameter in parameters:
        parameter.grad = None
    return gradients


def gradient_norms(
    setup: EngineSetup, whole: Gradients, parts: Sequence[Gradients]
) -> dict[str, GradientNorms]:
    """Of each parameter's gradient, over all of its shards; all ranks call it together."""
    setup.strategy.reset()
    names = [name for name, p in setup.strategy.models[0].named_parameters() if p.requires_grad]
    copies = setup.comm.world_size / setup.plan.shards
    rows = []
    for name in names:
        of_parts = [part.get(name) for part in parts]
        total = whole.get(name)
        difference = _sum([total, *(None if g is None else -g for g in of_parts)])
        rows.append([_squared(g) for g in (total, difference, *of_parts)])
    table = torch.tensor(rows, dtype=torch.float64).to(setup.device)
    squares = (setup.comm.all_reduce(table)() / copies).sqrt().tolist()
    return {
        name: GradientNorms(whole=row[0], difference=row[1], parts=row[2:])
        for name, row in zip(names, squares, strict=True)
    }


def own_backward(model: nn.Module, loss_sum: torch.Tensor) -> Backward | None:
    """What of the user's takes part in this loss's backward pass; None: nothing is seen."""
    return next(chain(_own_functions(loss_sum), _hooks(model)), None)


def accumulated_hook(model: nn.Module) -> Backward | None:
    """One of the user's on a parameter's gradient after it was added to that of the microbatches
    before; None: there is none.
    """
    for name, parameter in model.named_parameters():
        hooks = parameter._post_accumulate_grad_hooks  # noqa: SLF001 - public nowhere
        for hook in _users_hooks(hooks, f"a hook of {name}"):
            return hook
    return None


@contextmanager
def moved_weights(strategy: Strategy) -> Iterator[None]:
    """Weights and buffers moved a little, the same in every process: a gate that begins at 0 hides
    what is behind it.
    """
    strategy.reset()
    model = strategy.models[0]
    generator = torch.Generator().manual_seed(0)
    saved = [(parameter, parameter.data) for parameter in model.parameters()]
    shards = [(_local(data), _local(data).clone()) for _, data in saved if is_sharded(data)]
    for parameter, data in saved:
        if not is_sharded(data):
            parameter.data = _moved(data, generator)
    with torch.no_grad():
        for shard, values in shards:  # in place: fsdp gathers from where they lie
            shard.copy_(_moved(values, generator))
        for buffer in model.buffers():
            if buffer.is_floating_point() or buffer.is_complex():
                buffer.copy_(_moved(buffer, generator))
    try:
        yield
    finally:
        strategy.reset()
        for parameter, data in saved:
            parameter.data = data
        with torch.no_grad():
            for shard, values in shards:
                shard.copy_(values)


def _moved(data: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Each number by some of itself, so that it keeps its sign; all of them, where all are 0."""
    if not (data.is_floating_point() or data.is_complex()):
        return data
    noise = torch.randn(data.shape, generator=generator, dtype=torch.float32, device="cpu")
    noise = noise.clamp_(-3, 3).to(data)
    return data * (1 + _MOVED * noise) if data.any() else _GATE * noise


def _own_functions(loss_sum: torch.Tensor) -> Iterator[Backward]:
    """autograd.Functions whose backward stands in the user's code."""
    waiting, seen = [loss_sum.grad_fn], set()
    while waiting:
        node: Any = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        waiting += [inner for inner, _ in node.next_functions]
        function: Any = getattr(node, "_forward_cls", None)
        code = getattr(getattr(function, "backward", None), "__code__", None)
        if code is not None and is_users(code.co_filename):
            yield Backward(f"{function.__name__}.backward", place_of(code))


def _hooks(model: nn.Module) -> Iterator[Backward]:
    """On parameters and modules."""
    for name, parameter in model.named_parameters():
        yield from _users_hooks(parameter._backward_hooks, f"a hook of {name}")  # noqa: SLF001
    for name, module in model.named_modules():
        for kind in ("_backward_hooks", "_backward_pre_hooks"):
            title = f"a hook of {name or 'the model'}"
            yield from _users_hooks(getattr(module, kind), title)


def _users_hooks(hooks: Mapping[int, Any] | None, title: str) -> Iterator[Backward]:
    for hook in (hooks or {}).values():
        code = getattr(getattr(hook, "__func__", hook), "__code__", None)
        if code is not None and is_users(code.co_filename):
            yield Backward(title, place_of(code))


def _dense(gradient: torch.Tensor) -> torch.Tensor:
    return gradient.to_dense() if gradient.is_sparse else gradient


def _local(gradient: torch.Tensor) -> torch.Tensor:
    distributed: Any = gradient  # a DTensor, where it is sharded
    return _dense(distributed.to_local() if is_sharded(gradient) else gradient)


def _sum(gradients: Sequence[torch.Tensor | None]) -> torch.Tensor | None:
    present = [gradient for gradient in gradients if gradient is not None]
    return sum(present[1:], start=present[0]) if present else None


def _squared(gradient: torch.Tensor | None) -> float:
    if gradient is None:
        return 0.0
    return float(torch.linalg.vector_norm(gradient, dtype=_wide(gradient))) ** 2


def _wide(gradient: torch.Tensor) -> torch.dtype:
    return torch.complex128 if gradient.is_complex() else torch.float64
