"""The timeseries task's `model` and `data` fields. No engine is imported here."""

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from samecurve.core.config import MOST_LAYERS
from samecurve.seam import DataSection, Section

Size = Annotated[int, Field(gt=0, le=1 << 20)]  # of a dimension
Share = Annotated[float, Field(ge=0, lt=1)]
Deviation = Annotated[float, Field(ge=0, le=100)]
Mode = Literal["joint", "flatten", "average", "first"]
Order = Literal["channels_first", "time_first"]
ClassWeights = Literal["none", "balanced"] | dict[str, Annotated[float, Field(gt=0)]]

_MOST_DOUBLED = 12  # blocks of a resnet
_ONLY = {  # fields that one model alone has
    "norm": "resnet",
    "kernel_size": "resnet",
    "patch": "transformer",
    "heads": "transformer",
}


class TimeSeriesModel(Section):
    """A classifier of windows [channels, time]."""

    name: Literal["resnet", "transformer", "mlp"] = Field(
        "resnet",
        description=(
            "resnet: residual convolutions over time; transformer: over patches of time steps;"
            " mlp: of the whole window"
        ),
    )
    width: Size = Field(
        32, description="of the first block (resnet), of every layer (transformer, mlp)"
    )
    depth: Annotated[int, Field(gt=0, le=MOST_LAYERS)] = Field(
        3,
        description=(
            "residual blocks, each after the first with twice the channels and half the time steps"
            " (resnet); blocks (transformer); hidden layers (mlp)"
        ),
    )
    norm: Literal["group", "batch"] = Field(
        "group",
        description=(
            "of resnet; batch couples the samples of a batch: train.norm_sync, or one microbatch"
        ),
    )
    kernel_size: Size = Field(5, description="of resnet: time steps of a convolution, odd")
    patch: Size = Field(8, description="of transformer: time steps of a token")
    heads: Size = Field(4, description="of transformer: attention heads")
    dropout: Share = Field(0.1, description="that a feature is left out, before the last layer")
    label_smoothing: Share = Field(
        0.0, description="share of a label that is spread evenly over all classes"
    )
    class_weights: ClassWeights = Field(
        "none",
        description=(
            "what a sample counts in the loss, by the name of its class (others 1); balanced: all"
            " classes together the same"
        ),
    )

    @model_validator(mode="after")
    def _fields_of_this_model(self) -> "TimeSeriesModel":
        for field, model in _ONLY.items():
            is_default = getattr(self, field) == type(self).model_fields[field].default
            if self.name != model and not is_default:
                raise ValueError(f"{field} is of model {model}, and name is {self.name}")
        if self.name == "resnet" and self.depth > _MOST_DOUBLED:
            raise ValueError(
                f"depth {self.depth} doubles the width {self.depth - 1} times; at most"
                f" {_MOST_DOUBLED} blocks"
            )
        if self.kernel_size % 2 == 0:
            raise ValueError(f"kernel_size {self.kernel_size} is even: it has no middle")
        if self.name == "transformer" and self.width % self.heads:
            raise ValueError(f"width {self.width} is not a multiple of heads {self.heads}")
        return self


class Augmentation(Section):
    """Random changes of a training window; they follow from (seed, epoch, sample)."""

    jitter: Deviation = Field(
        0.0, description="deviation of noise on each value; a channel's own deviation is 1"
    )
    scale: Deviation = Field(
        0.0, description="deviation of the factor, around 1, of each channel of a window"
    )
    time_warp: Share = Field(
        0.0, description="deviation of the speed, around 1, at which a window is run through"
    )
    channel_dropout: Share = Field(
        0.0, description="probability that a channel of a window is set to its mean"
    )


class TimeSeriesData(DataSection):
    """The source of the windows, and what a sample is."""

    source: str | None = Field(
        None,
        description=(
            "a directory in the layout of UCI HAR, one split of it (DIR/test), an .npz or a .csv"
            " file; if not given, a synthetic set, made once in the cache"
        ),
    )
    order: Order | None = Field(
        None,
        description=(
            "of x in an .npz file: channels_first is [windows, channels, time], time_first is"
            " [windows, time, channels]; if not given, the former, unless it has more channels than"
            " time steps: then it is asked for"
        ),
    )
    mode: Mode = Field(
        "joint",
        description=(
            "joint: all channels of a window are one sample; flatten: each channel is one, with the"
            " window's label; average: the mean of the channels; first: the first channel"
        ),
    )
    validation: Share = Field(
        0.2, description="share of the subjects whose windows no step trains on"
    )
    augment: Augmentation = Field(
        Augmentation(), description="jitter, scale, time_warp, channel_dropout"
    )
    like_run: str | None = Field(
        None,
        description=(
            "the windows.json that a run keeps: all windows of the source, read as that run"
            " evaluates its own (`samecurve eval RUN -d SOURCE` sets it)"
        ),
    )

    @field_validator("source")
    @classmethod
    def _named_source(cls, value: Any) -> Any:
        if value == "":
            raise ValueError("names nothing")
        return value

    @model_validator(mode="after")
    def _channels_to_drop(self) -> "TimeSeriesData":
        if self.augment.channel_dropout and self.mode != "joint":
            raise ValueError(
                f"augment.channel_dropout leaves nothing of a sample that has one channel, as in"
                f" mode {self.mode}"
            )
        return self
