"""Folders of drawn pictures, one for each class: coloured shapes on noise, of unlike sizes."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw

CLASSES = {"disc": (220, 60, 40), "ring": (40, 90, 220), "square": (40, 180, 60)}


def draw(name: str, number: int, *, side: int = 40) -> Image.Image:
    """A picture of a class: side pixels high and up to twice as wide."""
    random = np.random.default_rng((len(name), ord(name[0]), number))
    width, height = int(side * random.uniform(1, 2)), side
    noise = random.integers(90, 160, (height, width, 3)).astype(np.uint8)
    image = Image.fromarray(noise)
    pen = ImageDraw.Draw(image)
    left = (width - height) / 2 + random.uniform(0, height / 2)  # in the middle, as it is cut
    top = random.uniform(0, height / 2)
    box = (left, top, left + height / 2, top + height / 2)
    if name == "square":
        pen.rectangle(box, fill=CLASSES[name])
    elif name == "ring":
        pen.ellipse(box, outline=CLASSES[name], width=max(2, side // 10))
    else:
        pen.ellipse(box, fill=CLASSES.get(name, (200, 200, 30)))
    return image


def make_folder(
    root: Path,
    counts: Mapping[str, int],
    *,
    side: int = 40,
    first: int = 0,
    suffixes: Sequence[str] = (".jpg", ".png"),
) -> Path:
    """A folder with so many pictures of each class."""
    for name, count in counts.items():
        (root / name).mkdir(parents=True, exist_ok=True)
        for number in range(first, first + count):
            suffix = suffixes[number % len(suffixes)]
            draw(name, number, side=side).save(root / name / f"{number:04}{suffix}")
    return root
