"""LSTM, GRU and RNN with dropout between their layers: layer by layer, since a kernel of all layers
draws its masks inside.
"""

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch._C import _VariableFunctions

from samecurve.torch_engine.randomness.drawing import Drawing, begin_draw
from samecurve.torch_engine.randomness.dropout_layers import lane_threshold, mask_of, masked
from samecurve.torch_engine.randomness.microbatch_context import MicroBatchContext

_dropout: Callable[..., torch.Tensor] = _VariableFunctions.dropout  # torch.dropout may be served


def recurrent(
    name: str, original: Callable[..., Any], context: MicroBatchContext, *arguments: Any
) -> Any:
    """As torch's own of that name takes them.

    (input, state, weights, biases, layers, dropout, train, bidirectional, batch_first), or of
    packed sequences (data, batch_sizes, state, weights, biases, layers, dropout, train,
    bidirectional).
    """
    packed = isinstance(arguments[3], list | tuple)
    values, sizes = arguments[0], arguments[1] if packed else None
    state, weights, biases, layers, dropout, train, *rest = arguments[2 if packed else 1 :]
    if not (train and dropout and layers > 1):
        return original(*arguments)
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
    """A mask [samples, time, features] as packed sequences lie: at each time the samples that are
    so long, the longest first.
    """
    device, total = mask.device, sum(counts)
    sizes = torch.tensor(counts, device=device)
    times = torch.arange(len(counts), device=device).repeat_interleave(sizes, output_size=total)
    starts = torch.tensor([0, *accumulate(counts)][:-1], device=device)
    samples = torch.arange(total, device=device) - starts[times]
    if order is not None:
        samples = order[samples]
    return mask[samples, times]
