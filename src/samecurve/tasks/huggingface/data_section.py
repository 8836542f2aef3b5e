"""The huggingface task's `data` fields. No engine is imported here."""

import re
from typing import Annotated, ClassVar, Literal

from pydantic import Discriminator, Field, NonNegativeInt, Tag, field_validator

from samecurve.core.config.section import Section
from samecurve.core.config.sections import DataSection

RANDOM = "random"
STANDARD_LIBRARY = "python-stdlib"


class WeightedSource(Section):
    """One of several sources, and how often an epoch reads it."""

    source: str = Field(min_length=1, description="as data.source")
    weight: Annotated[float, Field(gt=0, le=1000)] = Field(
        1.0,
        description="times that an epoch reads it: 2 twice, 0.5 one half of its documents",
    )


def _form(value: object) -> str:
    """The form of a value, so that an error lists the faults of that form alone."""
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
    """Where the text comes from, what is a token of it, and how documents become rows."""

    indifferent: ClassVar[tuple[str, ...]] = (*DataSection.indifferent, "prompts", "sample_tokens")

    source: _Sources = Field(
        STANDARD_LIBRARY,
        description=(
            "text files, JSONL, parquet, .bin files of raw tokens, globs and directories of them,"
            " saved datasets; python-stdlib; random (random tokens); or a list of these, or of"
            " {source, weight}"
        ),
    )
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
    seq_len: Annotated[int, Field(gt=1, le=1 << 24)] = Field(
        1024, description="tokens of a row at most (--seq-len)"
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
        """All of them, those without a weight with 1."""
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
