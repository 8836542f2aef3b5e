"""torch's random functions, as a microbatch serves them: the numbers follow samples or step.

Each function here takes the original, then the microbatch, then what the original takes.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from samecurve.torch_engine.keyed.drawing import Drawing, begin_draw, note_unserved
from samecurve.torch_engine.keyed.recurrent import recurrent
from samecurve.torch_engine.layers.context import MicroBatchContext
from samecurve.torch_engine.layers.dropout import lane_threshold, mask_of, masked

# Any: a function of torch is called as its user calls it, in each of its forms.
Original = Callable[..., Any]
Serve = Callable[..., Any]  # (original, microbatch, *arguments, **options)
Numbers = Callable[[Drawing, torch.dtype], torch.Tensor]

_SELU = 1.7580993408473766  # what alpha dropout drops to, negative


def _uniform(drawing: Drawing, dtype: torch.dtype) -> torch.Tensor:
    if not dtype.is_complex:
        return drawing.uniform(dtype)
    real = Drawing(
        drawing.context,
        drawing.number,
        torch.Size([*drawing.shape, 2]),
        drawing.rule,
        drawing.rows,
    )
    return torch.view_as_complex(real.uniform(dtype.to_real()).contiguous())


def _normal(drawing: Drawing, dtype: torch.dtype) -> torch.Tensor:
    return drawing.normal(dtype)


def _made(
    name: str,
    numbers: Numbers,
    make: Original,
    original: Original,
    context: MicroBatchContext,
    *arguments: Any,
    **options: Any,
) -> Any:
    """rand, randn and their _like forms: `make` gives a tensor of that kind, without values."""
    generator = options.pop("generator", None)
    empty = make(*arguments, **options)
    if generator is not None:
        note_unserved(context, name, empty.shape)
        return original(*arguments, generator=generator, **options)
    drawing = begin_draw(context, name, empty.shape) if empty.numel() else None
    if drawing is None:
        return original(*arguments, **options)
    with torch.no_grad():
        values = numbers(drawing, empty.dtype)
        return _given(values, empty, options)


def _given(values: torch.Tensor, empty: torch.Tensor, options: Mapping[str, Any]) -> torch.Tensor:
    """The values as they are, where that is what was asked for, else in the tensor that is."""
    is_plain = options.keys() <= {"dtype", "device", "requires_grad", "size"}
    if is_plain and values.dtype == empty.dtype and values.stride() == empty.stride():
        return values.requires_grad_(empty.requires_grad)
    with torch.no_grad():
        return empty.copy_(values)


def _randint(
    name: str,
    make: Original,
    original: Original,
    context: MicroBatchContext,
    *arguments: Any,
    **options: Any,
) -> Any:
    """randint, and randint_like where `make` takes a tensor first."""
    given, like = list(arguments), name.endswith("_like")
    first: list[Any] = [given.pop(0)] if like and given else []
    named = dict(options)
    size = [] if like else [named.pop("size") if "size" in named else given.pop()]
    low, high = named.pop("low", None), named.pop("high", None)
    if high is None:
        high = given.pop()
    if low is None:
        low = given.pop() if given else 0
    generator = named.pop("generator", None)
    if not like:
        named["dtype"] = named.get("dtype") or torch.int64
    empty = make(*first, *size, **named)
    if generator is not None:
        note_unserved(context, name, empty.shape)
        return original(*arguments, **options)
    drawing = begin_draw(context, name, empty.shape) if empty.numel() else None
    if drawing is None:
        return original(*arguments, **options)
    return _given(drawing.integers(int(low), int(high)).to(empty.dtype), empty, named)


def _torch_normal(
    original: Original,
    context: MicroBatchContext,
    mean: Any,
    std: Any = 1.0,
    size: Any = None,
    *,
    generator: torch.Generator | None = None,
    out: torch.Tensor | None = None,
    **options: Any,
) -> Any:
    """torch.normal: of two tensors, of one and a number, or of two numbers and a size."""
    if size is not None:
        empty = torch.empty(size, out=out, **options)
    else:
        tensors = [value for value in (mean, std) if isinstance(value, torch.Tensor)]
        shape = torch.broadcast_tensors(*tensors)[0].shape  # type: ignore[no-untyped-call]
        empty = tensors[0].new_empty(shape) if out is None else out
    drawing = None
    if generator is not None:
        note_unserved(context, "torch.normal", empty.shape)
    elif empty.numel():
        drawing = begin_draw(context, "torch.normal", empty.shape)
    if drawing is None:
        more = {**options, "generator": generator}
        if out is not None:
            more["out"] = out
        return original(mean, std, *([] if size is None else [size]), **more)
    with torch.no_grad():
        values = drawing.normal(empty.dtype).mul(std).add(mean)
        return empty.copy_(values) if out is not None or empty.requires_grad else values


def _filled(
    name: str,
    values: Callable[..., torch.Tensor],
    original: Original,
    context: MicroBatchContext,
    target: torch.Tensor,
    *arguments: Any,
    **options: Any,
) -> torch.Tensor:
    """A tensor's in-place method. values: (drawing, target, *arguments, **options)."""
    generator = options.pop("generator", None)
    drawing = None
    if generator is not None:
        note_unserved(context, name, target.shape)
        options["generator"] = generator
    elif target.numel():
        drawing = begin_draw(context, name, target.shape)
    if drawing is None:
        filled: torch.Tensor = original(target, *arguments, **options)
        return filled
    with torch.no_grad():
        drawn = values(drawing, target, *arguments, **options)
    return target.copy_(drawn)


