"""A model with float64 weights computes in float64 throughout.

The library computes norms, rotary angles, routers and state-space layers in float32, even when the
weights are float64. A float32 sum depends on the shape of the batch, and a difference in its last
bit changes the next loss by 1e-8: too much to compare strategies and numbers of devices.
"""

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from samecurve.torch_engine.model.model_setup import repeated_blocks


def keep_float64(model: nn.Module) -> None:
    """Make a model with float64 weights compute in float64 what the library computes in float32.

    Each block is switched by itself too, since it may be recomputed in backward.
    """
    for part in (*repeated_blocks(model), model):
        part.forward = partial(_widened_forward, part, part.forward)


def _widened_forward(
    part: nn.Module, forward: Callable[..., Any], *arguments: Any, **named: Any
) -> Any:
    floating = (p for p in part.parameters() if p.is_floating_point())
    is_wide = next(floating).dtype == torch.float64
    with Float64() if is_wide else nullcontext():
        return forward(*arguments, **named)


class Float64(TorchFunctionMode):
    """A mode in which torch uses float64 wherever it is asked for float32."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        del types
        if func is torch.Tensor.float:
            func = torch.Tensor.double
        named = {name: _widened(value) for name, value in (kwargs or {}).items()}
        return func(*map(_widened, args), **named)


def _widened(value: Any) -> Any:
    return torch.float64 if value is torch.float32 else value
