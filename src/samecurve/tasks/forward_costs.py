"""The cost of a sample, as a plan needs it, counted by a forward pass without values."""

import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from samecurve.torch_engine.model.counted_work import WorkCounter
from samecurve.torch_engine.model.model_setup import repeated_blocks
from samecurve.torch_engine.model.saved_activations import (
    SavedActivations,
    count_saved,
    saved_facts,
)

Run = Callable[[nn.Module], object]  # calls a model on one row, whose tensors it makes itself


def forward_costs(make_model: Callable[[], nn.Module], run: Run) -> dict[str, Any]:
    """Fields of Facts about what a sample costs."""
    wide = _saved(make_model, run, nullcontext())
    narrow = _saved(make_model, run, torch.autocast("cpu", dtype=torch.bfloat16))
    formulas = {
        "flops": "3 x those of a forward pass, counted by torch on tensors without values",
        "bytes_per_sample": "what the model keeps of a row, counted on tensors without values",
    }
    return {
        "flops_per_sample": 3.0 * _forward_flops(make_model, run),
        "formulas": formulas,
        **saved_facts(wide, narrow),
    }


def _forward_flops(make_model: Callable[[], nn.Module], run: Run) -> int:
    from torch._subclasses.fake_tensor import FakeTensorMode

    counter = WorkCounter()
    with torch.device("meta"):
        model = make_model()
    # not on meta, whose layers can't ask whether autocast is on
    with FakeTensorMode(), torch.no_grad():
        to_empty(model)
        with counter:
            run(model)
    return counter.flops


def _saved(
    make_model: Callable[[], nn.Module],
    run: Run,
    precision: AbstractContextManager[object],
) -> SavedActivations:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with torch.device("meta"):
        model = make_model()
    with FakeTensorMode():
        to_empty(model)
        with precision, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of slower kernels: nothing is computed
            return count_saved(model, repeated_blocks(model), lambda: run(model))


def to_empty(model: nn.Module) -> None:
    """Make a model's tensors CPU tensors without values, where module.to_empty() fails."""
    others: dict[int, nn.Parameter] = {}  # tied parameters stay tied
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            if id(parameter) not in others:
                empty = torch.empty(parameter.shape, dtype=parameter.dtype)
                others[id(parameter)] = nn.Parameter(empty, parameter.requires_grad)
            module.register_parameter(name, others[id(parameter)])
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, torch.empty(buffer.shape, dtype=buffer.dtype))