# `from` is a word of Python, so torch's own argument of that name comes in `limits`.


def _uniform_values(
    drawing: Drawing, target: torch.Tensor, *given: float, **limits: float
) -> torch.Tensor:
    low, high = _limits(given, limits)
    return _uniform(drawing, target.dtype).mul_(high - low).add_(low)


def _limits(given: tuple[float, ...], limits: Mapping[str, float]) -> tuple[float, float]:
    low = given[0] if given else limits.get("from", 0.0)
    high = given[1] if len(given) > 1 else limits.get("to", 1.0)
    return low, high


def _normal_values(
    drawing: Drawing, target: torch.Tensor, mean: float = 0.0, std: float = 1.0
) -> torch.Tensor:
    return drawing.normal(target.dtype).mul_(std).add_(mean)


def _exponential_values(drawing: Drawing, target: torch.Tensor, lambd: float = 1.0) -> torch.Tensor:
    dtype = torch.float64 if target.dtype == torch.float64 else torch.float32
    half = 0.5**54 if dtype == torch.float64 else 0.5**25  # of a step: never 0, as torch's
    return drawing.uniform(dtype).mul_(-1).add_(1 - half).log_().mul_(-1 / lambd)


def _bernoulli_values(
    drawing: Drawing, _target: torch.Tensor, p: float | torch.Tensor = 0.5
) -> torch.Tensor:
    dtype = p.dtype if isinstance(p, torch.Tensor) else torch.float32
    dtype = torch.float64 if dtype == torch.float64 else torch.float32
    return drawing.uniform(dtype) < p


