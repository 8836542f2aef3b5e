"""The huggingface task's `model` and `data` fields. No engine is imported here."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    ConfigDict,
    Discriminator,
    Field,
    NonNegativeInt,
    Tag,
    field_validator,
    model_validator,
)

from samecurve.core.config.sections import TRAIN, SplitName, check_finite
from samecurve.core.config.train_section import Train
from samecurve.seam import DataSection, Section
from samecurve_products.lora.sections import AdapterSection, Quantize
from samecurve_products.text_files import STANDARD_LIBRARY

Objective = Literal["causal", "classify", "masked", "embed"]
Attention = Literal["auto", "sdpa", "eager", "flash", "flex"]
RouterBalance = Literal["batch", "sequence", "none"]

RANDOM = "random"  # the source of random tokens


class Adapter(AdapterSection):
    """Small matrices that are trained in place of the model's own weights."""

    kind: Literal["lora", "dora"] = "lora"
    alpha: Annotated[float, Field(gt=0)] = Field(
        32.0, description="the change is multiplied by alpha / rank"
    )


class Embedding(Section):
    """How texts become vectors, and the loss over them."""

    pooling: Literal["mean", "cls"] = Field(
        "mean", description="mean: of a text's tokens; cls: its first token"
    )
    temperature: Annotated[float, Field(gt=0)] = Field(
        0.05, description="cosines are divided by it"
    )
    symmetric: bool = Field(
        True, description="each positive is to find its anchor too, not only an anchor its positive"
    )


class HFModel(Section):
    """A model of the transformers library; further keys are fields of its own config."""

    kept_defaults: ClassVar[tuple[str, ...]] = ("quantize",)
    model_config = ConfigDict(extra="allow")

    path: str | None = Field(
        None, description="a directory as the library writes it: its config, and its weights"
    )
    architecture: str | None = Field(
        None,
        description=(
            "llama, qwen2, mixtral, mamba2, ... (model_type of the library's config), with its"
            " config's fields beside it and random weights"
        ),
    )
    objective: Objective = Field("causal", description="what is learnt")
    classes: list[str] = Field(
        [], description="of objective classify: the labels, by number; those of the data if empty"
    )
    class_weights: Literal["none", "balanced"] | dict[str, Annotated[float, Field(gt=0)]] = Field(
        "none",
        description=(
            "of objective classify: what a sample counts, by its label (others 1); balanced: all"
            " classes together the same"
        ),
    )
    mask_probability: Annotated[float, Field(gt=0, lt=1)] = Field(
        0.15, description="of objective masked: that a token is hidden; one of each row at least"
    )
    embedding: Embedding = Field(
        Embedding(), description="of objective embed: pooling, temperature, symmetric"
    )
    attention: Attention = Field(
        "auto", description="auto: sdpa, or eager where the model has no sdpa"
    )
    balance: RouterBalance | None = Field(
        None,
        description=(
            "of a mixture of experts: the library's auxiliary loss over the whole batch, whatever"
            " the devices; or over each row by itself; or none. If not given: batch, where the"
            " library has such a loss"
        ),
    )
    adapter: Adapter | None = Field(
        None, description="kind (lora, dora), rank, alpha, dropout, target: trained in its place"
    )
    quantize: Quantize = Field(
        "none",
        description=(
            "what the frozen matrices beneath an adapter are held in; bf16: half the memory, and"
            " with train.precision bf16 the same products, so that it is the default there"
        ),
    )

    @field_validator("architecture")
    @classmethod
    def _as_the_library_writes_it(cls, value: str | None) -> str | None:
        return value and value.lower()

    @model_validator(mode="after")
    def _one_model(self) -> "HFModel":
        if bool(self.path) == bool(self.architecture):
            raise ValueError(
                "give `path` (a model's directory) or `architecture` (llama, with the fields of"
                " its config), one of them"
            )
        check_finite(self.model_extra)
        return self

    def settle_defaults(self, train: Section) -> Section:
        """Hold the base of an adapter in bf16 where products round it to bf16 anyway."""
        assert isinstance(train, Train)
        reads_wider = getattr(train, "float8", False)  # a feature: products in eight bits
        rounds = train.precision == "bf16" and not reads_wider
        if self.adapter is None or "quantize" in self.model_fields_set or not rounds:
            return self
        return self.model_copy(update={"quantize": "bf16"})

    @property
    def config_fields(self) -> Mapping[str, Any]:
        """Fields that go to the library's config."""
        return dict(self.model_extra or {})

    @property
    def directory(self) -> Path | None:
        """The model's directory; None: the model is made from its fields."""
        return Path(self.path).expanduser() if self.path else None


