"""The fields of `data.augment`: how an image to train on is changed at each reading."""

from typing import Annotated

from pydantic import Field, model_validator

from samecurve.seam import Section

Probability = Annotated[float, Field(ge=0, le=1)]
Extent = Annotated[float, Field(ge=0, le=1)]
Alpha = Annotated[float, Field(ge=0, le=100)]
MOST_MAGNITUDE = 10


class Augment(Section):
    """Random changes of an image to train on; they follow from (seed, epoch, sample)."""

    crop: Annotated[float, Field(gt=0, le=1)] = Field(
        1.0,
        description=(
            "least share of an image's area that a random crop shows, such as 0.08; 1: no random"
            " crop, but the middle"
        ),
    )
    ratio: Annotated[float, Field(ge=1, le=10)] = Field(
        4 / 3, description="of a random crop: longer side by shorter side, at most"
    )
    flip: Probability = Field(0.0, description="probability that an image is mirrored")
    color: Extent = Field(
        0.0,
        description="brightness, contrast and saturation are multiplied by 1 - color to 1 + color",
    )
    operations: Annotated[int, Field(ge=0, le=14)] = Field(
        0, description="RandAugment: operations in turn, each chosen among 14"
    )
    magnitude: Annotated[float, Field(ge=0, le=MOST_MAGNITUDE)] = Field(
        9.0, description="of RandAugment: how far an operation goes, from 0 to 10"
    )
    erase: Probability = Field(
        0.0, description="probability that a rectangle of an image is replaced by noise"
    )
    mixup: Alpha = Field(
        0.0, description="alpha of the Beta distribution by which two images are blended; 0: none"
    )
    cutmix: Alpha = Field(
        0.0,
        description=(
            "alpha of the Beta distribution of the area that comes from another image; 0: none;"
            " with mixup too, one of both is chosen for each image"
        ),
    )
    mix_probability: Probability = Field(
        1.0, description="probability that an image is mixed, by mixup or cutmix"
    )

    @model_validator(mode="after")
    def _something_to_mix(self) -> "Augment":
        if self.mix_probability != 1.0 and not self.mixes:
            raise ValueError("mix_probability is of mixup and cutmix, and both are 0")
        return self

    @property
    def mixes(self) -> bool:
        return bool(self.mixup or self.cutmix)

    @property
    def changes_colors(self) -> bool:
        return bool(self.color or self.operations)

    @property
    def changes_anything(self) -> bool:
        return bool(self.crop < 1 or self.flip or self.changes_colors or self.erase or self.mixes)
