"""Images as pictures with lines of text below: the samples of the vision task."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from samecurve.seam import Picture

if TYPE_CHECKING:  # only runs with pictures need it
    from PIL import ImageDraw
    from PIL import ImageFont as Fonts

SIDE = 224  # least pixels across a picture, so that a page shows it made smaller, text and all
TEXT = 24  # pixels of a line's letters
PAPER, INK = (255, 255, 255), (20, 20, 20)
_LINE, _MARGIN = 30, 4  # pixels
_STILLS = 2  # frames of a clip across a picture, and down
_GAP = 2  # pixels between them


def with_text(pixels: NDArray[Any], lines: Sequence[str]) -> Picture:
    """An image, or some frames of a clip, with lines of text below it.

    pixels: [height, width, channels], or [frames, height, width, channels]
    """
    from PIL import Image, ImageDraw

    colors = stills(pixels) if pixels.ndim == 4 else in_color(pixels)
    factor = max(1, -(-SIDE // colors.shape[1]))
    image = Image.fromarray(colors.repeat(factor, 0).repeat(factor, 1))
    page = Image.new("RGB", (image.width, image.height + _LINE * len(lines) + _MARGIN), PAPER)
    page.paste(image)
    pen, letters = ImageDraw.Draw(page), font(TEXT)
    for number, line in enumerate(lines):
        shown = shortened(pen, line, page.width - 2 * _MARGIN, letters)
        pen.text((_MARGIN, image.height + number * _LINE), shown, fill=INK, font=letters)
    return np.asarray(page)


def in_color(pixels: NDArray[Any]) -> NDArray[np.uint8]:
    """An image [height, width, channels] as [height, width, 3]."""
    if pixels.dtype != np.uint8:
        pixels = np.rint(np.clip(pixels, 0, 1) * 255).astype(np.uint8)
    return pixels[:, :, :3] if pixels.shape[2] >= 3 else np.repeat(pixels[:, :, :1], 3, 2)


def stills(frames: NDArray[Any]) -> NDArray[np.uint8]:
    """Four frames of a clip, spread over it, in the order in which one reads: two lines of two."""
    places = np.linspace(0, len(frames) - 1, _STILLS**2).round().astype(np.int64)
    colors = [in_color(frames[place]) for place in places]
    height, width, _ = colors[0].shape
    page = np.full((height * _STILLS + _GAP, width * _STILLS + _GAP, 3), PAPER, np.uint8)
    for number, still in enumerate(colors):
        down, across = divmod(number, _STILLS)
        top, left = down * (height + _GAP), across * (width + _GAP)
        page[top : top + height, left : left + width] = still
    return page


def font(size: int) -> "Fonts.FreeTypeFont | Fonts.ImageFont":
    """Letters of a size; of Pillow's one size where it was built without FreeType."""
    from PIL import ImageFont, features

    return ImageFont.load_default(size if features.check("freetype2") else None)


def shortened(pen: "ImageDraw.ImageDraw", words: str, width: int, letters: Any) -> str:
    """The words, cut so that they fit into a width."""
    if pen.textlength(words, font=letters) <= width:
        return words
    while words and pen.textlength(f"{words}...", font=letters) > width:
        words = words[:-1]
    return f"{words}..."
