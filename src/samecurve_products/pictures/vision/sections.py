"""The vision task's `model` and `data` fields. No engine is imported here."""

from typing import Annotated, Any, Literal

from pydantic import Field, NonNegativeInt, PositiveFloat, field_validator, model_validator

from samecurve.core.config import MOST_LAYERS
from samecurve.seam import DataSection, Section
from samecurve_products.pictures.vision.augment_section import Augment

Size = Annotated[int, Field(gt=0, le=1 << 20)]  # of a dimension
Share = Annotated[float, Field(ge=0, lt=1)]
Arch = Literal["vit", "simple"]
Cssm = Literal["attention", "no_gate", "gated", "hgru_bi", "no_fft"]
Stem = Literal["patch", "conv"]
Pool = Literal["mean", "max"]
NormOver = Literal["patch", "image"]
ContourLength = Literal[9, 14, 20]

RECURRENT = ("no_gate", "gated", "hgru_bi")  # blocks with a state that goes from step to step
_ONE_STEP = "gated"  # the one of them that mixes over space in one step, too
_STEPS = 8  # of the others, where the config names none
TORCH_BLOCKS = ("attention", "gated", "no_fft")  # jax has all
DIGITS, PATHFINDER = "digits", "pathfinder"
DRAWN_SIZE = 32  # pixels a side of a pathfinder image, where data.resolution names none

_ONLY = {  # fields of some blocks alone
    "heads": ("attention",),
    "kernel_size": RECURRENT,
    "steps": RECURRENT,
}

_OF_BACKBONES = ("path", "freeze_norms")
_OF_ARCHS = (
    *("arch", "cssm", "width", "depth", "patch", "heads", "steps", "kernel_size"),
    *("stem", "norm", "pool", "mlp_ratio"),
)


