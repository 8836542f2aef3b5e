"""Functions in the user's code that take part in a backward pass: hooks and autograd.Functions."""

from collections.abc import Iterator, Mapping
from itertools import chain
from typing import Any

import torch
from torch import nn

from samecurve.features.guard.split_errors import Place
from samecurve.torch_engine.users_code import kind_of, place_of


def accumulated_hook(model: nn.Module) -> Place | None:
    """A hook of the user's on a parameter's accumulated gradient, which it is given after each
    microbatch, added to the gradient of the microbatches before.
    """
    for name, parameter in model.named_parameters():
        hooks = parameter._post_accumulate_grad_hooks  # noqa: SLF001 - no public name
        for hook in _users_hooks(hooks, f"a hook of {name}"):
            return hook
    return None


def own_backward(model: nn.Module, loss_sum: torch.Tensor) -> Place | None:
    """The first function of the user's in the backward pass of a loss; None: none is seen."""
    return next(chain(_own_functions(loss_sum), _hooks(model)), None)


def graph_nodes(total: torch.Tensor) -> Iterator[Any]:
    """Every node of the graph from which a tensor was computed."""
    waiting: list[Any] = [total.grad_fn]
    seen = set()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        waiting += [inner for inner, _ in node.next_functions]
        yield node


def _own_functions(loss_sum: torch.Tensor) -> Iterator[Place]:
    """autograd.Functions whose backward stands in the user's code."""
    for node in graph_nodes(loss_sum):
        function: Any = getattr(node, "_forward_cls", None)
        code = getattr(getattr(function, "backward", None), "__code__", None)
        if code is not None and kind_of(code.co_filename) == "users":
            yield Place(f"{function.__name__}.backward", place_of(code))


def _hooks(model: nn.Module) -> Iterator[Place]:
    """Hooks of the user's on parameters and modules."""
    for name, parameter in model.named_parameters():
        yield from _users_hooks(parameter._backward_hooks, f"a hook of {name}")  # noqa: SLF001
    for name, module in model.named_modules():
        for kind in ("_backward_hooks", "_backward_pre_hooks"):
            title = f"a hook of {name or 'the model'}"
            yield from _users_hooks(getattr(module, kind), title)


def _users_hooks(hooks: Mapping[int, Any] | None, title: str) -> Iterator[Place]:
    for hook in (hooks or {}).values():
        code = getattr(getattr(hook, "__func__", hook), "__code__", None)
        if code is not None and kind_of(code.co_filename) == "users":
            yield Place(title, place_of(code))
