"""The diffusion task's `model` and `data` fields. No engine is imported here."""

import re
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from pydantic import Field, NonNegativeInt, field_validator, model_validator

from samecurve.core.config import MOST_LAYERS
from samecurve.core.config.train_section import Train
from samecurve.seam import DataSection, Section
from samecurve_products.lora.sections import AdapterSection, Quantize

Prediction = Literal["auto", "epsilon", "v", "flow"]
Share = Annotated[float, Field(ge=0, lt=1)]
Probability = Annotated[float, Field(ge=0, le=1)]
Side = Annotated[int, Field(gt=0, le=1 << 14)]  # pixels
Size = Annotated[int, Field(gt=0, le=1 << 16)]  # of a dimension

_ONLY = {"widths": "unet", "width": "dit", "depth": "dit"}  # fields of one architecture alone


class Adapter(AdapterSection):
    """Small matrices that are trained in place of the model's own weights."""

    target: str | list[str] = Field(
        "attention",
        description=(
            "attention: the products of every attention layer; all-linear; names of layers, or a"
            " regular expression of their whole names"
        ),
    )


class TimeSteps(Section):
    """How the time step of a training sample is drawn."""

    distribution: Literal["uniform", "logit_normal"] = Field(
        "uniform", description="logit_normal: of flow models, the middle times more often"
    )
    mean: Annotated[float, Field(ge=-10, le=10)] = Field(0.0, description="of logit_normal")
    deviation: Annotated[float, Field(gt=0, le=10)] = Field(1.0, description="of logit_normal")
    shift: Annotated[float, Field(gt=0, le=100)] | None = Field(
        None,
        description=(
            "of flow: time t becomes shift*t / (1 + (shift - 1)*t), so that large pictures see more"
            " noise; the scheduler's own if not given"
        ),
    )


class DiffusionModel(Section):
    """A model that makes pictures from noise: a pipeline of the diffusers library, or a new one."""

    kept_defaults: ClassVar[tuple[str, ...]] = ("quantize",)

    path: str | None = Field(
        None,
        description=(
            "a pipeline's directory as diffusers writes it, or a checkpoint in one .safetensors"
            " file"
        ),
    )
    base: str | None = Field(
        None,
        description=(
            "of a checkpoint in one file: a pipeline's directory with what the file lacks, its"
            " tokenizers above all"
        ),
    )
    encoder_precision: Literal["f32", "bf16", "f16"] = Field(
        "f32", description="of the frozen text encoders, which run once before training"
    )
    architecture: Literal["unet", "dit"] | None = Field(
        None, description="a new model of pixels, with random weights, in place of `path`"
    )
    widths: Annotated[list[Size], Field(min_length=1, max_length=8)] = Field(
        [48, 96], description="of unet: channels of each level, each of half the sides"
    )
    width: Size = Field(256, description="of dit: of every layer")
    depth: Annotated[int, Field(gt=0, le=MOST_LAYERS)] = Field(6, description="of dit: layers")
    head_width: Size = Field(16, description="of a new model: numbers of an attention head")
    patch: Annotated[int, Field(gt=0, le=64)] = Field(
        2, description="of a new model: pixels, across and down, that become one place"
    )
    text_width: Size = Field(64, description="of a new model: numbers that stand for a word")
    prediction: Prediction = Field(
        "auto",
        description="what the model predicts; auto: as its scheduler says; flow if new",
    )
    min_snr: Annotated[float, Field(gt=0)] | None = Field(
        None,
        description=(
            "of epsilon and v: the loss of a time step counts at most this signal-to-noise ratio"
            " (arXiv:2303.09556); 5 is usual"
        ),
    )
    time_steps: TimeSteps = Field(
        TimeSteps(), description="distribution, mean, deviation, shift: the times trained on"
    )
    adapter: Adapter | None = Field(
        None, description="kind (lora, dora, lokr), rank, alpha, dropout, target"
    )
    quantize: Quantize = Field(
        "none",
        description=(
            "what the frozen matrices beneath an adapter are held in; bf16: half the memory, and"
            " with train.precision bf16 the same products, so that it is the default there"
        ),
    )

    @model_validator(mode="after")
    def _one_model(self) -> "DiffusionModel":
        if bool(self.path) == bool(self.architecture):
            raise ValueError(
                "give `path` (a pipeline's directory or a .safetensors file) or `architecture`"
                " (unet, dit), one of them"
            )
        if self.architecture and (self.adapter or self.base or self.quantize != "none"):
            raise ValueError(
                "adapter, quantize and base are of a pipeline (`path`): a new model has no weights"
                " to build on"
            )
        if self.quantize != "none" and self.adapter is None:
            raise ValueError(
                f"quantize {self.quantize} without adapter: packed weights can't be trained;"
                " adapter: {kind: lora} is trained on them"
            )
        for field, architecture in _ONLY.items():
            is_default = getattr(self, field) == type(self).model_fields[field].default
            if self.architecture != architecture and not is_default:
                raise ValueError(f"{field} is of architecture {architecture}")
        if self.prediction == "flow" and self.min_snr is not None:
            raise ValueError("min_snr is of prediction epsilon and v; flow has no such ratio")
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
    def place(self) -> Path | None:
        """The pipeline's directory or file; None: the model is new."""
        return Path(self.path).expanduser() if self.path else None

    @property
    def base_place(self) -> Path | None:
        return Path(self.base).expanduser() if self.base else None