class VisionModel(Section):
    """A classifier of images, whose blocks mix over space by attention or by a recurrence in the
    frequencies of the image.
    """

    arch: Arch = Field(
        "vit",
        description=(
            "vit: patches with positions, blocks that mix over space and feed-forwards in turn;"
            " simple: patches and blocks without either (--arch)"
        ),
    )
    cssm: Cssm = Field(
        "attention",
        description=(
            "what mixes over space: attention; no_gate, gated, hgru_bi: state spaces in the"
            " frequencies of the image; no_fft: nothing, a control (--cssm)"
        ),
    )
    backbone: str | None = Field(
        None,
        description=(
            "a model of timm by its name, such as resnet50 or vit_tiny_patch16_224, in place of"
            " arch and its fields; torch (extra vision)"
        ),
    )
    path: str | None = Field(
        None,
        description=(
            "of a backbone: a file or directory with its weights; its last layer is made anew where"
            " it has other classes. Random weights if not given; nothing is downloaded"
        ),
    )
    freeze_norms: bool = Field(
        False,
        description=(
            "of a backbone with path: BatchNorm layers keep the statistics of those weights, so"
            " that they don't mix the samples of a batch"
        ),
    )
    width: Size = Field(64, description="channels of every block")
    depth: Annotated[int, Field(gt=0, le=MOST_LAYERS)] = Field(4, description="blocks")
    patch: Size = Field(4, description="pixels a side of a patch")
    stem: Stem = Field(
        "patch",
        description=(
            "what an image enters by: patch: a linear layer for each patch; conv: a 3 x 3"
            " convolution of the pixels and a GELU before it, so that a patch sees the edge of its"
            " neighbours"
        ),
    )
    norm: NormOver = Field(
        "patch",
        description=(
            "what a normalisation makes equally strong: each patch by itself, or each image, whose"
            " empty places stay weak among a few lines; of clips each frame"
        ),
    )
    pool: Pool = Field(
        "mean",
        description=(
            "over the patches, before the last layer: mean, or max, by which a single place can"
            " decide"
        ),
    )
    heads: Size = Field(4, description="of attention")
    steps: Annotated[int, Field(gt=0, le=1 << 12)] | None = Field(
        None,
        description=(
            "steps of a recurrence, each of which sees the image again; if not given, 1 of gated, 8"
            " of no_gate and hgru_bi"
        ),
    )
    kernel_size: Size = Field(
        7,
        description=(
            "patches a side of the kernel that a recurrence of several steps moves its state with"
        ),
    )
    mlp_ratio: PositiveFloat = Field(
        4.0, description="of vit: width of a feed-forward, in widths of the model"
    )
    dropout: Share = Field(0.0, description="that a feature is left out, before the last layer")
    drop_path: Share = Field(
        0.0,
        description=(
            "that a sample skips the last block; a block before it is skipped less often, in"
            " proportion to its number (stochastic depth)"
        ),
    )
    label_smoothing: Share = Field(
        0.0, description="share of a label that is spread evenly over all classes"
    )

    @model_validator(mode="after")
    def _fields_of_a_backbone(self) -> "VisionModel":
        if self.backbone is None:
            for name in _OF_BACKBONES:
                if getattr(self, name):
                    raise ValueError(f"{name} is of a backbone, and none is given")
            return self
        for name in _OF_ARCHS:
            if getattr(self, name) != type(self).model_fields[name].default:
                raise ValueError(
                    f"{name} is of arch, and the backbone {self.backbone} takes its place"
                )
        if self.freeze_norms and self.path is None:
            raise ValueError("freeze_norms keeps the statistics of model.path, which is not given")
        return self

    @model_validator(mode="after")
    def _fields_of_these_blocks(self) -> "VisionModel":
        for field, blocks in _ONLY.items():
            is_default = getattr(self, field) == type(self).model_fields[field].default
            if self.cssm not in blocks and not is_default:
                raise ValueError(
                    f"{field} is of cssm {' or '.join(blocks)}, and cssm is {self.cssm}"
                )
        if self.cssm == "attention" and self.width % self.heads:
            raise ValueError(f"width {self.width} is not a multiple of heads {self.heads}")
        if self.cssm in RECURRENT and self.num_steps == 1:
            if self.cssm != _ONE_STEP:
                raise ValueError(
                    f"steps 1: the kernels of {self.cssm} act between two steps; 2 at least"
                )
            if self.kernel_size != type(self).model_fields["kernel_size"].default:
                raise ValueError("kernel_size: there is no kernel in one step; steps 2 at least")
        return self

    @property
    def num_steps(self) -> int:
        """The steps of a recurrence; 1 of blocks without one. Of clips: their frames."""
        default = _STEPS if self.cssm in RECURRENT and self.cssm != _ONE_STEP else 1
        return self.steps or default

    def stem_width(self, channels: int) -> int:
        """The channels of a pixel before it becomes part of a patch. channels: of an image"""
        return max(1, self.width // self.patch) if self.stem == "conv" else channels

    @property
    def inner(self) -> int:
        """The width of a feed-forward."""
        return max(1, round(self.width * self.mlp_ratio))


def engines_of(model: VisionModel) -> tuple[str, ...]:
    """The engines that have a model."""
    if model.backbone is not None:
        return ("torch",)
    return ("torch", "jax") if model.cssm in TORCH_BLOCKS else ("jax",)


class VisionData(DataSection):
    """The source of the images."""

    source: str = Field(
        DIGITS,
        description=(
            "digits (of scikit-learn, 8 x 8), pathfinder (drawn), an .npz file of images and"
            " labels, a folder with a folder of pictures for each class, or shards with pictures"
            " (*.tar, *.parquet)"
        ),
    )
    resolution: Size | None = Field(
        None,
        description=(
            f"pixels a side; if not given {DRAWN_SIZE} of pathfinder, 224 of pictures in files"
        ),
    )
    frames: Annotated[int, Field(ge=2, le=1 << 12)] | None = Field(
        None,
        description=(
            "of pictures in files: a sample is a clip of so many frames, spread over the pictures"
            " in a folder inside its class's folder, or over those in a row of shards"
        ),
    )
    contour: ContourLength = Field(9, description="of pathfinder: dashes of the longest contour")
    shortest: Annotated[int, Field(gt=0)] | None = Field(
        None,
        description=(
            "of pathfinder: dashes of the shortest of the two long contours: each image has any"
            " number from that on, equally often; if not given all have data.contour"
        ),
    )
    distractors: Annotated[int, Field(ge=0, le=4)] = Field(
        4, description="of pathfinder: short contours beside the two long ones"
    )
    seed: Annotated[int, Field(ge=0, lt=1 << 32)] = Field(
        0, description="of pathfinder: another one draws other images"
    )
    samples: Size = Field(20_000, description="of pathfinder: images that are trained on")
    cached: bool = Field(
        True,
        description=(
            "of pathfinder: images are drawn once, into the cache, before the first step; false:"
            " each time one is read"
        ),
    )
    validation: Share = Field(
        0.1,
        description=(
            "share of the images to train on that no step trains on; of pathfinder: this many are"
            " drawn for it in addition, and again for a test"
        ),
    )
    eval_samples: NonNegativeInt | None = Field(
        None,
        description="images an evaluation reads, spread over the held-out ones; all if not given",
    )
    shown: Annotated[float, Field(gt=0, le=1)] = Field(
        0.875,
        description=(
            "of pictures in files: share of the shorter side that is seen, around the middle, in an"
            " evaluation, and in training without augment.crop"
        ),
    )
    broken: Literal["refuse", "skip"] = Field(
        "refuse",
        description="a picture in a folder that can't be read; skip: it is left out and named",
    )
    augment: Augment = Field(
        Augment(), description="random changes of the images that are trained on"
    )
    mean: list[float] | None = Field(
        None,
        description=(
            "of each channel, where 1 is white; if not given that of the images to train on, of"
            " pictures in files ImageNet's"
        ),
    )
    std: list[PositiveFloat] | None = Field(
        None, description="as mean: the deviation that a channel is divided by"
    )
    like_run: str | None = Field(
        None,
        description=(
            "the images.json that a run keeps: all images of the source, read as that run"
            " evaluates its own (`samecurve eval RUN -d SOURCE` sets it)"
        ),
    )

    @field_validator("source")
    @classmethod
    def _named_source(cls, value: Any) -> Any:
        if not value:
            raise ValueError("names nothing")
        return value

    @model_validator(mode="after")
    def _both_or_neither(self) -> "VisionData":
        if (self.mean is None) != (self.std is None):
            raise ValueError("mean and std are given together, or neither")
        if self.mean is not None and self.std is not None and len(self.mean) != len(self.std):
            raise ValueError(f"mean has {len(self.mean)} channels, and std has {len(self.std)}")
        return self