def _torch_bernoulli(
    original: Original,
    context: MicroBatchContext,
    input: torch.Tensor,  # noqa: A002 - torch's name
    p: float | None = None,
    *,
    generator: torch.Generator | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    drawing = None
    if generator is not None:
        note_unserved(context, "torch.bernoulli", input.shape)
    elif input.numel():
        drawing = begin_draw(context, "torch.bernoulli", input.shape)
    if drawing is None:
        given = [input] if p is None else [input, p]
        options = {} if out is None else {"out": out}
        drawn: torch.Tensor = original(*given, generator=generator, **options)
        return drawn
    with torch.no_grad():
        values = _bernoulli_values(drawing, input, input if p is None else p)
        return values.to(input.dtype) if out is None else out.copy_(values)


@dataclass(frozen=True)
class _DropoutKind:
    """channels: dropped whole. alpha: what is dropped is not 0, and the variance is kept."""

    name: str
    channels: bool = False
    alpha: bool = False
    inplace: bool = False


def _dropout(
    kind: _DropoutKind,
    original: Original,
    context: MicroBatchContext,
    *arguments: Any,
    **options: Any,
) -> torch.Tensor:
    """As torch._VF's: (input, p, train)."""
    values, p, train = _by_name(("input", "p", "train"), arguments, options)
    shape = values.shape
    if kind.channels and values.dim() >= 2:
        shape = torch.Size([*shape[:2], *[1] * (values.dim() - 2)])
    drawing = None
    if train and p and values.numel():
        drawing = begin_draw(context, f"F.{kind.name}", shape)
    if drawing is None:
        dropped: torch.Tensor = original(values, p, train)
        return dropped
    threshold = lane_threshold(p)
    mask = mask_of(drawing.lanes(), threshold, values)
    if not kind.alpha or p == 1:
        return masked(values, mask, p, inplace=kind.inplace)
    rate = (threshold + 32768) / 65536
    scale = 1 / math.sqrt((_SELU**2 * rate + 1) * (1 - rate))
    kept = mask.to(values.dtype)
    shift = (kept - 1).mul_(_SELU * scale).add_(_SELU * scale * rate)
    kept = kept * scale
    scaled: torch.Tensor = values.mul_(kept) if kind.inplace else values * kept
    return scaled.add_(shift)


def _rrelu(
    inplace: bool,  # noqa: FBT001 - bound below
    original: Original,
    context: MicroBatchContext,
    *arguments: Any,
    **options: Any,
) -> torch.Tensor:
    """As torch._VF's: (input, lower, upper, training, generator)."""
    names = ("input", "lower", "upper", "training", "generator")
    values, lower, upper, training, generator = _by_name(
        names,
        arguments,
        {"lower": 1 / 8, "upper": 1 / 3, "training": False, "generator": None},
        options,
    )
    drawing = None
    if training and generator is None and values.numel():
        drawing = begin_draw(context, "F.rrelu", values.shape)
    if drawing is None:
        result: torch.Tensor = original(*arguments, **options)
        return result
    slopes = drawing.uniform(values.dtype).mul_(upper - lower).add_(lower)
    factors = torch.where(values.detach() < 0, slopes, 1)
    scaled: torch.Tensor = values.mul_(factors) if inplace else values * factors
    return scaled


def _by_name(
    names: Sequence[str], arguments: Sequence[Any], *options: Mapping[str, Any]
) -> tuple[Any, ...]:
    """Arguments in the order of their names. options: defaults, then what is given by name."""
    given = {name: value for named in options for name, value in named.items()}
    given.update(zip(names, arguments, strict=False))
    return tuple(given[name] for name in names)


def _row_by_row(
    name: str, original: Original, context: MicroBatchContext, *arguments: Any, **options: Any
) -> Any:
    """A function whose result has the shape of its first tensor: each row's part of every tensor of
    that shape, with the row's own generator.
    """
    by_name = [options.pop(key) for key in ("input", "count", "prob") if key in options]
    arguments = (*arguments, *by_name)
    first = arguments[0]
    drawing = None
    if options.get("generator") is not None:
        note_unserved(context, name, first.shape)
    elif first.numel():
        drawing = begin_draw(context, name, first.shape)
    if drawing is None:
        return original(*arguments, **options)
    named = {key: value for key, value in options.items() if key != "generator"}
    dim = max(drawing.rule, 0)

    def of_part(part: slice, generator: torch.Generator) -> torch.Tensor:
        cut = [
            value[(slice(None),) * dim + (part,)]
            if isinstance(value, torch.Tensor) and value.shape == first.shape and value.dim()
            else value
            for value in arguments
        ]
        result: torch.Tensor = original(*cut, generator=generator, **named)
        return result

    drawn = drawing.by_generator(of_part, first.device)
    return first if name.endswith("_") else drawn


def _multinomial(
    original: Original,
    context: MicroBatchContext,
    input: torch.Tensor,  # noqa: A002 - torch's name
    num_samples: int,
    replacement: bool = False,  # noqa: FBT001, FBT002 - as torch's own
    *,
    generator: torch.Generator | None = None,
    out: torch.Tensor | None = None,
) -> Any:
    """Rows of a matrix are drawn from each by itself; of one vector, as many numbers as are asked
    for, which only with replacement don't depend on each other.
    """
    rows = input.dim() > 1
    shape = [len(input)] if rows else [num_samples]
    drawing = None
    if generator is not None:
        note_unserved(context, "torch.multinomial", shape)
    else:
        separable = rows or replacement or num_samples == 1
        drawing = begin_draw(context, "torch.multinomial", shape, is_separable=separable)
    if drawing is None:
        options = {} if out is None else {"out": out}
        return original(input, num_samples, replacement, generator=generator, **options)

    def of_part(part: slice, generator: torch.Generator) -> torch.Tensor:
        if rows:
            drawn = original(input[part], num_samples, replacement, generator=generator)
        else:
            count = len(range(num_samples)[part])
            drawn = original(input, count, replacement, generator=generator)
        return drawn  # type: ignore[no-any-return]

    result = drawing.by_generator(of_part, input.device)
    return result if out is None else out.copy_(result)


def _randperm(original: Original, context: MicroBatchContext, n: int, **options: Any) -> Any:
    """Of the microbatch's samples it can't be served: it is no number of a sample."""
    drawing = None
    if options.get("generator") is not None:
        note_unserved(context, "torch.randperm", [n])
    elif n:
        drawing = begin_draw(context, "torch.randperm", [n], is_separable=False)
    if drawing is None:
        return original(n, **options)
    device = torch.device(options.get("device") or torch.get_default_device())
    named = {key: value for key, value in options.items() if key != "generator"}
    return drawing.by_generator(
        lambda _part, generator: original(n, generator=generator, **named), device
    )


def torch_functions() -> dict[str, Serve]:
    """Of `torch`, by name."""
    empty, empty_like = torch.empty, torch.empty_like
    return {
        "rand": partial(_made, "torch.rand", _uniform, empty),
        "randn": partial(_made, "torch.randn", _normal, empty),
        "rand_like": partial(_made, "torch.rand_like", _uniform, empty_like),
        "randn_like": partial(_made, "torch.randn_like", _normal, empty_like),
        "randint": partial(_randint, "torch.randint", empty),
        "randint_like": partial(_randint, "torch.randint_like", empty_like),
        "normal": _torch_normal,
        "bernoulli": _torch_bernoulli,
        "multinomial": _multinomial,
        "randperm": _randperm,
        "poisson": partial(_row_by_row, "torch.poisson"),
        "binomial": partial(_row_by_row, "torch.binomial"),
        "_standard_gamma": partial(_row_by_row, "torch._standard_gamma"),
        "_sample_dirichlet": partial(_row_by_row, "torch._sample_dirichlet"),
        **inner_functions(),
    }


def inner_functions() -> dict[str, Serve]:
    """Of `torch._VF`, through which torch.nn calls them, and of `torch`."""
    kinds = (
        _DropoutKind("dropout"),
        _DropoutKind("feature_dropout", channels=True),
        _DropoutKind("alpha_dropout", alpha=True),
        _DropoutKind("feature_alpha_dropout", channels=True, alpha=True),
    )
    functions: dict[str, Serve] = {}
    for kind in kinds:
        functions[kind.name] = partial(_dropout, kind)
        functions[f"{kind.name}_"] = partial(_dropout, replace(kind, inplace=True))
    functions["rrelu"], functions["rrelu_"] = partial(_rrelu, False), partial(_rrelu, True)
    for name in ("lstm", "gru", "rnn_tanh", "rnn_relu"):
        functions[name] = partial(recurrent, name)
    return functions


def tensor_methods() -> dict[str, Serve]:
    """Of `torch.Tensor`."""
    in_place: dict[str, Callable[..., torch.Tensor]] = {
        "uniform_": _uniform_values,
        "normal_": _normal_values,
        "exponential_": _exponential_values,
        "bernoulli_": _bernoulli_values,
    }
    methods: dict[str, Serve] = {
        name: partial(_filled, f"Tensor.{name}", values) for name, values in in_place.items()
    }
    for name in ("random_", "log_normal_", "cauchy_", "geometric_"):
        methods[name] = partial(_row_by_row, f"Tensor.{name}")
    return {**methods, "bernoulli": _torch_bernoulli, "multinomial": _multinomial}
