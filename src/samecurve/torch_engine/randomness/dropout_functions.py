"""torch's functions that drop: dropout in its forms, rrelu, attention and recurrent layers, with
masks and slopes from the keys of samples.

Each function takes the original function of torch, the microbatch, and what the original takes. It
returns None where the original is to be called: nothing is dropped, or no mask can be served.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch._C import _VariableFunctions

from samecurve.torch_engine.randomness import MicroBatchContext
from samecurve.torch_engine.randomness.drawing import Drawing, Original, begin_draw
from samecurve.torch_engine.randomness.dropout_layers import lane_threshold, mask_of, masked

_SELU = 1.7580993408473766  # what alpha dropout drops to, negative
# torch.dropout itself may be replaced
_dropout: Callable[..., torch.Tensor] = _VariableFunctions.dropout


@dataclass(frozen=True)
class DropoutKind:
    """A form of dropout.

    channels: whole channels are dropped
    alpha: dropped elements are not 0, and the variance is kept
    """

    name: str
    channels: bool = False
    alpha: bool = False
    inplace: bool = False


def dropout(
    kind: DropoutKind,
    _original: Original,
    context: MicroBatchContext,
    *arguments: Any,
    **options: Any,
) -> torch.Tensor | None:
    """Dropout with the arguments of torch._VF's: (input, p, train)."""
    values, p, train = _by_name(("input", "p", "train"), arguments, options)
    shape = values.shape
    if kind.channels and values.dim() >= 2:
        shape = torch.Size([*shape[:2], *[1] * (values.dim() - 2)])
    if not (train and p and values.numel()):
        return None
    drawing = begin_draw(context, f"F.{kind.name}", shape)
    if drawing is None:
        return None
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
    _original: Original,
    context: MicroBatchContext,
    *arguments: Any,
    **options: Any,
) -> torch.Tensor | None:
    """rrelu with the arguments of torch._VF's: (input, lower, upper, training, generator)."""
    names = ("input", "lower", "upper", "training", "generator")
    values, lower, upper, training, generator = _by_name(
        names,
        arguments,
        {"lower": 1 / 8, "upper": 1 / 3, "training": False, "generator": None},
        options,
    )
    if not training or generator is not None or not values.numel():
        return None
    drawing = begin_draw(context, "F.rrelu", values.shape)
    if drawing is None:
        return None
    slopes = drawing.uniform(values.dtype).mul_(upper - lower).add_(lower)
    factors = torch.where(values.detach() < 0, slopes, 1)
    scaled: torch.Tensor = values.mul_(factors) if inplace else values * factors
    return scaled


def attention(
    _original: Original,
    context: MicroBatchContext,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    **options: Any,
) -> torch.Tensor | None:
    """scaled_dot_product_attention with dropout, in the arithmetic that torch documents: torch's
    kernels draw their masks inside. It holds all attention weights, [..., queries, keys].

    options: attn_mask, dropout_p, is_causal, scale and enable_gqa, as torch's own
    """
    shape = [*query.shape[:-1], key.shape[-2]]
    drawing = begin_draw(context, "F.scaled_dot_product_attention", shape)
    if drawing is None:
        return None
    dropout_p, scale = options["dropout_p"], options.get("scale")
    attn_mask: torch.Tensor | None = options["attn_mask"]
    if options.get("enable_gqa"):
        groups = query.shape[-3] // key.shape[-3]
        key, value = (part.repeat_interleave(groups, -3) for part in (key, value))
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    scores = query * scale @ key.transpose(-2, -1)
    if options["is_causal"]:
        allowed = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
        scores = scores.masked_fill(~allowed, -math.inf)
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        scores = scores.masked_fill(~attn_mask, -math.inf)
    elif attn_mask is not None:
        scores = scores + attn_mask
    weights = scores.softmax(-1).to(scores.dtype)
    mask = mask_of(drawing.lanes(), lane_threshold(dropout_p), weights)
    return masked(weights, mask, dropout_p, inplace=False).to(value.dtype) @ value


def recurrent(
    name: str, original: Callable[..., Any], context: MicroBatchContext, *arguments: Any
) -> Any:
    """LSTM, GRU and RNN with dropout between their layers, computed layer by layer: torch's kernel
    of all layers draws its masks inside.

    arguments: as torch's own: (input, state, weights, biases, layers, dropout, train,
    bidirectional, batch_first), or of packed sequences (data, batch_sizes, state, weights, biases,
    layers, dropout, train, bidirectional).
    """
    packed = isinstance(arguments[3], list | tuple)
    values, sizes = arguments[0], arguments[1] if packed else None
    state, weights, biases, layers, dropout, train, *rest = arguments[2 if packed else 1 :]
    if not (train and dropout and layers > 1):
        return None
    states = _by_layer(state, layers)
    each = len(weights) // layers
    ends = []
    for layer, of_layer in enumerate(states):
        own = weights[layer * each : (layer + 1) * each]
        inputs = [values] if sizes is None else [values, sizes]
        settings = (biases, 1, 0.0, train, *rest)  # of one layer, without dropout
        values, *end = original(*inputs, of_layer, own, *settings)
        ends.append(end)
        if layer < layers - 1:
            function = f"nn.{name.split('_', maxsplit=1)[0].upper()}'s dropout"
            if sizes is None:
                drawing = begin_draw(context, function, values.shape, samples_in=1 - rest[-1])
            else:
                padded = [int(sizes[0]), len(sizes), values.shape[1]]
                drawing = begin_draw(context, function, padded, samples_in=0)
            values = _dropped(values, dropout, drawing, sizes)
    return (values, *(torch.cat(parts) for parts in zip(*ends, strict=True)))


def _by_layer(state: Any, layers: int) -> Sequence[Any]:
    """state: [layers * directions, samples, hidden], or two of them."""
    if isinstance(state, torch.Tensor):
        return state.chunk(layers)
    return list(zip(*(part.chunk(layers) for part in state), strict=True))


def _dropped(
    values: torch.Tensor, p: float, drawing: Drawing | None, sizes: torch.Tensor | None
) -> torch.Tensor:
    if drawing is None:
        return _dropout(values, p, True)
    mask = mask_of(drawing.lanes(), lane_threshold(p), values)
    if sizes is not None:
        mask = _packed(mask, sizes.tolist(), drawing.context.packed_order)
    return masked(values, mask, p, inplace=False)


def _packed(mask: torch.Tensor, counts: list[int], order: torch.Tensor | None) -> torch.Tensor:
    """A mask [samples, time, features] in the layout of packed sequences: at each time the samples
    that are long enough, the longest first.
    """
    device, total = mask.device, sum(counts)
    sizes = torch.tensor(counts, device=device)
    times = torch.arange(len(counts), device=device).repeat_interleave(sizes, output_size=total)
    starts = torch.tensor([0, *accumulate(counts)][:-1], device=device)
    samples = torch.arange(total, device=device) - starts[times]
    if order is not None:
        samples = order[samples]
    return mask[samples, times]


def _by_name(
    names: Sequence[str], arguments: Sequence[Any], *options: Mapping[str, Any]
) -> tuple[Any, ...]:
    """Arguments in the order of their names. options: defaults, then arguments given by name."""
    values = {name: value for named in options for name, value in named.items()}
    values.update(zip(names, arguments, strict=False))
    return tuple(values[name] for name in names)
