"""The conditions under which the split check computes losses: wide number formats, BatchNorm by its
running statistics, weights moved a little. Each condition holds inside a `with` statement.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Self, cast

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from samecurve.torch_engine.optimizers import own_part
from samecurve.torch_engine.strategies import Strategy

_WIDER = {torch.float32: torch.float64, torch.complex64: torch.complex128}
# by the format of a number: integers of its size, and how many bits of its fraction may turn
_TURNED = {
    torch.float64: (torch.int64, 50),
    torch.float32: (torch.int32, 21),
    torch.float16: (torch.int16, 8),
    torch.bfloat16: (torch.int16, 5),
}
_MOVED = 0.1  # of each number of a buffer
_MOVED_ZEROS = 0.05  # where all numbers of a parameter or buffer are 0


class NarrowestFormat(TorchFunctionMode):
    """The narrowest floating-point format that torch's functions return inside of it.

    bytes: of one number
    function, where: the first call that returned it, and its line in the user's code
    """

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 8
        self.function = self.where = ""

    def __torch_function__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        is_float = isinstance(result, torch.Tensor) and result.is_floating_point()
        if is_float and result.dtype.itemsize < self.bytes:
            self.bytes = result.dtype.itemsize
            self._note(func)
        return result

    def _note(self, function: Any) -> None:
        from samecurve.features.guard.blamed_calls import function_name
        from samecurve.torch_engine.users_code import caller, site_of

        self.function, self.where = function_name(function), site_of(caller(), None).where


class Float64Inside(TorchFunctionMode):
    """torch's functions compute in float64 inside of it where they would in float32: with a
    teacher's weights, after x.float(), from integers. So a difference that is rounding vanishes.
    """

    def __enter__(self) -> Self:
        self._default = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)
        entered: Self = super().__enter__()  # type: ignore[no-untyped-call]
        return entered

    def __exit__(self, *error: object) -> None:
        torch.set_default_dtype(self._default)
        super().__exit__(*error)  # type: ignore[no-untyped-call]

    def __torch_function__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, named = getattr(func, "__name__", ""), kwargs or {}
        if name in {"__get__", "__set__"}:
            return func(*args, **named)
        changes_first = name.startswith("__i") or (name[-1:] == "_" and name[-2:] != "__")
        kept, others = (args[:1], args[1:]) if changes_first else ((), args)
        others, named = tree_map(_in_float64, (others, named))
        if func is torch.Tensor.float:
            func = torch.Tensor.double
        return func(*kept, *others, **named)


def _in_float64(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return widened(value) if value.dtype in _WIDER else value
    return _WIDER.get(value, value) if isinstance(value, torch.dtype) else value


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

    Weights are moved by turning some of their bits, which turning them once more undoes: a
    copy of the weights would have no room beside what a step needs.
    """
    strategy.reset()
    model = strategy.models[0]
    generator = torch.Generator().manual_seed(0)
    turned: list[tuple[torch.Tensor, int | None]] = []  # the seed of its bits; None: all were 0
    try:
        with torch.no_grad():
            for parameter in model.parameters():
                seed = int(torch.randint(1 << 62, (), generator=generator))
                part = own_part(parameter.data)
                turned.append((part, _move(part, seed)))
            for buffer in model.buffers():
                if buffer.is_floating_point() or buffer.is_complex():
                    buffer.copy_(_moved(buffer, generator))
        yield
    finally:
        strategy.reset()
        with torch.no_grad():
            for part, bits in turned:
                if bits is None:
                    part.zero_()
                else:
                    _turn_bits(part, bits)


def _move(part: torch.Tensor, seed: int) -> int | None:
    """Move a parameter, or this process's part of it. Returns the seed of the bits that were
    turned; None: all numbers were 0.
    """
    if part.any():
        _turn_bits(part, seed)
        return seed
    if part.is_floating_point() or part.is_complex():
        generator = torch.Generator().manual_seed(seed)
        part.copy_(_MOVED_ZEROS * torch.randn(part.shape, generator=generator, device="cpu"))
    return None


def _turn_bits(part: torch.Tensor, seed: int) -> None:
    """Turn random bits of each number's fraction: by a quarter of the number at most, which keeps
    its sign. Zeros stay all but 0.
    """
    numbers = torch.view_as_real(part) if part.is_complex() else part
    if numbers.dtype not in _TURNED:
        return
    whole, bits = _TURNED[numbers.dtype]
    noise = torch.randint(
        1 << bits,
        numbers.shape,
        generator=torch.Generator().manual_seed(seed),
        dtype=whole,
        device="cpu",
    )
    numbers.view(whole).bitwise_xor_(noise.to(numbers.device))


def _moved(data: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Each number changed by a part of itself, so that it keeps its sign; 0 where all are 0 too."""
    noise = torch.randn(data.shape, generator=generator, dtype=torch.float32, device="cpu")
    noise = noise.clamp_(-3, 3).to(data)
    return data * (1 + _MOVED * noise) if data.any() else _MOVED_ZEROS * noise
