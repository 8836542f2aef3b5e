"""The huggingface task's `model` fields. No engine is imported here."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, field_validator, model_validator

from samecurve.core.config.section import Section
from samecurve.tasks.free_sections import check_finite

Objective = Literal["causal", "classify", "masked", "embed"]
Attention = Literal["auto", "sdpa", "eager", "flash", "flex"]
RouterBalance = Literal["batch", "sequence", "none"]
Quantize = Literal["none", "8bit", "4bit"]


class Adapter(Section):
    """Small matrices that are trained in place of the model's own weights."""

    kind: Literal["lora", "dora"] = "lora"
    rank: Annotated[int, Field(gt=0, le=1 << 16)] = 16
    alpha: Annotated[float, Field(gt=0)] = Field(
        32.0, description="the change is multiplied by alpha / rank"
    )
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    target: str | list[str] = Field("all-linear", description="all-linear, or names of layers")


class Embedding(Section):
    """How texts become vectors, and what is learnt of them."""

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
    quantize: Quantize = Field("none", description="what the frozen weights are held in")

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

    @property
    def config_fields(self) -> Mapping[str, Any]:
        """Fields that go to the library's config."""
        return dict(self.model_extra or {})
