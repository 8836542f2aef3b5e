"""Operations and memory for training one row of a transformers model, for the plan."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from samecurve.seam import counted
from samecurve.torch_engine.model.model_setup import repeated_blocks
from samecurve_products.lora.quantized import Packing, QuantizedLinear
from samecurve_products.task_parts.forward_costs import (
    SavedActivations,
    count_saved,
    saved_facts,
    to_empty,
)
from samecurve_products.text.huggingface.causal import LossHead

# names registered with the library: sdpa without a mask, and experts of known sizes
_UNMASKED, _ALIKE = "sdpa_without_mask", "experts_alike"


def cost_facts(
    make_model: Callable[[], Any],
    config: Any,
    length: int,
    texts: int = 1,
    *,
    packed: bool = False,
    all_logits: bool = False,
) -> dict[str, Any]:
    """Fields of Facts. Activations are left out where a forward pass depends on values.

    length: tokens of a text; texts: in a row
    packed: rows may hold several documents, which a mask keeps apart
    all_logits: the loss needs all logits at once, not those of some tokens at a time
    """
    with torch.device("meta"):
        model = make_model()
    flops = _flops(model, config, length, texts)
    narrow_products = torch.autocast("cpu", dtype=torch.bfloat16)
    wide = _saved(make_model, length, autocast=nullcontext(), packed=packed)
    narrow = _saved(make_model, length, autocast=narrow_products, packed=packed)
    head = model.get_output_embeddings()
    vocab, width = (0, 0) if head is None else head.weight.shape  # (0, 0): no logits of tokens
    is_chunked = isinstance(head, LossHead) and not all_logits
    largest = max((packing.rows * packing.columns for packing in _packings(model)), default=0)
    facts: dict[str, Any] = {**flops, "unpacked": largest, "formulas": dict(flops["formulas"])}
    if is_chunked:
        trained = head.weight.numel() if head.weight.requires_grad else 0
        facts["chunked_logits"], facts["head_gradient"] = vocab, trained
        facts["autocast_scratch"] = (vocab * width + trained) // 2
    if wide is None or narrow is None:
        return facts
    for saved in (wide, narrow):
        saved.outside += length * (8 * width if is_chunked else 12 * vocab)
    facts["formulas"]["bytes_per_sample"] = (
        f"what the model keeps of {counted(texts, 'text')} of {length} tokens, counted on tensors"
        " without values"
    )
    return {**facts, **saved_facts(wide, narrow, texts)}


def _packings(model: Any) -> list[Packing]:
    return [module.packing for module in model.modules() if isinstance(module, QuantizedLinear)]


def _flops(model: Any, config: Any, length: int, texts: int) -> dict[str, Any]:
    """The operations of a row, forward and backward, with their formula."""
    trained, frozen = _multiplied(model, config)
    layers, width = _attention(config)
    is_causal = any(getattr(module, "is_causal", False) for module in model.modules())
    factor, kind = (6, "causal") if is_causal else (12, "bidirectional")
    each = 6 * trained + 4 * frozen + factor * layers * width * length
    formula = (
        f"6 x {trained} weights of matrices that a token meets + {factor} x {layers} x {width} x"
        f" length ({kind} attention), a token; Kaplan et al. 2020, Chowdhery et al. 2022"
    )
    if frozen:
        formula = f"4 x {frozen} frozen weights (no gradient of theirs) + {formula}"
    return {"flops_per_sample": float(each * length * texts), "formulas": {"flops": formula}}


def _multiplied(model: Any, config: Any) -> tuple[int, int]:
    """Weights that a token is multiplied with: trained and frozen; of experts the chosen ones."""
    chosen = getattr(config, "num_experts_per_tok", 0) or 0
    embedding = model.get_input_embeddings().weight
    looked_up = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    counts = {True: 0, False: 0}  # True: trained
    counts[False] += sum(packing.rows * packing.columns for packing in _packings(model))
    for parameter in model.parameters():
        if not parameter.is_floating_point():
            continue
        if parameter.ndim < 2 or id(parameter) in looked_up:
            continue
        if parameter.ndim == 3 and chosen and "Conv" not in type(parameter).__name__:
            met = parameter.numel() * min(chosen, len(parameter)) // len(parameter)
        else:
            met = parameter.numel()
        counts[parameter.requires_grad] += met
    head = model.get_output_embeddings()
    is_tied = head is not None and head.weight is embedding
    if is_tied:
        counts[embedding.requires_grad] += embedding.numel()
    return counts[True], counts[False]


def _attention(config: Any) -> tuple[int, int]:
    """The number of layers with attention, and the total width of their heads."""
    heads = getattr(config, "num_attention_heads", 0) or 0
    if not heads:
        return 0, 0
    kinds = getattr(config, "layer_types", None)
    layers: int = config.num_hidden_layers
    if kinds:
        layers = sum("attention" in kind and "linear" not in kind for kind in kinds)
    size = getattr(config, "head_dim", None) or config.hidden_size // heads
    return layers, heads * size


def _saved(
    make_model: Callable[[], Any],
    length: int,
    *,
    autocast: AbstractContextManager[object],
    packed: bool,
) -> SavedActivations | None:
    """Activations that a row keeps; None: the forward pass depends on values."""
    from torch._subclasses.fake_tensor import (
        DataDependentOutputException,
        DynamicOutputShapeException,
        FakeTensorMode,
    )

    with torch.device("meta"):
        model = make_model()
    with FakeTensorMode(), _without_values(model, length, packed=packed):
        to_empty(model)
        batch: Mapping[str, torch.Tensor] = {
            "input_ids": torch.zeros((1, length), dtype=torch.int64)
        }
        try:
            with autocast:
                return count_saved(model, repeated_blocks(model), lambda: _hidden(model, batch))
        except (DataDependentOutputException, DynamicOutputShapeException):
            return None


@contextmanager
def _without_values(model: Any, length: int, *, packed: bool) -> Iterator[None]:
    """Make a forward pass independent of values for a while.

    Experts take rows of known sizes. No mask is made where a run would make none: positions without
    values can't show that a row is one document.
    """
    from transformers import AttentionInterface
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    AttentionInterface.register(_UNMASKED, sdpa_attention_forward)
    ALL_EXPERTS_FUNCTIONS.register(_ALIKE, _alike_experts)
    config = model.config
    # no public names set these later
    attention, experts = config._attn_implementation, config._experts_implementation  # noqa: SLF001
    window = getattr(config, "sliding_window", None)
    sees_all = window is None or window > length
    is_causal = any(getattr(module, "is_causal", False) for module in model.modules())
    config._experts_implementation = _ALIKE  # noqa: SLF001 - as above
    if attention == "sdpa" and is_causal and sees_all and not packed:
        config._attn_implementation = _UNMASKED  # noqa: SLF001 - as above
    try:
        yield
    finally:
        config._attn_implementation = attention  # noqa: SLF001 - as above
        config._experts_implementation = experts  # noqa: SLF001 - as above


def _alike_experts(
    experts: Any, hidden: torch.Tensor, chosen: torch.Tensor, shares: torch.Tensor
) -> torch.Tensor:
    """Replace the library's experts while memory is counted.

    Each token keeps a row for each expert that it chooses, however the experts run. The first
    expert computes all rows, in the weights' number format.
    """

    def product(rows: torch.Tensor, name: str) -> torch.Tensor:
        weight = getattr(experts, name)[0]
        result: torch.Tensor = rows.to(weight.dtype) @ (
            weight if experts.is_transposed else weight.t()
        )
        return result + getattr(experts, f"{name}_bias")[0] if experts.has_bias else result

    each = chosen.shape[-1]
    with torch.autocast("cpu", enabled=False):
        rows = hidden.repeat_interleave(each, 0)
        if experts.has_gate:
            inner = experts._apply_gate(product(rows, "gate_up_proj"))  # noqa: SLF001 - its own
        else:
            inner = experts.act_fn(product(rows, "up_proj"))
        outer = product(inner, "down_proj") * shares.reshape(-1, 1)
        outer = outer.view(len(hidden), each, -1).sum(1)
        return outer.to(hidden.dtype)


def _hidden(model: nn.Module, batch: Mapping[str, torch.Tensor]) -> object:
    head: Any = model.get_output_embeddings()  # type: ignore[operator]
    passing = head.passing() if isinstance(head, LossHead) else nullcontext()
    with passing:
        return model(input_ids=batch["input_ids"], use_cache=False)
