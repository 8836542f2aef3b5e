"""Pictures of held-out images that a model answers wrongly, the surest answers first.

No engine is imported here.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from samecurve.core.protocols import Picture, Source
from samecurve.units import counted

SHOWN = 16  # pictures at most
_LOOKED_AT = 512  # held-out images at most, spread over all
_TOGETHER = 32  # images that the model is given at once
_LEAST_SIDE = 112  # pixels of a picture; smaller images are enlarged by a whole number
_LINE = 12  # pixels of a line of text
_PAPER, _INK = (255, 255, 255), (20, 20, 20)

Answer = Callable[[dict[str, NDArray[Any]]], NDArray[Any]]  # rows -> chances [rows, classes]


def wrong_answers(
    source: Source | None, answer: Answer, classes: Sequence[str]
) -> list[str] | list[Picture]:
    """Pictures of images whose answer is wrong, or a text that says that there are none.

    answer: is called equally often on every rank
    """
    if source is None:
        return ["no images are held out, so none is answered"]
    ids = np.unique(np.linspace(0, len(source) - 1, min(len(source), _LOOKED_AT)).astype(np.int64))
    wrong: list[tuple[float, int, int, int]] = []
    for first in range(0, len(ids), _TOGETHER):
        some = ids[first : first + _TOGETHER]
        rows = dict(source[some])
        chances, labels = answer(rows), rows["labels"]
        answers = chances.argmax(-1)
        for row in np.flatnonzero(answers != labels).tolist():
            given = int(answers[row])
            wrong.append((float(chances[row, given]), int(some[row]), int(labels[row]), given))
    if not wrong:
        return [f"no wrong answer among {counted(len(ids), 'held-out image')}"]
    wrong.sort(key=lambda each: (-each[0], each[1]))
    pictures: list[Picture] = []
    for chance, sample, label, given in wrong[:SHOWN]:
        pixels = source[np.array([sample])]["pixels"][0]
        text = f"{classes[label]}\nsays {classes[given]} {chance:.0%}"
        pictures.append(with_text(pixels, text))
    return pictures


def with_text(pixels: NDArray[Any], text: str) -> Picture:
    """An image [height, width, channels] as a picture, with lines of text below it."""
    from PIL import Image, ImageDraw

    if pixels.dtype != np.uint8:
        pixels = np.rint(np.clip(pixels, 0, 1) * 255).astype(np.uint8)
    color = pixels[:, :, :3] if pixels.shape[2] >= 3 else np.repeat(pixels[:, :, :1], 3, 2)
    factor = max(1, -(-_LEAST_SIDE // min(color.shape[:2])))
    image = Image.fromarray(color.repeat(factor, 0).repeat(factor, 1))
    lines = text.split("\n")
    page = Image.new("RGB", (image.width, image.height + _LINE * len(lines) + 4), _PAPER)
    page.paste(image)
    pen = ImageDraw.Draw(page)
    for number, line in enumerate(lines):
        pen.text((2, image.height + 1 + number * _LINE), line, fill=_INK)
    return np.asarray(page)
