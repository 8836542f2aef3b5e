"""The language task's `model` and `data` fields. No engine is imported here."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, NonNegativeInt, PositiveFloat, field_validator, model_validator

from samecurve.core.config import MOST_LAYERS, Section
from samecurve.core.config.sections import ALL, TRAIN, DataSection, SplitName

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
