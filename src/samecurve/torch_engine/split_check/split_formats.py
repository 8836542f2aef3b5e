"""The conditions under which the split check computes: number formats as wide as can be, norms over
the batch by what they have learnt.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.overrides import TorchFunctionMode


class NarrowestFormat(TorchFunctionMode):
    """Of the floating-point numbers that torch's functions give while it is entered."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 8

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and result.is_floating_point():
            self.bytes = min(self.bytes, result.dtype.itemsize)
        return result


@contextmanager
def full_float32() -> Iterator[None]:
    """No TF32: its products round to 5e-4."""
    parts, name, without = _tf32_switches()
    before = [getattr(part, name) for part in parts]
    for part in parts:
        setattr(part, name, without)
    try:
        yield
    finally:
        for part, value in zip(parts, before, strict=True):
            setattr(part, name, value)


def _tf32_switches() -> tuple[tuple[Any, ...], str, object]:
    """Parts of torch, their attribute, and its value without TF32.

    torch has two such interfaces since 2.9. Where a user's file has set the newer one, even reading
    the older raises an error.
    """
    products, cudnn = torch.backends.cuda.matmul, cast("Any", torch.backends.cudnn)
    try:
        _ = products.allow_tf32, cudnn.allow_tf32
    except RuntimeError:
        return (products, cudnn.conv, cudnn.rnn), "fp32_precision", "ieee"
    return (products, cudnn), "allow_tf32", False


@contextmanager
def norms_frozen(model: nn.Module) -> Iterator[None]:
    """BatchNorm by its running statistics; one that keeps none, by mean 0 and variance 1."""
    norms = [
        module for module in model.modules() if isinstance(module, _BatchNorm) and module.training
    ]
    lacking = [norm for norm in norms if norm.running_mean is None]
    device = next((parameter.device for parameter in model.parameters()), None)
    for norm in norms:
        norm.training = False
    for norm in lacking:
        norm.running_mean = torch.zeros(norm.num_features, device=device)
        norm.running_var = torch.ones(norm.num_features, device=device)
    try:
        yield
    finally:
        for norm in norms:
            norm.training = True
        for norm in lacking:
            norm.running_mean = norm.running_var = None


def widened(tensor: torch.Tensor) -> torch.Tensor:
    """In float64, where its numbers are not whole."""
    if tensor.is_complex():
        return tensor.to(torch.complex128)
    return tensor.double() if tensor.is_floating_point() else tensor


@contextmanager
def widened_buffers(model: nn.Module) -> Iterator[None]:
    """The buffers of a model as copies in float64."""
    saved = [
        (module, name, buffer)
        for module in model.modules()
        for name, buffer in module.named_buffers(recurse=False)
    ]
    for module, name, buffer in saved:
        setattr(module, name, widened(buffer).clone())
    try:
        yield
    finally:
        for module, name, buffer in saved:
            setattr(module, name, buffer)


def added_up(features: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """One number of features with a row a sample, which adds up over samples if each row follows
    from its own: every number of a row has a weight of its own, the same in each row, and is bent
    (asinh), since rows less their mean add up to 0 in any split.
    """
    total = torch.zeros((), dtype=torch.float64)
    for feature in features.values():
        rows = torch.view_as_real(feature) if feature.is_complex() else feature
        rows = rows.reshape(len(feature), -1).double()
        weights = 1 + torch.arange(rows.shape[1], device=rows.device).cos().double() / 2
        total = total.to(rows.device) + (rows.asinh() * weights).sum()
    return total