class Captions(Section):
    """What is read beside a picture, and how it becomes the text that the model sees."""

    extension: str = Field(".txt", description="of the file beside a picture that describes it")
    missing: Literal["refuse", "empty", "name"] = Field(
        "refuse", description="of a picture without a caption; name: its file name is the caption"
    )
    trigger: str | None = Field(None, description="what every caption begins with")
    separator: str = Field(",", min_length=1, description="between the parts that are shuffled")
    shuffle: bool = Field(False, description="lay the parts of a caption in another order")
    keep: NonNegativeInt = Field(0, description="parts at the beginning that stay where they are")
    dropout: Probability = Field(
        0.0, description="that a sample is trained without its caption, for guidance"
    )

    @field_validator("extension")
    @classmethod
    def _with_dot(cls, value: str) -> str:
        extension = f".{value.removeprefix('.')}"
        if not re.fullmatch(r"\.[^./\\\s]+", extension):
            raise ValueError("must be the end of a file's name, such as .txt")
        return extension


class ImageFolder(Section):
    """A folder of pictures, and how often an epoch reads it."""

    source: str = Field(min_length=1, description="as data.source")
    repeats: Annotated[int, Field(gt=0, le=10_000)] = Field(
        1, description="times that an epoch reads each picture, each time with other noise"
    )
    weight: Annotated[float, Field(gt=0, le=1000)] = Field(
        1.0, description="what a sample of it counts in the loss"
    )
    trigger: str | None = Field(None, description="in place of data.captions.trigger")
    caption: str | None = Field(
        None, description="of its pictures that have none; in place of data.captions.missing"
    )


class DiffusionData(DataSection):
    """The pictures, their captions, and how they become samples."""

    indifferent: ClassVar[tuple[str, ...]] = (
        *DataSection.indifferent,
        "prompts",
        "negative_prompt",
        "sample_steps",
        "guidance",
    )

    source: str | list[str | ImageFolder] | None = Field(
        None,
        description=(
            "a folder of pictures with captions beside them (NAME.txt), or with a metadata.jsonl"
            " (file_name, text); a list of these, or of {source, repeats, weight, trigger,"
            " caption}; if not"
            " given, drawn shapes, made once in the cache"
        ),
    )
    resolution: Side = Field(
        512, description="sides of a square picture; others have about as many pixels"
    )
    buckets: bool = Field(
        True,
        description=(
            "keep each picture's shape, as near as its bucket has it; false: every picture is cut"
            " to a square"
        ),
    )
    bucket_step: Side = Field(64, description="sides of buckets are multiples of it, in pixels")
    longest: Annotated[float, Field(ge=1, le=16)] = Field(
        2.0, description="longer side / shorter side of a bucket at most; the rest is cut off"
    )
    enlarge: bool = Field(True, description="smaller pictures too; false: they are refused")
    crop: Literal["center", "random"] = "center"
    flip: Probability = Field(0.0, description="that a picture is mirrored, left to right")
    variants: Annotated[int, Field(gt=0, le=1000)] = Field(
        1,
        description=(
            "of a model of latents: how many crops, flips and shuffled captions of a picture are"
            " encoded and kept; epochs use them in turn"
        ),
    )
    captions: Captions = Field(
        Captions(), description="extension, missing, trigger, separator, shuffle, keep, dropout"
    )
    masks: bool = Field(
        False,
        description="NAME-masklabel.png beside a picture says what of it counts: white counts",
    )
    unmasked_weight: Probability = Field(0.0, description="what the rest counts, where masks are")
    broken: Literal["refuse", "skip"] = Field(
        "refuse", description="pictures that can't be read; skip: count and name them"
    )
    validation: Share = Field(0.05, description="share of the pictures that no step trains on")
    prompts: list[str] = Field([], description="pictures of them are shown while it trains")
    negative_prompt: str = Field("", description="what those pictures are led away from")
    sample_steps: Annotated[int, Field(gt=0, le=1000)] = Field(
        25, description="steps from noise to such a picture"
    )
    guidance: Annotated[float, Field(ge=0, le=100)] | None = Field(
        None, description="how strongly a prompt is followed; the pipeline's own if not given"
    )

    @field_validator("source")
    @classmethod
    def _named_source(
        cls, value: str | list[str | ImageFolder] | None
    ) -> str | list[str | ImageFolder] | None:
        if value in ("", []) or (isinstance(value, list) and "" in value):
            raise ValueError("names nothing")
        return value

    @property
    def folders(self) -> tuple[ImageFolder, ...]:
        """All folders; none where the shapes are drawn."""
        items = [self.source] if isinstance(self.source, str) else self.source or []
        return tuple(
            item if isinstance(item, ImageFolder) else ImageFolder(source=item) for item in items
        )
