"""The inputs that a task's loss gives to its model: the batch after the loss's own augmentation and
masks.

The loss is called with a stand-in for the model, which notes its arguments and ends the call. So no
model is built. The numbers that the loss draws follow the samples, as in a run.
"""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from samecurve.core.determinism.sample_keys import RowKeys
from samecurve.seam import Arrays
from samecurve.tasks.adapter import TaskAdapter
from samecurve.tasks.adapter.returned import Columns
from samecurve.torch_engine.precision import as_weights
from samecurve.torch_engine.randomness.replaced_functions import keyed_trial


class _Called(BaseException):  # passes an `except Exception` of the loss
    """The model was called with these tensors."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        super().__init__()
        self.tensors = tensors


class _StandIn:
    """Stands for a model, and for each of its parts, until one is called with tensors."""

    def __getattr__(self, name: str) -> "_StandIn":
        if name.startswith("__"):
            raise AttributeError(name)
        return _StandIn()

    def __call__(self, *arguments: Any, **named: Any) -> "_StandIn":
        by_place = {f"model argument {number}": value for number, value in enumerate(arguments, 1)}
        inputs = {**by_place, **named}
        tensors = {
            name: value
            for name, value in inputs.items()
            if isinstance(value, torch.Tensor) and value.ndim
        }
        if tensors:
            raise _Called(tensors)
        return _StandIn()


def model_inputs(
    adapter: TaskAdapter, rows: Columns, keys: RowKeys, *, held_out: bool
) -> Columns | None:
    """The rows, with the arrays that the loss changes as the model is given them.

    held_out: metrics() is asked in place of the loss, which alone augments

    An argument of the model takes the place of the array that has its shape and kind; an argument
    without such an array stands beside them. None: the loss looks into its model before it calls
    it, so what it gives is not known.
    """
    tensors = {
        name: torch.from_numpy(np.ascontiguousarray(as_weights(array, "f32")))
        for name, array in rows.items()
    }
    inputs = _arguments(adapter, tensors, keys, held_out=held_out)
    if inputs is None:
        return None
    shown = dict(rows)
    for name, tensor in inputs.items():
        if len(tensor) == len(keys) and not any(_is_part(tensor, own) for own in tensors.values()):
            shown[_name_among(tensors, name, tensor)] = tensor.detach().numpy()
    return shown


def labels_of_loss(make: Callable[[Arrays], Any], rows: Columns, keys: RowKeys) -> NDArray[Any]:
    """The labels that a loss makes of its batch. make: batch -> labels"""
    batch = {name: torch.from_numpy(np.ascontiguousarray(array)) for name, array in rows.items()}
    with torch.no_grad(), keyed_trial(keys):
        labels: NDArray[Any] = make(batch).numpy()
    return labels


def _is_part(tensor: torch.Tensor, own: torch.Tensor) -> bool:
    """Whether the arrays are equal, or the one is one of several in each row of the other."""
    if tensor.shape == own.shape:
        return bool((tensor == own).all())
    if own.ndim != tensor.ndim + 1 or (len(own), *own.shape[2:]) != tensor.shape:
        return False
    return any(bool((tensor == own[:, number]).all()) for number in range(own.shape[1]))


def _name_among(tensors: Mapping[str, torch.Tensor], name: str, tensor: torch.Tensor) -> str:
    """The array whose place an argument takes: of its name, or the only one of its form.

    One number a sample says too little: a time step is no weight.
    """
    alike = [
        own_name
        for own_name, own in tensors.items()
        if own.shape == tensor.shape and own.is_floating_point() == tensor.is_floating_point()
    ]
    if len(alike) == 1 and tensor.ndim > 1:
        return alike[0]
    return name if name in alike or name not in tensors else f"model's {name}"


def _arguments(
    adapter: TaskAdapter, batch: Arrays, keys: RowKeys, *, held_out: bool
) -> Mapping[str, torch.Tensor] | None:
    """The tensors of the first call of the model; None: the loss does not come to it."""
    methods = adapter.methods
    name = "features" if adapter.whole_batch else "loss"
    method, named = getattr(methods, name), adapter.arguments_of(name)
    if held_out and methods.metrics is not None:
        method, named = methods.metrics, {}
    try:
        with torch.no_grad(), keyed_trial(keys):
            method(_StandIn(), dict(batch), **named)
    except _Called as called:
        return called.tensors
    except Exception:  # whatever a loss raises about a model that is none
        return None
    return None
