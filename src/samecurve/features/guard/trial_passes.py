"""How the passes of a trial are computed: in wide number formats, with BatchNorm by its running
statistics, and with gradients that are kept as a few numbers.

A loss may add up over samples while its gradient does not: where a backward function, a hook or a
detached statistic depends on the microbatch. So the gradient of all samples is compared with those
of its parts, or with another device's: by sums of squares, and by projections onto fixed random
directions, which add up as gradients do. Only one gradient is held at a time.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any, Self, cast

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from samecurve.core.protocols import MicroBatch
from samecurve.features.guard.additivity import Format, GradientNorms
from samecurve.torch_engine.optimizers import own_part
from samecurve.torch_engine.step import EngineSetup
from samecurve.torch_engine.users_code import caller, site_of

_WIDER = {torch.float32: torch.float64, torch.complex64: torch.complex128}
# float64 [1 + DIRECTIONS] by the parameter's name: the sum of squares, and the projections
Digests = dict[str, torch.Tensor]
DIRECTIONS = 4
_CHUNK = 1 << 10  # numbers that have directions of their own
_ROWS = 1 << 8  # chunks that have signs of their own
_AT_ONCE = 1 << 22  # numbers that are made float64 at once


def format_of(setup: EngineSetup) -> Format:
    """The format of losses: wider than in a step, where the weights are kept in a wider one."""
    plan = setup.plan
    if plan.compute.precision == "f64":
        return "f64"
    is_narrow = plan.compute.precision in {"bf16", "f16"}
    is_narrow = changes_products(setup) or (is_narrow and plan.layout.shards > 1)
    return "narrow" if is_narrow else "f32"


def changes_products(setup: EngineSetup) -> bool:
    """Whether a feature computes products in another format than the weights say."""
    return any(hooks.changes_products for hooks in setup.features.values())


class NarrowestFormat(TorchFunctionMode):
    """The narrowest floating-point format that torch's functions return inside of it.

    bytes: of one number
    function, where: the first one that returned it, and the line in the user's code
    """

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 8
        self.function: Any = None
        self.where = ""

    def __torch_function__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        is_float = isinstance(result, torch.Tensor) and result.is_floating_point()
        if is_float and result.dtype.itemsize < self.bytes:
            self.bytes, self.function = result.dtype.itemsize, func
            self.where = site_of(caller(), None).where
        return result


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


def added_up(features: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """A single number for features with a row a sample. It adds up over samples if each row depends
    on its own sample only.

    Each number of a row has a weight of its own, the same in every row, and is bent (asinh): rows
    minus their mean would add up to 0 however they are divided.
    """
    total = torch.zeros((), dtype=torch.float64)
    for feature in features.values():
        rows = torch.view_as_real(feature) if feature.is_complex() else feature
        rows = rows.reshape(len(feature), -1).double()
        places = torch.arange(rows.shape[1], dtype=torch.float64, device=rows.device)
        weights = 1 + places.cos() / 2
        total = total.to(rows.device) + (rows.asinh() * weights).sum()
    return total


# --- gradients


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


def dense_and_real(gradient: torch.Tensor) -> torch.Tensor:
    """A gradient with all its numbers; of complex ones both parts."""
    dense = gradient.detach()
    if dense.is_sparse:
        dense = dense.to_dense()
    return torch.view_as_real(dense.resolve_conj()) if dense.is_complex() else dense


def digest(gradient: torch.Tensor) -> torch.Tensor:
    """The digest of a gradient, or of this process's part of it; on its device."""
    flat = dense_and_real(gradient).reshape(-1)
    total = torch.zeros(1 + DIRECTIONS, dtype=torch.float64, device=flat.device)
    directions, signs = (table.to(flat.device) for table in _tables())
    for part in torch.split(flat, _AT_ONCE):
        wide = part.double()
        total[0] += wide.dot(wide)
        even = len(wide) // _CHUNK * _CHUNK
        for rows in torch.split(wide[:even].view(-1, _CHUNK), _ROWS):
            total[1:] += ((rows @ directions) * signs[: len(rows)]).sum(0)
        total[1:] += (wide[even:] @ directions[: len(wide) - even]) * signs[-1]
    return total


@cache
def _tables() -> tuple[torch.Tensor, torch.Tensor]:
    """Numbers 1 and -1 in random order: [numbers of a chunk, directions], [chunks, directions]."""
    generator = torch.Generator().manual_seed(0)
    shape = (_CHUNK + _ROWS, DIRECTIONS)
    ones = torch.randint(2, shape, generator=generator, device="cpu").mul(2).sub(1).double()
    return ones[:_CHUNK], ones[_CHUNK:]


def gradients_of(
    setup: EngineSetup, microbatch: MicroBatch, loss_sum: Callable[[Any], torch.Tensor]
) -> Digests:
    """Gradients of a loss's sum by the parameters of this process's first device.

    loss_sum: is given train() or call() of the strategy, with which it runs the task's loss

    RuntimeError: a checkpoint of torch's reentrant kind, which gives gradients in a step only.
    """
    strategy, model = setup.strategy, setup.strategy.models[0]
    strategy.reset()
    if setup.plan.layout.shards == 1:
        total = loss_sum(strategy.call)  # it may freeze layers until some step
        named = {name: p for name, p in model.named_parameters() if p.requires_grad}
        gradients = torch.autograd.grad(total, list(named.values()), allow_unused=True)
        return {
            name: digest(gradient)
            for name, gradient in zip(named, gradients, strict=True)
            if gradient is not None
        }
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    parameters = list(named.values())
    strategy.begin_step(parameters, setup.comm.world_size)  # a microbatch for each rank
    try:
        strategy.begin_microbatch(0, microbatch, is_last=True)
        torch.autograd.backward(loss_sum(strategy.train))
        strategy.end_microbatch(0, microbatch)
        strategy.reduce(parameters)
    finally:
        strategy.reset()
    of_shards = {name: digest(own_part(p.grad)) for name, p in named.items() if p.grad is not None}
    for parameter in parameters:
        parameter.grad = None
    return of_shards


def norms_of(
    setup: EngineSetup, whole: Digests, parts: Sequence[Digests]
) -> dict[str, GradientNorms]:
    """Norms of each parameter's gradient, over its shards; all ranks call it together."""
    setup.strategy.reset()
    names = [name for name, p in setup.strategy.models[0].named_parameters() if p.requires_grad]
    copies = setup.comm.world_size / setup.plan.layout.shards
    none = torch.zeros(1 + DIRECTIONS, dtype=torch.float64)
    each = [
        torch.stack([of_one.get(name, none).to(setup.device) for name in names])
        for of_one in (whole, *parts)
    ]
    squares = torch.stack([of_one[:, 0] for of_one in each], dim=1)
    rest = each[0][:, 1:] - sum(of_one[:, 1:] for of_one in each[1:])
    table = setup.comm.all_reduce(torch.cat([squares, rest], dim=1))() / copies
    norms = table[:, : len(each)].sqrt().tolist()
    differences = table[:, len(each) :].square().mean(1).sqrt().tolist()
    return {
        name: GradientNorms(whole=row[0], difference=difference, parts=row[1:])
        for name, row, difference in zip(names, norms, differences, strict=True)
    }
