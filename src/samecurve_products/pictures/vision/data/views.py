"""Parts of images by number, scaled to a size: what rows and augmentation are made from."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:  # a start without pictures does not import Pillow
    from PIL import Image as Pillow

Size = tuple[int, int]  # width and height


class Box(NamedTuple):
    """A part of an image, in its pixels; between pixels too."""

    left: float
    top: float
    right: float
    bottom: float


class Views(Protocol):
    """Images by number, or clips.

    open: the image of a number, with its sides: the image is decoded when view() is called; of a
        clip its frames, which have the same sides
    digest: of what the images and labels are made from, wherever that lies
    """

    def __len__(self) -> int: ...
    @property
    def labels(self) -> NDArray[np.int64]: ...
    def open(self, number: int) -> "Opened": ...
    def digest(self) -> str: ...


class OpenImage:
    """An image whose sides are known, and whose pixels are not yet.

    decode: (least size) -> the image, or a smaller one in the same ratio that has at least this
        size
    """

    def __init__(self, size: Size, decode: Callable[[Size], "Pillow.Image"]) -> None:
        self.size, self._decode = size, decode

    def view(self, box: Box, size: Size) -> "Pillow.Image":
        """A part of the image, scaled to a size."""
        from PIL.Image import Resampling

        width, height = self.size
        wide, high = box.right - box.left, box.bottom - box.top
        least = (int(np.ceil(width * size[0] / wide)), int(np.ceil(height * size[1] / high)))
        image = self._decode(least)
        across, down = image.width / width, image.height / height
        inside = (  # rounding may lead out of the image
            box.left * across,
            box.top * down,
            min(box.right * across, image.width),
            min(box.bottom * down, image.height),
        )
        if image.size == size and list(inside) == [0, 0, *size]:
            return image
        return image.resize(size, Resampling.BICUBIC, box=inside)


Opened = OpenImage | Sequence[OpenImage]  # an image, or the frames of a clip


def each_frame(
    opened: Opened, pixels_of: Callable[[OpenImage], NDArray[np.uint8]]
) -> NDArray[np.uint8]:
    """The pixels of an image, or of a clip, by a function that is called with each frame."""
    if isinstance(opened, OpenImage):
        return pixels_of(opened)
    return np.stack([pixels_of(frame) for frame in opened])


def middle(image: Size, size: Size, share: float) -> Box:
    """The largest part in the ratio of `size` around the middle, times `share`."""
    width, height = image
    scale = min(width / size[0], height / size[1]) * share
    wide, high = size[0] * scale, size[1] * scale
    left, top = (width - wide) / 2, (height - high) / 2
    return Box(left, top, min(left + wide, width), min(top + high, height))


def as_pixels(image: "Pillow.Image") -> NDArray[np.uint8]:
    """The pixels of an image: uint8 [height, width, channels]."""
    pixels = np.asarray(image)
    return pixels[:, :, None] if pixels.ndim == 2 else pixels


class MiddleRows:
    """Rows of images that are not augmented: their middle.

    size: of a row's image. share: of the largest part around the middle that is shown
    """

    def __init__(self, views: Views, size: Size, share: float = 1.0) -> None:
        self.views, self.size, self._share = views, size, share

    def __len__(self) -> int:
        return len(self.views)

    def __getitem__(self, ids: NDArray[np.int64]) -> dict[str, NDArray[np.generic]]:
        pixels = [each_frame(self.views.open(number), self._middle) for number in ids.tolist()]
        return {"pixels": np.stack(pixels), "labels": self.views.labels[ids]}

    def _middle(self, image: OpenImage) -> NDArray[np.uint8]:
        box = middle(image.size, self.size, self._share)
        return as_pixels(image.view(box, self.size))
