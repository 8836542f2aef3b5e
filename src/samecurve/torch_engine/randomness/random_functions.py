"""torch's random functions as a microbatch serves them: the numbers follow samples, or the step.

Numbers of the uniform, normal, exponential and Bernoulli distributions and integers are computed
from keys. Other numbers (poisson, multinomial, randperm) can't be: torch draws them row by row,
with a generator that is seeded by the row's key.

Each function takes the original function of torch, the microbatch, and what the original takes. It
returns None where the original is to draw: the call has a generator of its own, or its numbers can
follow neither samples nor step.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch

from samecurve.torch_engine.randomness import MicroBatchContext
from samecurve.torch_engine.randomness.drawing import (
    Drawing,
    Original,
    Part,
    begin_draw,
    begin_unless_own,
    note_unserved,
)

Numbers = Callable[[Drawing, torch.dtype], torch.Tensor]


def uniform(drawing: Drawing, dtype: torch.dtype) -> torch.Tensor:
    if not dtype.is_complex:
        return drawing.uniform(dtype)
    real = replace(drawing, shape=torch.Size([*drawing.shape, 2]))
    return torch.view_as_complex(real.uniform(dtype.to_real()).contiguous())


def normal(drawing: Drawing, dtype: torch.dtype) -> torch.Tensor:
    return drawing.normal(dtype)


def new_tensor(
    name: str,
    numbers: Numbers,
    make: Original,
    _original: Original,
    context: MicroBatchContext,
    *arguments: Any,
    **options: Any,
) -> torch.Tensor | None:
    """rand, randn and their _like forms. make: returns such a tensor without values."""
    generator = options.pop("generator", None)
    empty = make(*arguments, **options)
    drawing = begin_unless_own(context, name, empty.shape, generator)
    if drawing is None:
        return None
    with torch.no_grad():
        values = numbers(drawing, empty.dtype)
        return _in_form(values, empty, options)


def _in_form(values: torch.Tensor, empty: torch.Tensor, options: Mapping[str, Any]) -> torch.Tensor:
    """The values in the form that the call asks for: as they are, or copied into `empty`."""
    is_plain = options.keys() <= {"dtype", "device", "requires_grad", "size"}
    if is_plain and values.dtype == empty.dtype and values.stride() == empty.stride():
        return values.requires_grad_(empty.requires_grad)
    with torch.no_grad():
        return empty.copy_(values)


def randint(
    name: str,
    make: Original,
    _original: Original,
    context: MicroBatchContext,
    *arguments: Any,
    **options: Any,
) -> torch.Tensor | None:
    """randint and randint_like. make: returns such a tensor without values."""
    remaining, like = list(arguments), name.endswith("_like")
    first: list[Any] = [remaining.pop(0)] if like and remaining else []
    named = dict(options)
    size = [] if like else [named.pop("size") if "size" in named else remaining.pop()]
    low, high = named.pop("low", None), named.pop("high", None)
    if high is None:
        high = remaining.pop()
    if low is None:
        low = remaining.pop() if remaining else 0
    generator = named.pop("generator", None)
    if not like:
        named["dtype"] = named.get("dtype") or torch.int64
    empty = make(*first, *size, **named)
    drawing = begin_unless_own(context, name, empty.shape, generator)
    if drawing is None:
        return None
    return _in_form(drawing.integers(int(low), int(high)).to(empty.dtype), empty, named)


def torch_normal(
    _original: Original,
    context: MicroBatchContext,
    mean: Any,
    std: Any = 1.0,
    size: Any = None,
    *,
    generator: torch.Generator | None = None,
    out: torch.Tensor | None = None,
    **options: Any,
) -> torch.Tensor | None:
    """torch.normal of two tensors, of a tensor and a number, or of two numbers and a size."""
    if size is not None:
        empty = torch.empty(size, out=out, **options)
    else:
        tensors = [value for value in (mean, std) if isinstance(value, torch.Tensor)]
        shape = torch.broadcast_tensors(*tensors)[0].shape  # type: ignore[no-untyped-call]
        empty = tensors[0].new_empty(shape) if out is None else out
    drawing = begin_unless_own(context, "torch.normal", empty.shape, generator)
    if drawing is None:
        return None
    with torch.no_grad():
        values = drawing.normal(empty.dtype).mul(std).add(mean)
        return empty.copy_(values) if out is not None or empty.requires_grad else values


def fill_in_place(
    name: str,
    values: Callable[..., torch.Tensor],
    _original: Original,
    context: MicroBatchContext,
    target: torch.Tensor,
    *arguments: Any,
    **options: Any,
) -> torch.Tensor | None:
    """A tensor's in-place method. values: takes (drawing, target, *arguments, **options)."""
    generator = options.pop("generator", None)
    drawing = begin_unless_own(context, name, target.shape, generator)
    if drawing is None:
        return None
    with torch.no_grad():
        drawn = values(drawing, target, *arguments, **options)
    return target.copy_(drawn)


