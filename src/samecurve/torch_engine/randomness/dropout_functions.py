"""Dropout in its forms, and rrelu, as torch._VF has them: masks and slopes by the keys of samples.

Each takes the original, then the microbatch, then what the original takes.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from samecurve.torch_engine.randomness.drawing import Original, begin_draw
from samecurve.torch_engine.randomness.dropout_layers import lane_threshold, mask_of, masked
from samecurve.torch_engine.randomness.microbatch_context import MicroBatchContext

_SELU = 1.7580993408473766  # what alpha dropout drops to, negative


@dataclass(frozen=True)
class DropoutKind:
    """channels: dropped whole. alpha: what is dropped is not 0, and the variance is kept."""

    name: str
    channels: bool = False
    alpha: bool = False
    inplace: bool = False


def dropout(
    kind: DropoutKind,
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


def rrelu(
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
    """Arguments in the order of their names. options: defaults, then what comes by name."""
    values = {name: value for named in options for name, value in named.items()}
    values.update(zip(names, arguments, strict=False))
    return tuple(values[name] for name in names)
