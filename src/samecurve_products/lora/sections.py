"""The config's section of an adapter, which tasks share. No engine is imported here."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from samecurve.seam import Section

Kind = Literal["lora", "dora", "lokr"]
Quantize = Literal["none", "bf16", "8bit", "4bit"]


class AdapterSection(Section):
    """Small matrices that are trained in place of the model's own weights.

    A task's own section says which kinds it has, and has its own defaults.
    """

    kind: Kind = "lora"
    rank: Annotated[int, Field(gt=0, le=1 << 16)] = 16
    alpha: Annotated[float, Field(gt=0)] = Field(
        16.0, description="the change is multiplied by alpha / rank"
    )
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    target: str | list[str] = Field(
        "all-linear",
        description="all-linear, names of layers, or a regular expression of their whole names",
    )

    @model_validator(mode="after")
    def _dropout_of_samples(self) -> "AdapterSection":
        if self.kind == "lokr" and self.dropout:
            raise ValueError("dropout is of kind lora and dora; lokr has none")
        return self

    @property
    def scaling(self) -> float:
        """The factor of the change."""
        return self.alpha / self.rank