# `from` is a keyword of Python, so torch's own argument of that name comes in `limits`.
def uniform_values(
    drawing: Drawing, target: torch.Tensor, *by_place: float, **limits: float
) -> torch.Tensor:
    low, high = _limits(by_place, limits)
    return uniform(drawing, target.dtype).mul_(high - low).add_(low)


def _limits(by_place: tuple[float, ...], limits: Mapping[str, float]) -> tuple[float, float]:
    low = by_place[0] if by_place else limits.get("from", 0.0)
    high = by_place[1] if len(by_place) > 1 else limits.get("to", 1.0)
    return low, high


def normal_values(
    drawing: Drawing, target: torch.Tensor, mean: float = 0.0, std: float = 1.0
) -> torch.Tensor:
    return drawing.normal(target.dtype).mul_(std).add_(mean)


def exponential_values(drawing: Drawing, target: torch.Tensor, lambd: float = 1.0) -> torch.Tensor:
    dtype = torch.float64 if target.dtype == torch.float64 else torch.float32
    half = 0.5**54 if dtype == torch.float64 else 0.5**25  # of a step: never 0, as torch's
    return drawing.uniform(dtype).mul_(-1).add_(1 - half).log_().mul_(-1 / lambd)


def bernoulli_values(
    drawing: Drawing, _target: torch.Tensor, p: float | torch.Tensor = 0.5
) -> torch.Tensor:
    dtype = p.dtype if isinstance(p, torch.Tensor) else torch.float32
    dtype = torch.float64 if dtype == torch.float64 else torch.float32
    return drawing.uniform(dtype) < p


def torch_bernoulli(
    _original: Original,
    context: MicroBatchContext,
    input: torch.Tensor,  # noqa: A002 - torch's name
    p: float | None = None,
    *,
    generator: torch.Generator | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor | None:
    drawing = begin_unless_own(context, "torch.bernoulli", input.shape, generator)
    if drawing is None:
        return None
    with torch.no_grad():
        values = bernoulli_values(drawing, input, input if p is None else p)
        return values.to(input.dtype) if out is None else out.copy_(values)


def row_by_row(
    name: str, original: Original, context: MicroBatchContext, *arguments: Any, **options: Any
) -> torch.Tensor | None:
    """A function of torch whose result has the shape of its first tensor, called for each row by
    itself: with the row's part of every tensor of that shape, and the row's own generator.
    """
    by_name = [options.pop(key) for key in ("input", "count", "prob") if key in options]
    arguments = (*arguments, *by_name)
    first: torch.Tensor = arguments[0]
    drawing = begin_unless_own(context, name, first.shape, options.get("generator"))
    if drawing is None:
        return None
    named = {key: value for key, value in options.items() if key != "generator"}
    dim = max(drawing.rule, 0)

    def of_part(part: Part, generator: torch.Generator) -> torch.Tensor:
        cut = [
            value[(slice(None),) * dim + (part,)]
            if isinstance(value, torch.Tensor) and value.shape == first.shape and value.dim()
            else value
            for value in arguments
        ]
        result: torch.Tensor = original(*cut, generator=generator, **named)
        return result

    drawn = drawing.by_generator(of_part, first.device)
    if not name.endswith("_"):
        return drawn
    with torch.no_grad():  # the rows of a sample that are no neighbours were copies
        return first.copy_(drawn)


def multinomial(
    original: Original,
    context: MicroBatchContext,
    input: torch.Tensor,  # noqa: A002 - torch's name
    num_samples: int,
    replacement: bool = False,  # noqa: FBT001, FBT002 - as torch's own
    *,
    generator: torch.Generator | None = None,
    out: torch.Tensor | None = None,
) -> Any:
    """torch.multinomial. Each row of a matrix is drawn from by itself. Several numbers from one
    vector can follow the samples only with replacement, since they depend on each other without.
    """
    rows = input.dim() > 1
    shape = [len(input)] if rows else [num_samples]
    drawing = None
    if generator is not None:
        note_unserved(context, shape)
    else:
        separable = rows or replacement or num_samples == 1
        drawing = begin_draw(context, "torch.multinomial", shape, is_separable=separable)
    if drawing is None:
        return None

    def of_part(part: Part, generator: torch.Generator) -> torch.Tensor:
        if rows:
            drawn = original(input[part], num_samples, replacement, generator=generator)
        else:
            count = len(torch.arange(num_samples)[part])
            drawn = original(input, count, replacement, generator=generator)
        return drawn  # type: ignore[no-any-return]

    result = drawing.by_generator(of_part, input.device)
    return result if out is None else out.copy_(result)


def randperm(original: Original, context: MicroBatchContext, n: int, **options: Any) -> Any:
    """torch.randperm, which can follow the step only: a permutation has no numbers of a sample."""
    drawing = begin_unless_own(
        context, "torch.randperm", [n], options.get("generator"), is_separable=False
    )
    if drawing is None:
        return None
    device = torch.device(options.get("device") or torch.get_default_device())
    named = {key: value for key, value in options.items() if key != "generator"}
    return drawing.by_generator(
        lambda _part, generator: original(n, generator=generator, **named), device
    )
