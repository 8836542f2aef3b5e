"""The images that data.source names."""

from pathlib import Path

from samecurve.core.protocols import Source
from samecurve.data import spread_out
from samecurve.errors import UserError
from samecurve.tasks.vision.data.digits import read_digits, stamp_digits
from samecurve.tasks.vision.data.image_sets import ImageSets
from samecurve.tasks.vision.sections import DIGITS, VisionData


def open_images(data: VisionData, cache: Path) -> ImageSets:
    """The images of a data section. UserError: they are missing or unfit."""
    del cache
    if data.source == DIGITS:
        return read_digits(data.validation)
    raise _unknown(data.source)


def stamp_images(data: VisionData) -> object:
    """What the images are made from, told cheaply. UserError: a file is missing."""
    if data.source == DIGITS:
        return stamp_digits()
    raise _unknown(data.source)


def evaluated(source: Source | None, data: VisionData) -> Source | None:
    """The held-out images that an evaluation reads; None: there are none."""
    return None if source is None else spread_out(source, data.eval_samples)


def _unknown(source: str) -> UserError:
    return UserError(f"there are no images at {source}", "digits", "data.source")
