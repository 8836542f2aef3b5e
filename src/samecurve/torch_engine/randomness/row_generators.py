"""What torch itself draws, row by row, with a generator that follows the row: poisson, multinomial,
randperm and others whose numbers can't be computed from keys.

Each takes the original, then the microbatch, then what the original takes.
"""

from typing import Any

import torch

from samecurve.torch_engine.randomness.drawing import (
    Original,
    begin_draw,
    begin_unless_own,
    note_unserved,
)
from samecurve.torch_engine.randomness.microbatch_context import MicroBatchContext


def row_by_row(
    name: str, original: Original, context: MicroBatchContext, *arguments: Any, **options: Any
) -> Any:
    """A function whose result has the shape of its first tensor: each row's part of every tensor of
    that shape, with the row's own generator.
    """
    by_name = [options.pop(key) for key in ("input", "count", "prob") if key in options]
    arguments = (*arguments, *by_name)
    first = arguments[0]
    drawing = begin_unless_own(context, name, first.shape, options.get("generator"))
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


def randperm(original: Original, context: MicroBatchContext, n: int, **options: Any) -> Any:
    """Of the microbatch's samples it can't be served: it is no number of a sample."""
    drawing = begin_unless_own(
        context, "torch.randperm", [n], options.get("generator"), is_separable=False
    )
    if drawing is None:
        return original(n, **options)
    device = torch.device(options.get("device") or torch.get_default_device())
    named = {key: value for key, value in options.items() if key != "generator"}
    return drawing.by_generator(
        lambda _part, generator: original(n, generator=generator, **named), device
    )
