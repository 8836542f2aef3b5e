"""scaled_dot_product_attention with dropout: its kernels draw their masks inside."""

import math
from collections.abc import Callable
from typing import Any

import torch

from samecurve.torch_engine.randomness.drawing import begin_draw
from samecurve.torch_engine.randomness.dropout_layers import lane_threshold, mask_of, masked
from samecurve.torch_engine.randomness.microbatch_context import MicroBatchContext


def attention(
    original: Callable[..., Any],
    context: MicroBatchContext,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    **options: Any,
) -> torch.Tensor:
    """As torch documents its arithmetic; all weights are held, [..., queries, keys].

    options: attn_mask, dropout_p, is_causal, scale and enable_gqa, as torch's own.
    """
    shape = [*query.shape[:-1], key.shape[-2]]
    drawing = begin_draw(context, "F.scaled_dot_product_attention", shape)
    if drawing is None:
        attended: torch.Tensor = original(query, key, value, **options)
        return attended
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
