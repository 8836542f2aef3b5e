"""What training one row of a library's model takes, as the plan asks: operations and memory."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from samecurve.core.planning.memory import logit_rows
from samecurve.tasks.huggingface.causal import Causal, LossHead
from samecurve.torch_engine.model import repeated_blocks
from samecurve.torch_engine.saved_activations import SavedActivations, count_saved
from samecurve.units import counted


def cost_facts(
    make_model: Callable[[], Any], config: Any, length: int, texts: int = 1
) -> dict[str, Any]:
    """Fields of Facts. length: tokens of a text; texts: of a row, each by itself. Activations are
    left out where a model looks at values on its way (a mixture of experts).
    """
    with torch.device("meta"):
        model = make_model()
    flops = _flops(model, config, length, texts)
    saved = _saved(make_model, length)
    if saved is None:
        return flops
    head = model.get_output_embeddings()
    facts: dict[str, Any] = {}
    formulas = dict(flops["formulas"])
    vocab, width = (0, 0) if head is None else head.weight.shape  # a classifier has no logits
    if isinstance(head, LossHead):
        saved.outside += 2 * length * width  # the rows of the loss, and their gradient
        counts = {kind: logit_rows(vocab, kind) for kind in ("cpu", "cuda")}
        facts["scratch"] = {kind: 2 * vocab * rows + vocab * width for kind, rows in counts.items()}
        for kind, rows in counts.items():
            formulas[f"scratch.{kind}"] = (
                f"4 B x (2 x vocab {vocab} x {rows} tokens at a time + {vocab * width}: the head's"
                " gradient)"
            )
    else:
        saved.outside += 2 * length * vocab  # the logits' logarithms, and their gradient
    formulas["bytes_per_sample"] = (
        f"4 B x what the model keeps of {counted(texts, 'text')} of {length} tokens, counted on"
        " tensors without values"
    )
    return {
        **flops,
        **facts,
        "formulas": formulas,
        "bytes_per_sample": 4 * saved.total * texts,
        "recompute_bytes": {
            how: 4 * saved.recomputed(how) * texts for how in ("block", "selective") if saved.blocks
        },
    }


def _flops(model: Any, config: Any, length: int, texts: int) -> dict[str, Any]:
    """Forward and backward of a row."""
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
    """Trained and frozen weights of matrices that a token meets: of experts those chosen."""
    chosen = getattr(config, "num_experts_per_tok", 0) or 0
    embedding = model.get_input_embeddings().weight
    looked_up = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    counts = {True: 0, False: 0}  # by whether they are trained
    for parameter in model.parameters():
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
    """(layers with attention, width of their heads together)."""
    heads = getattr(config, "num_attention_heads", 0) or 0
    if not heads:
        return 0, 0
    kinds = getattr(config, "layer_types", None)
    layers: int = config.num_hidden_layers
    if kinds:
        layers = sum("attention" in kind and "linear" not in kind for kind in kinds)
    size = getattr(config, "head_dim", None) or config.hidden_size // heads
    return layers, heads * size


def _saved(make_model: Callable[[], Any], length: int) -> SavedActivations | None:
    from torch._subclasses.fake_tensor import (
        DataDependentOutputException,
        DynamicOutputShapeException,
        FakeTensorMode,
    )

    with torch.device("meta"):
        model = make_model()
    with FakeTensorMode():
        _to_empty(model)
        batch: Mapping[str, torch.Tensor] = {
            "input_ids": torch.zeros((1, length), dtype=torch.int64)
        }
        try:
            return count_saved(model, repeated_blocks(model), lambda: _hidden(model, batch))
        except (DataDependentOutputException, DynamicOutputShapeException):
            return None


def _to_empty(model: nn.Module) -> None:
    """Its tensors as on a CPU; module.to_empty() can't, within a mode of tensors without values."""
    others: dict[int, nn.Parameter] = {}  # tied ones stay so
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            if id(parameter) not in others:
                empty = torch.empty(parameter.shape, dtype=parameter.dtype)
                others[id(parameter)] = nn.Parameter(empty, parameter.requires_grad)
            module.register_parameter(name, others[id(parameter)])
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, torch.empty(buffer.shape, dtype=buffer.dtype))


def _hidden(model: nn.Module, batch: Mapping[str, torch.Tensor]) -> object:
    head: Any = model.get_output_embeddings()  # type: ignore[operator]
    if not isinstance(head, LossHead):
        return Causal(packed=False).call(model, batch)
    with head.passing():
        return Causal(packed=False).call(model, batch)
