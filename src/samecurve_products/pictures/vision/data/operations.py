"""The operations of RandAugment, and changes of colours, with Pillow.

Source: Cubuk and others, "RandAugment", 2019: operations in turn, each chosen with equal chance,
all of one magnitude. What an operation moves goes in either direction with equal chance.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from samecurve_products.pictures.vision.augment_section import MOST_MAGNITUDE

if TYPE_CHECKING:
    from PIL import Image as Pillow

_Operation = Callable[["Pillow.Image", float], "Pillow.Image"]  # (image, -1 to 1) -> image
_GREY = 128  # where nothing of the image is left
_SHEAR = 0.3  # most pixels across for a pixel down
_SHIFT = 0.45  # most, of a side
_DEGREES = 30.0
_ENHANCED = 0.9  # factors from 0.1 to 1.9
_BITS = 4  # that posterize takes away at most, of 8


def random_operations(
    image: "Pillow.Image", random: np.random.Generator, count: int, magnitude: float
) -> "Pillow.Image":
    """Apply `count` operations; each is drawn anew, and may come twice."""
    chosen = random.integers(0, len(_OPERATIONS), count).tolist()
    signs = random.integers(0, 2, count).tolist()
    for number, sign in zip(chosen, signs, strict=True):
        image = _OPERATIONS[number](image, magnitude / MOST_MAGNITUDE * (1 if sign else -1))
    return image


def change_colors(
    image: "Pillow.Image", random: np.random.Generator, extent: float
) -> "Pillow.Image":
    """Multiply brightness, contrast and saturation, in an order that is drawn."""
    factors = (1 + extent * (2 * random.random(3) - 1)).tolist()
    names = ("Brightness", "Contrast", "Color")
    for number in random.permutation(3).tolist():
        image = _enhanced(image, names[number], factors[number])
    return image


def _enhanced(image: "Pillow.Image", name: str, factor: float) -> "Pillow.Image":
    from PIL import ImageEnhance

    changed: Pillow.Image = getattr(ImageEnhance, name)(image).enhance(factor)
    return changed


def _enhancing(name: str) -> _Operation:
    return lambda image, extent: _enhanced(image, name, 1 + _ENHANCED * extent)


def _by_itself(name: str) -> _Operation:
    """An operation without an extent."""

    def operation(image: "Pillow.Image", extent: float) -> "Pillow.Image":
        from PIL import ImageOps

        del extent
        changed: Pillow.Image = getattr(ImageOps, name)(image)
        return changed

    return operation


def _posterize(image: "Pillow.Image", extent: float) -> "Pillow.Image":
    from PIL import ImageOps

    return ImageOps.posterize(image, 8 - round(_BITS * abs(extent)))


def _solarize(image: "Pillow.Image", extent: float) -> "Pillow.Image":
    from PIL import ImageOps

    return ImageOps.solarize(image, round(256 * (1 - abs(extent))))


def _rotate(image: "Pillow.Image", extent: float) -> "Pillow.Image":
    from PIL.Image import Resampling

    return image.rotate(_DEGREES * extent, Resampling.BILINEAR, fillcolor=_fill(image))


def _moved(image: "Pillow.Image", rows: tuple[float, ...]) -> "Pillow.Image":
    from PIL.Image import Resampling, Transform

    return image.transform(
        image.size, Transform.AFFINE, rows, Resampling.BILINEAR, fillcolor=_fill(image)
    )


def _fill(image: "Pillow.Image") -> int | tuple[int, ...]:
    return _GREY if image.mode == "L" else (_GREY,) * len(image.getbands())


_OPERATIONS: tuple[_Operation, ...] = (
    _by_itself("autocontrast"),
    _by_itself("equalize"),
    _by_itself("invert"),
    _rotate,
    _posterize,
    _solarize,
    _enhancing("Color"),
    _enhancing("Contrast"),
    _enhancing("Brightness"),
    _enhancing("Sharpness"),
    lambda image, extent: _moved(image, (1, _SHEAR * extent, 0, 0, 1, 0)),
    lambda image, extent: _moved(image, (1, 0, 0, _SHEAR * extent, 1, 0)),
    lambda image, extent: _moved(image, (1, 0, _SHIFT * extent * image.width, 0, 1, 0)),
    lambda image, extent: _moved(image, (1, 0, 0, 0, 1, _SHIFT * extent * image.height)),
)
