"""Models that carry a state from token to token: state-space, linear attention, convolutions.

The library computes such layers in float32 whatever their weights are, where the shape of a batch
changes the last bits; and its path through torch can't begin anew within a row.
"""

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from samecurve.torch_engine.model import repeated_blocks


def is_recurrent(model: nn.Module) -> bool:
    """Whether something but attention passes from one token to the next."""
    config: Any = model.config
    kinds = getattr(config, "layer_types", None) or []
    return (
        bool(getattr(model, "_is_stateful", False))
        or any(isinstance(module, nn.Conv1d) for module in model.modules())
        or any("attention" not in kind or "linear" in kind for kind in kinds)
    )


def kernel_note() -> str:
    """Which kernels state-space layers take here."""
    if find_spec("mamba_ssm") is not None:
        return "state-space layers by mamba_ssm, where they are on a GPU"
    return "state-space layers by the library's own path through torch, as mamba_ssm is absent"


def keep_float64(model: nn.Module) -> None:
    """What such a model computes in float32 is float64 where its weights are.

    Each block by itself too, which may run again in backward.
    """
    for part in (*repeated_blocks(model), model):
        part.forward = _Widened(part, part.forward)


class _Widened:
    def __init__(self, part: nn.Module, forward: Callable[..., Any]) -> None:
        self._part, self._forward = part, forward

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        if next(self._part.parameters()).dtype != torch.float64:
            return self._forward(*arguments, **named)
        with _Float64():
            return self._forward(*arguments, **named)


class _Float64(TorchFunctionMode):
    """float64 wherever torch is asked for float32."""

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
