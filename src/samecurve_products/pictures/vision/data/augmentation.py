"""A recipe for the images of any source that has whole numbers for pixels."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from samecurve.seam import Source, UserError
from samecurve_products.pictures.vision.augment_section import Augment
from samecurve_products.pictures.vision.data.image_sets import ImageRows
from samecurve_products.pictures.vision.data.recipe import AugmentedRows
from samecurve_products.pictures.vision.data.views import MiddleRows, Opened, OpenImage, Views


class ArrayViews:
    """Images in an array, as an augmentation sees them."""

    def __init__(self, rows: ImageRows) -> None:
        self._rows, self.labels = rows, rows.labels

    def __len__(self) -> int:
        return len(self._rows)

    def open(self, number: int) -> Opened:
        pixels = self._rows.image(number)
        return _opened(pixels) if pixels.ndim == 3 else tuple(map(_opened, pixels))

    def digest(self) -> str:
        return self._rows.digest()


def _opened(pixels: NDArray[Any]) -> OpenImage:
    """An image [height, width, channels], opened."""
    from PIL import Image

    height, width, channels = pixels.shape
    image = Image.fromarray(pixels[:, :, 0] if channels == 1 else pixels)
    return OpenImage((width, height), lambda _: image)


def with_recipe(source: Source, augment: Augment, seed: int) -> Source:
    """The images of a source, changed as a recipe says. seed: the run's.

    UserError: the images have no whole numbers, or no colours that Pillow knows.
    """
    if not augment.changes_anything:
        return source
    if isinstance(source, MiddleRows):
        return AugmentedRows(source.views, augment, size=source.size, seed=seed)
    if not isinstance(source, ImageRows):
        raise UserError(
            "images that are drawn when they are read are not augmented",
            "leave data.augment out; or images in files",
            "data.augment",
        )
    pixels = source.image(0)
    _check_pixels(pixels)
    views: Views = ArrayViews(source)
    size = (pixels.shape[-2], pixels.shape[-3])
    return AugmentedRows(views, augment, size=size, seed=seed)


def _check_pixels(pixels: NDArray[Any]) -> None:
    if pixels.dtype == np.uint8 and pixels.shape[-1] in {1, 3}:
        return
    raise UserError(
        f"images of {pixels.shape[-1]} channels of {pixels.dtype} are not augmented",
        "whole numbers from 0 to 255 (uint8) of 1 or 3 channels; or leave data.augment out",
        "data.augment",
    )
