"""Operations and memory that training one row takes, for the plan."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from samecurve.torch_engine.model.model_setup import repeated_blocks
from samecurve.torch_engine.model.saved_activations import (
    SavedActivations,
    count_saved,
    saved_facts,
)


def cost_facts(make_model: Callable[[], nn.Module], shape: tuple[int, ...]) -> dict[str, Any]:
    """Fields of Facts. shape: of what the model is given, one row."""
    wide = _saved(make_model, shape, nullcontext())
    narrow = _saved(make_model, shape, torch.autocast("cpu", dtype=torch.bfloat16))
    formulas = {
        "flops": "3 x those of a forward pass, counted by torch on tensors without values",
        "bytes_per_sample": "what the model keeps of a row, counted on tensors without values",
    }
    return {
        "flops_per_sample": 3.0 * _forward_flops(make_model, shape),
        "formulas": formulas,
        **saved_facts(wide, narrow),
    }


def _forward_flops(make_model: Callable[[], nn.Module], shape: tuple[int, ...]) -> int:
    with torch.device("meta"):
        model, x = make_model(), torch.zeros(shape)
    counter = FlopCounterMode(display=False)
    with torch.no_grad(), counter:
        model(x)
    flops: int = counter.get_total_flops()
    return flops


def _saved(
    make_model: Callable[[], nn.Module],
    shape: tuple[int, ...],
    precision: AbstractContextManager[object],
) -> SavedActivations:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        model, x = make_model(), torch.zeros(shape)
        with precision:
            return count_saved(model, repeated_blocks(model), lambda: model(x))
