"""The decoder's parameters for any engine, and the memory and operations to train them.

Names of parameters are those of Hugging Face's Llama.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import Any

from samecurve.core.protocols import Initial
from samecurve.tasks.language.sections import LanguageModel


def shapes(fields: LanguageModel, vocab: int) -> dict[str, tuple[int, ...]]:
    """Shapes by parameter name. Matrices are [out, in]; tied embeddings are one parameter."""
    width, kv = fields.hidden_size, fields.groups * fields.head_size
    block = {
        "input_layernorm.weight": (width,),
        "post_attention_layernorm.weight": (width,),
        "self_attn.q_proj.weight": (width, width),
        "self_attn.k_proj.weight": (kv, width),
        "self_attn.v_proj.weight": (kv, width),
        "self_attn.o_proj.weight": (width, width),
        "mlp.gate_proj.weight": (fields.inner, width),
        "mlp.up_proj.weight": (fields.inner, width),
        "mlp.down_proj.weight": (width, fields.inner),
    }
    layers = {
        f"layers.{index}.{name}": shape
        for index in range(fields.num_layers)
        for name, shape in block.items()
    }
    head = {} if fields.tie_embeddings else {"lm_head.weight": (vocab, width)}
    return {"embed_tokens.weight": (vocab, width), **layers, "norm.weight": (width,), **head}


def initial(name: str, fields: LanguageModel) -> Initial:
    """GPT-2's initial values: norms begin as ones, matrices with a deviation of 0.02.

    Matrices whose products are added to the residual stream begin smaller, by the root of the
    number of additions.
    Source: Radford et al., "Language models are unsupervised multitask learners", 2019, section
    2.3.
    """
    if "norm" in name:
        return Initial(0.0, 1.0)
    if name.endswith(("o_proj.weight", "down_proj.weight")):
        return Initial(0.02 / (2 * fields.num_layers) ** 0.5)
    return Initial(0.02)


def model_facts(fields: LanguageModel, vocab: int, *, unfused: bool) -> dict[str, Any]:
    """Facts about the decoder that the plan needs, by the names of Facts.

    unfused: there are no fused kernels, so attention keeps its length x length scores for
        backward, and the loss keeps all logits
    """
    arrays = shapes(fields, vocab)
    sizes = {name: prod(shape) for name, shape in arrays.items()}
    in_blocks = [name for name in sizes if name.startswith("layers.")]
    matrices = [name for name in in_blocks if "norm" not in name]
    length, layers = fields.max_seq_len, fields.num_layers
    hidden, inner = fields.hidden_size, fields.inner
    head = vocab * hidden
    multiplied = sum(sizes[name] for name in matrices) + head
    flops_per_token = 6 * multiplied + 6 * layers * hidden * length

    # activations of a token, in numbers
    kv = fields.groups * fields.head_size
    scores = 2 * fields.num_heads * length if unfused else 0
    block = 8 * hidden + 2 * kv + 4 * inner + scores
    outside = 2 * hidden + 3 * vocab if unfused else 4 * hidden
    # what recompute "selective" keeps of a block: products with weights, all of them with jax,
    # every second one with torch (q, v, gate, down), and attention
    products = 3 * hidden + 2 * kv + 2 * inner if unfused else 3 * hidden + kv + inner
    kept = {"none": block, "block": hidden, "selective": hidden + products}
    wide = _Activations(layers, block, outside, inner, kept)
    narrow = _under_autocast(fields, kv)
    return {
        "tokens_per_sample": length,
        "params": sum(sizes.values()),
        "blocks": layers,
        "bytes_per_sample": 4 * length * wide.total("none"),
        "flops_per_sample": float(flops_per_token * length),
        "block_params": sum(sizes[name] for name in sizes if name.startswith("layers.0.")),
        "recompute_bytes": {how: 4 * length * wide.total(how) for how in ("block", "selective")},
        "autocast_bytes": {} if unfused else {how: length * narrow.total(how) for how in kept},
        "gpu_bytes": {} if unfused else _on_gpus(fields, wide),
        "rerun_share": {how: min(wide.rerun_share(how), narrow.rerun_share(how)) for how in kept},
        "autocast_scratch": 0 if unfused else head,
        "chunked_logits": 0 if unfused else vocab,
        "head_gradient": 0 if unfused else head,
        "formulas": _formulas(multiplied, unfused=unfused),
        "block_arrays": tuple(in_blocks),
        "rounded": tuple(matrices),
        "hidden_matrices": tuple(matrices),
        "attention_head": fields.head_size if unfused else None,
        "arrays": arrays,
        "aliases": {"lm_head.weight": "embed_tokens.weight"} if fields.tie_embeddings else {},
    }


def _formulas(multiplied: int, *, unfused: bool) -> dict[str, str]:
    """Formulas of the numbers, in words. multiplied: weights that a token is multiplied with"""
    score_words = " + 2 heads x length" if unfused else ""
    outside_words = "2 hidden + 3 vocab" if unfused else "4 hidden"
    return {
        "flops": (
            f"6 x {multiplied} matrix weights + 6 x layers x hidden x length (causal"
            " attention), a token; Kaplan et al. 2020, Chowdhery et al. 2022"
        ),
        "bytes_per_sample": (
            f"4 B x length x (layers x (8 hidden + 2 kv + 4 inner{score_words}) +"
            f" {outside_words}), counted from torch_task.py"
        ),
        "gpu_bytes.f32": "and for each block 2 (hidden - kv): keys and values for each head",
        "gpu_bytes.f64": (
            "in 8 B, and for each block 2 (hidden - kv) + heads x length: keys and values for each"
            " head, and scores, since GPUs have no fused attention in f64"
        ),
    }


@dataclass(frozen=True)
class _Activations:
    """Activations that one token keeps, in numbers or in bytes."""

    layers: int
    block: int
    outside: int
    widest: int  # largest activation of a block; its gradient lives beside a recomputed block
    kept: Mapping[str, int]  # train.recompute -> what a block keeps until its backward pass

    def total(self, how: str) -> int:
        """All blocks together, where blocks are recomputed one after the other."""
        return self.layers * self.kept[how] + self.outside + self._rerun(how)

    def rerun_share(self, how: str) -> float:
        return self._rerun(how) / self.total(how)

    def _rerun(self, how: str) -> int:
        return 0 if how == "none" else self.block - self.kept[how] + self.widest


def _on_gpus(fields: LanguageModel, wide: _Activations) -> dict[str, dict[str, int]]:
    """Bytes of a sample on GPUs, by precision and train.recompute.

    Their fused attention in f32 wants keys and values for each head, and there is none in f64.
    """
    spread = 2 * (fields.num_heads - fields.groups) * fields.head_size
    scores = fields.num_heads * fields.max_seq_len
    on_gpus = {}
    for precision, width, more in (("f32", 4, spread), ("f64", 8, spread + scores)):
        block = wide.block + more
        there = replace(wide, block=block, kept={**wide.kept, "none": block})
        on_gpus[precision] = {
            how: width * fields.max_seq_len * there.total(how) for how in wide.kept
        }
    return on_gpus


def _under_autocast(fields: LanguageModel, kv: int) -> _Activations:
    """Bytes under bf16 and f16.

    The residual stream keeps four bytes a number; each product takes a copy of two bytes.
    """
    hidden, inner = fields.hidden_size, fields.inner
    block = 30 * hidden + 4 * kv + 8 * inner
    stream, products = 4 * hidden, 2 * (3 * hidden + kv + inner)
    kept = {"none": block, "block": stream, "selective": stream + products}
    return _Activations(fields.num_layers, block, 12 * hidden, 2 * inner, kept)
