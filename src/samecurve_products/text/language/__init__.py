"""The task language: a decoder that learns to continue text.

Here are its `model` and `data` fields, and what follows from the model's: the parameters for any
engine, with the names of Hugging Face's Llama, and the memory and operations to train them.

No engine is imported here.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, NonNegativeInt, PositiveFloat, field_validator, model_validator

from samecurve.core.config import MOST_LAYERS
from samecurve.core.config.sections import ALL, TRAIN, SplitName
from samecurve.seam import DataSection, Section, TaskEntry

Size = Annotated[int, Field(gt=0, le=1 << 31)]  # of a dimension


class LanguageModel(Section):
    """A Llama-style decoder: RMSNorm, rotary positions, grouped-query attention, SwiGLU."""

    hidden_size: Size = Field(512, description="width of the residual stream")
    num_layers: Annotated[int, Field(gt=0, le=MOST_LAYERS)] = 8
    num_heads: Size = 8
    kv_heads: Size | None = Field(
        None, description="key and value heads shared by num_heads; as many if not given"
    )
    intermediate_size: Size | None = Field(
        None,
        description="width of the feed-forward; 8/3 of hidden_size, rounded up to 64, if not given",
    )
    vocab_size: Size | None = Field(
        None, description="the tokenizer's if not given; more is padding, less is refused"
    )
    max_seq_len: Size = Field(512, description="tokens of a sample (--seq-len)")
    rope_theta: PositiveFloat = 10000.0
    norm_eps: PositiveFloat = 1e-5
    tie_embeddings: bool = Field(
        False, description="one matrix for input embedding and output head"
    )

    @model_validator(mode="after")
    def _heads_fit(self) -> "LanguageModel":
        if self.hidden_size % self.num_heads:
            raise ValueError(
                f"hidden_size {self.hidden_size} is not a multiple of num_heads {self.num_heads}"
            )
        if (self.hidden_size // self.num_heads) % 2:
            raise ValueError(
                f"hidden_size / num_heads is {self.hidden_size // self.num_heads}; rotary positions"
                " need it even"
            )
        if self.num_heads % self.groups:
            raise ValueError(
                f"num_heads {self.num_heads} is not a multiple of kv_heads {self.groups}"
            )
        return self

    @property
    def groups(self) -> int:
        return self.kv_heads or self.num_heads

    @property
    def head_size(self) -> int:
        return self.hidden_size // self.num_heads

    @property
    def inner(self) -> int:
        return self.intermediate_size or -(-self.hidden_size * 8 // 3 // 64) * 64


class LanguageData(DataSection):
    """The source of the text, and the tokenizer."""

    indifferent: ClassVar[tuple[str, ...]] = (*DataSection.indifferent, "prompts", "sample_tokens")
    in_fingerprint: ClassVar[tuple[str, ...]] = ("split",)

    source: str | list[str] = Field(
        "python-stdlib",
        description=(
            "python-stdlib, or text files, globs and directories, or one .bin file of raw tokens"
        ),
    )
    split: SplitName = TRAIN
    tokenizer: str = Field(
        "bytes",
        description=(
            "bytes, bpe:N (trained once on the corpus, cached), or the path of a tokenizer.json"
        ),
    )
    token_dtype: Literal["uint16", "uint32"] = Field("uint32", description="of a .bin file")
    validation: Annotated[float, Field(ge=0, lt=1)] = Field(
        0.02,
        description=(
            "share of the text, at its end, that no step trains on; none of it where a source has a"
            " split named validation"
        ),
    )
    eval_samples: NonNegativeInt | None = Field(
        None,
        description=(
            "samples an evaluation reads, spread over the validation share; all if not given"
        ),
    )
    prompts: list[str] = Field([], description="what the samples that are shown begin with")
    sample_tokens: Annotated[int, Field(gt=0, le=100_000)] = Field(
        200, description="length of those samples"
    )

    @field_validator("tokenizer")
    @classmethod
    def _known_tokenizer(cls, value: str) -> str:
        if value == "bytes" or value.endswith(".json"):
            return value
        if re.fullmatch(r"bpe:\d+", value) and 256 < int(value[4:10]) == int(value[4:]):
            return value
        raise ValueError(
            "must be bytes, bpe:N with N above 256 and below a million, or the path of a"
            " tokenizer.json"
        )

    @field_validator("source")
    @classmethod
    def _named_source(cls, value: str | list[str]) -> str | list[str]:
        if not value or (isinstance(value, list) and "" in value):
            raise ValueError("names nothing")
        return value

    @property
    def sources(self) -> tuple[str, ...]:
        return (self.source,) if isinstance(self.source, str) else tuple(self.source)


def other_data(source: str, assets: Path, reference: Mapping[str, float]) -> Mapping[str, Any]:
    """Config values that make `eval -d SOURCE` read all of a source, in the run's own tokens."""
    values: dict[str, Any] = {
        "data.source": source,
        "data.split": ALL,
        "data.validation": 0.0,
        "data.eval_samples": None,
        "model.vocab_size": int(reference["vocabulary"]),
    }
    tokenizer = assets / "tokenizer.json"
    if tokenizer.exists():
        values["data.tokenizer"] = str(tokenizer.resolve())
    return values


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


ENTRY = TaskEntry(
    classes={
        "torch": "samecurve_products.text.language.torch_task:TorchLanguage",
        "jax": "samecurve_products.text.language.jax_task:JaxLanguage",
    },
    engine_free="samecurve_products.text.language.task:LanguageTask",
    model=LanguageModel,
    data=LanguageData,
)
