"""The conditions under which the split check computes losses: wide number formats, BatchNorm by its
running statistics, weights moved a little. Each condition holds inside a `with` statement.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.overrides import TorchFunctionMode

from samecurve.torch_engine.optimizers.optimizer import is_sharded
from samecurve.torch_engine.strategies.base import Strategy

_MOVED = 0.1  # of each number of a parameter or buffer
_MOVED_ZEROS = 0.05  # where all numbers of a parameter or buffer are 0


class NarrowestFormat(TorchFunctionMode):
    """The narrowest floating-point format that torch's functions return inside of it.

    bytes: of one number
    """

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
    """Compute float32 without TF32, whose products round to 5e-4."""
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
    """Parts of torch, the attribute that switches TF32, and its value without TF32.

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
    """BatchNorm uses its running statistics; a layer without them uses mean 0 and variance 1."""
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
    """A tensor in float64 or complex128, where its numbers are not integers."""
    if tensor.is_complex():
        return tensor.to(torch.complex128)
    return tensor.double() if tensor.is_floating_point() else tensor


@contextmanager
def model_in_float64(model: nn.Module) -> Iterator[None]:
    """The model's parameters and buffers are copies in float64."""
    parameters = [(parameter, parameter.data) for parameter in model.parameters()]
    buffers = [
        (module, name, buffer)
        for module in model.modules()
        for name, buffer in module.named_buffers(recurse=False)
    ]
    for parameter, data in parameters:
        parameter.data = widened(data)
    for module, name, buffer in buffers:
        setattr(module, name, widened(buffer).clone())
    try:
        yield
    finally:
        for parameter, data in parameters:
            parameter.data = data
        for module, name, buffer in buffers:
            setattr(module, name, buffer)


@contextmanager
def moved_weights(strategy: Strategy) -> Iterator[None]:
    """Weights and buffers are moved a little, alike in every process, since a gate that begins at 0
    hides what is behind it.
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
    """Each number changed by a part of itself, so that it keeps its sign; 0 where all are 0 too."""
    if not (data.is_floating_point() or data.is_complex()):
        return data
    noise = torch.randn(data.shape, generator=generator, dtype=torch.float32, device="cpu")
    noise = noise.clamp_(-3, 3).to(data)
    return data * (1 + _MOVED * noise) if data.any() else _MOVED_ZEROS * noise


def _local(data: torch.Tensor) -> torch.Tensor:
    """This process's part of a sharded tensor."""
    distributed: Any = data  # a DTensor
    local: torch.Tensor = distributed.to_local()
    return local
