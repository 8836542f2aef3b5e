"""The pixels of a sample: a picture, scaled until it covers its bucket, cut, perhaps mirrored.

A cut is a plain value. Which cut a sample has is decided elsewhere (views.py); the pixels follow
from the file and the cut alone, so they have the same bits wherever they are made.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from samecurve.seam import cache_key
from samecurve_products.pictures.diffusion.data.buckets import Shape
from samecurve_products.pictures.diffusion.data.scan import Picture
from samecurve_products.pictures.files.picture_files import BrokenPictureError, decode, decode_mask
from samecurve_products.pictures.files.stored import read_content, unreadable

if TYPE_CHECKING:  # a start without pictures does not import Pillow
    from PIL import Image as Pillow


@dataclass(frozen=True)
class Cut:
    """The part of a picture that a sample shows.

    scaled: the sides of the whole picture before it is cut. left, top: the corner of the cut in
    it; of a mirrored picture, after mirroring. shape: the sides of the cut
    """

    scaled: Shape
    left: int
    top: int
    shape: Shape
    mirrored: bool = False


def scale_to_cover(width: int, height: int, shape: Shape) -> Shape:
    """The smallest sides, in the picture's own ratio, that cover a shape; in whole numbers."""
    if shape[0] * height >= shape[1] * width:  # the width decides
        return shape[0], max(shape[1], (2 * height * shape[0] + width) // (2 * width))
    return max(shape[0], (2 * width * shape[1] + height) // (2 * height)), shape[1]


def center_cut(picture: Picture, shape: Shape) -> Cut:
    """The middle of a picture, not mirrored."""
    width, height = scale_to_cover(picture.width, picture.height, shape)
    return Cut((width, height), (width - shape[0]) // 2, (height - shape[1]) // 2, shape)


def random_cut(
    picture: Picture, shape: Shape, random: np.random.Generator, *, crop: bool, flip: float
) -> Cut:
    """A cut at a place that is drawn, mirrored with a probability.

    crop: False: the cut is the middle, and is only mirrored
    """
    across, down, mirror = random.random(3)  # all of them, so that none depends on a field
    middle = center_cut(picture, shape)
    left, top = middle.left, middle.top
    if crop:
        left = int(across * (middle.scaled[0] - shape[0] + 1))
        top = int(down * (middle.scaled[1] - shape[1] + 1))
    return Cut(middle.scaled, left, top, shape, mirrored=bool(mirror < flip))


def read_pixels(picture: Picture, cut: Cut) -> NDArray[np.uint8]:
    """The pixels of a cut: [3, height, width]. UserError: the file has changed or gone."""
    from PIL.Image import Resampling

    try:
        image = decode(read_content(picture.file), picture.file.facts.orientation)
    except BrokenPictureError as error:
        raise unreadable(picture.file, error) from None
    pixels = np.asarray(_cut(image, cut, Resampling.LANCZOS))
    return np.ascontiguousarray(pixels.transpose(2, 0, 1))


def read_mask(picture: Picture, cut: Cut, rest: float) -> NDArray[np.float32]:
    """What each pixel of a cut counts in the loss: [height, width], from `rest` to 1.

    rest: what is black in the mask counts so much; white counts 1, and so does everything of a
        picture without a mask
    UserError: the file has changed or gone.
    """
    from PIL.Image import Resampling

    if picture.mask is None:
        return np.ones(cut.shape[::-1], np.float32)
    try:
        image = decode_mask(read_content(picture.mask), picture.mask.facts.orientation)
    except BrokenPictureError as error:
        raise unreadable(picture.mask, error) from None
    share = np.asarray(_cut(image, cut, Resampling.BOX)).astype(np.float32) / np.float32(255)
    return np.float32(rest) + (np.float32(1) - np.float32(rest)) * share


def encoding_key(picture: Picture, cut: Cut) -> str:
    """A name for what a frozen encoder makes of a cut: equal names, equal pixels."""
    corner = [cut.left, cut.top, cut.mirrored]
    return cache_key(["cut", picture.sha256, cut.scaled, corner, cut.shape])


def sizes_of(picture: Picture, cut: Cut) -> dict[str, tuple[int, int]]:
    """Sizes that some models are told, each as rows before columns.

    original: height and width before scaling. corner: top and left of the cut. size: of the cut
    """
    return {
        "original": (picture.height, picture.width),
        "corner": (cut.top, cut.left),
        "size": (cut.shape[1], cut.shape[0]),
    }


def _cut(image: "Pillow.Image", cut: Cut, how: "Pillow.Resampling") -> "Pillow.Image":
    from PIL.Image import Transpose

    scaled = image.resize(cut.scaled, how)
    if cut.mirrored:
        scaled = scaled.transpose(Transpose.FLIP_LEFT_RIGHT)
    right, bottom = cut.left + cut.shape[0], cut.top + cut.shape[1]
    return scaled.crop((cut.left, cut.top, right, bottom))
