"""Images to train on, changed anew at each reading: a pure function of (seed, epoch, sample).

In turn: a random crop, mirroring, RandAugment, colours, erasing, then mixing with another image.
Each kind of change draws from a stream of its own, so that switching one on leaves the others.
All frames of a clip are changed in the same way, by the same numbers.
"""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from samecurve.seam import Ids
from samecurve_products.pictures.sample_pairs import paired_ids
from samecurve_products.pictures.vision.augment_section import Augment
from samecurve_products.pictures.vision.data.operations import change_colors, random_operations
from samecurve_products.pictures.vision.data.views import (
    Box,
    OpenImage,
    Size,
    Views,
    as_pixels,
    each_frame,
    middle,
)

if TYPE_CHECKING:
    from PIL import Image as Pillow

_STREAM = 0x617567  # keeps these numbers apart from others that follow from (seed, epoch, sample)
_CROP, _FLIP, _OPERATIONS, _COLOR, _ERASE, _MIX = range(6)
_TRIES = 10  # of a rectangle that has to fit
_ERASED = (0.02, 1 / 3)  # least and most share of the area; Zhong and others, 2017
_ERASED_RATIO = 3.3  # longer side by shorter side of what is erased, at most

Pixels = NDArray[np.uint8]


class AugmentedRows:
    """Rows of images that are changed as a recipe says.

    Rows: pixels uint8 [height, width, channels], of clips [frames, height, width, channels], labels
    int64; of a recipe that mixes, labels_2 int64 and mix float32: what the first label counts.

    seed: the run's. size: width and height of a row's image
    """

    def __init__(self, views: Views, augment: Augment, *, size: Size, seed: int) -> None:
        self._views, self._augment, self._size, self._seed = views, augment, size, seed

    def __len__(self) -> int:
        return len(self._views)

    def __getitem__(self, ids: Ids, epoch: int = 0) -> dict[str, NDArray[Any]]:
        """Rows of an epoch. An image that several of them show is decoded once."""
        labels = self._views.labels
        if not self._augment.mixes:
            images = [self._changed(sample, epoch) for sample in ids.tolist()]
            return {"pixels": np.stack(images), "labels": labels[ids]}
        others = paired_ids(ids, len(self), self._seed, epoch)
        changed = {
            sample: self._changed(sample, epoch)
            for sample in dict.fromkeys([*ids.tolist(), *others.tolist()])
        }
        mixed = [
            self._mixed(sample, changed[sample], changed[other], epoch)
            for sample, other in zip(ids.tolist(), others.tolist(), strict=True)
        ]
        return {
            "pixels": np.stack([pixels for pixels, _ in mixed]),
            "labels": labels[ids],
            "labels_2": labels[others],
            "mix": np.array([share for _, share in mixed], np.float32),
        }

    def _draws(self, what: int, sample: int, epoch: int) -> np.random.Generator:
        return np.random.default_rng((_STREAM, what, self._seed, epoch, sample))

    def _changed(self, sample: int, epoch: int) -> Pixels:
        """An image, or a clip, with all changes but mixing."""
        opened = self._views.open(sample)
        return each_frame(opened, lambda image: self._changed_image(image, sample, epoch))

    def _changed_image(self, opened: OpenImage, sample: int, epoch: int) -> Pixels:
        augment = self._augment
        image = opened.view(self._box(opened, sample, epoch), self._size)
        if augment.flip and self._draws(_FLIP, sample, epoch).random() < augment.flip:
            image = _mirrored(image)
        if augment.operations:
            random = self._draws(_OPERATIONS, sample, epoch)
            image = random_operations(image, random, augment.operations, augment.magnitude)
        if augment.color:
            image = change_colors(image, self._draws(_COLOR, sample, epoch), augment.color)
        pixels = as_pixels(image)
        if augment.erase:
            pixels = erased(pixels, self._draws(_ERASE, sample, epoch), augment.erase)
        return pixels

    def _box(self, image: OpenImage, sample: int, epoch: int) -> Box:
        whole = middle(image.size, self._size, 1.0)
        if self._augment.crop == 1:
            return whole
        draws = self._draws(_CROP, sample, epoch).random((_TRIES, 4))
        areas = (self._augment.crop, 1.0)
        box = fitting_box(image.size, draws, areas, self._augment.ratio)
        return whole if box is None else box

    def _mixed(self, sample: int, image: Pixels, other: Pixels, epoch: int) -> tuple[Pixels, float]:
        """The mixed image, and the share of it that is the first one."""
        augment, random = self._augment, self._draws(_MIX, sample, epoch)
        is_mixed, chosen, left, top = random.random(4)
        if image is other or is_mixed >= augment.mix_probability:
            return image, 1.0
        cuts = bool(augment.cutmix) and (not augment.mixup or chosen < 0.5)
        alpha = augment.cutmix if cuts else augment.mixup
        share = float(random.beta(alpha, alpha))
        return cut_in(image, other, share, (left, top)) if cuts else blend(image, other, share)