class WeightedSource(Section):
    """A data source, and how often an epoch reads it."""

    source: str = Field(min_length=1, description="as data.source")
    weight: Annotated[float, Field(gt=0, le=1000)] = Field(
        1.0,
        description="times that an epoch reads it: 2 twice, 0.5 one half of its documents",
    )


def _form(value: object) -> str:
    """The form of a value: an error then lists only the faults of that form."""
    if isinstance(value, list):
        return "list"
    return "section" if isinstance(value, dict | WeightedSource) else "str"


_Item = Annotated[
    Annotated[str, Tag("str")] | Annotated[WeightedSource, Tag("section")], Discriminator(_form)
]
_Sources = Annotated[
    Annotated[str, Tag("str")] | Annotated[list[_Item], Tag("list")], Discriminator(_form)
]


class HFData(DataSection):
    """The source of the text, the tokenizer, and how documents become rows."""

    indifferent: ClassVar[tuple[str, ...]] = (*DataSection.indifferent, "prompts", "sample_tokens")
    in_fingerprint: ClassVar[tuple[str, ...]] = ("split", "too_long")

    source: _Sources = Field(
        STANDARD_LIBRARY,
        description=(
            "text files, JSONL, parquet, .bin files of raw tokens, globs and directories of them,"
            " saved datasets; python-stdlib; random (random tokens); or a list of these, or of"
            " {source, weight}"
        ),
    )
    split: SplitName = TRAIN
    tokenizer: str | None = Field(
        None,
        description=(
            "the model directory's own if not given; bytes, bpe:N (trained once on the sources,"
            " cached), a tokenizer.json, or a directory with one"
        ),
    )
    token_dtype: Literal["uint16", "uint32"] = Field("uint32", description="of .bin files")
    chat_template: str | None = Field(
        None,
        description="a Jinja file, in place of the tokenizer's own template for `messages`",
    )
    instructions: Literal["alpaca", "chat"] = Field(
        "alpaca",
        description=(
            "what rows of `instruction`, `input` and `output` become: the prompt of Stanford"
            " Alpaca, or turns of the chat template (with `system` and `history`)"
        ),
    )
    max_documents: Annotated[int, Field(gt=0)] | None = Field(
        None, description="documents read of each source, from its beginning; all if not given"
    )
    seq_len: Annotated[int, Field(gt=1, le=1 << 24)] = Field(
        1024, description="tokens of a row at most (--seq-len)"
    )
    too_long: Literal["cut", "drop", "refuse"] = Field(
        "cut",
        description=(
            "rows above seq_len: cut trains on their beginning, drop leaves them out, refuse ends"
            " the plan; a long text (no prompt, no chat, no label) becomes several documents"
        ),
    )
    packing: bool = Field(
        True,
        description=(
            "lay several documents into a row, apart in attention and positions; false: a row for"
            " each, padded to the longest of its microbatch"
        ),
    )
    validation: Annotated[float, Field(ge=0, lt=1)] = Field(
        0.02, description="share of each source's tokens that no step trains on"
    )
    eval_samples: NonNegativeInt | None = Field(
        None, description="rows an evaluation reads, spread over those held out; all if not given"
    )
    samples: Annotated[int, Field(gt=0, le=1 << 40)] = Field(
        1 << 16, description="rows of the source `random` that are trained on"
    )
    prompts: list[str] = Field([], description="what the samples that are shown begin with")
    sample_tokens: Annotated[int, Field(gt=0, le=100_000)] = Field(
        200, description="length of those samples"
    )

    @field_validator("tokenizer")
    @classmethod
    def _known_tokenizer(cls, value: str | None) -> str | None:
        if value is None or not value.startswith("bpe:"):
            return value or None
        if re.fullmatch(r"bpe:\d{1,6}", value) and int(value[4:]) > 256:
            return value
        raise ValueError("must be bpe:N with N above 256 and below a million")

    @field_validator("source")
    @classmethod
    def _named_source(
        cls, value: str | list[str | WeightedSource]
    ) -> str | list[str | WeightedSource]:
        names = [_name(item) for item in ([value] if isinstance(value, str) else value)]
        if not names or "" in names:
            raise ValueError("names nothing")
        if RANDOM in names and len(names) > 1:
            raise ValueError("random can't be mixed with other sources")
        return value

    @property
    def sources(self) -> tuple[WeightedSource, ...]:
        """All sources. The weight is 1 where none is given."""
        items = [self.source] if isinstance(self.source, str) else self.source
        return tuple(
            item if isinstance(item, WeightedSource) else WeightedSource(source=item)
            for item in items
        )

    @property
    def is_random(self) -> bool:
        return self.sources[0].source == RANDOM


def _name(item: str | WeightedSource) -> str:
    return item if isinstance(item, str) else item.source