def fitting_box(
    image: Size, draws: NDArray[np.float64], areas: tuple[float, float], ratio: float
) -> Box | None:
    """A rectangle of random area, ratio and place; None: none of the tries fits into the image.

    draws: [tries, 4], between 0 and 1. areas: least and most share of the image's area
    """
    width, height = image
    for area, shape, across, down in draws.tolist():
        share = areas[0] + (areas[1] - areas[0]) * area
        by = math.exp((2 * shape - 1) * math.log(ratio))  # width by height
        wide = round(math.sqrt(width * height * share * by))
        high = round(math.sqrt(width * height * share / by))
        if 0 < wide <= width and 0 < high <= height:
            left, top = int(across * (width - wide + 1)), int(down * (height - high + 1))
            return Box(left, top, left + wide, top + high)
    return None


def erased(pixels: Pixels, random: np.random.Generator, probability: float) -> Pixels:
    """The image with a rectangle of noise, or as it is."""
    height, width, channels = pixels.shape
    happens, draws = random.random(), random.random((_TRIES, 4))
    box = fitting_box((width, height), draws, _ERASED, _ERASED_RATIO)
    if happens >= probability or box is None:
        return pixels
    left, top, right, bottom = map(int, box)
    changed = pixels.copy()
    shape = (bottom - top, right - left, channels)
    changed[top:bottom, left:right] = random.integers(0, 256, shape, np.uint8)
    return changed


def blend(image: Pixels, other: Pixels, share: float) -> tuple[Pixels, float]:
    """mixup: the sum of both, the first one `share` times."""
    first = np.float32(share)
    mixed = image * first + other * (np.float32(1) - first)
    return np.rint(mixed).astype(np.uint8), float(first)


def cut_in(
    image: Pixels, other: Pixels, share: float, middle_at: Sequence[float]
) -> tuple[Pixels, float]:
    """cutmix: a rectangle of 1 - share of the area comes from the other image.

    middle_at: where its middle lies, between 0 and 1; what lies outside of the image is cut off,
        so that the share that is returned is right
    """
    height, width, _ = image.shape[-3:]
    side = math.sqrt(1 - share)
    across, down = int(middle_at[0] * width), int(middle_at[1] * height)
    wide, high = int(width * side) // 2, int(height * side) // 2
    left, right = max(across - wide, 0), min(across + wide, width)
    top, bottom = max(down - high, 0), min(down + high, height)
    mixed = image.copy()
    mixed[..., top:bottom, left:right, :] = other[..., top:bottom, left:right, :]
    return mixed, 1 - (right - left) * (bottom - top) / (width * height)


def _mirrored(image: "Pillow.Image") -> "Pillow.Image":
    from PIL.Image import Transpose

    return image.transpose(Transpose.FLIP_LEFT_RIGHT)
