"""Drawn pictures with captions: coloured shapes on plain grounds. No download is needed.

Each picture is a pure function of (seed, number): a shape and a colour in turn, at a random place,
in a random size, on a ground of random grey. The same arguments give the same bytes with the same
version of Pillow.
"""

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from samecurve.core.system import directory_made_once
from samecurve.seam import UserError, explain_os_error
from samecurve_products.pictures.diffusion.data.folders import METADATA
from samecurve_products.pictures.files.picture_files import check_pillow

if TYPE_CHECKING:  # a start without pictures does not import Pillow
    from PIL import Image as Pillow

VERSION = 1  # of what is drawn
COLOURS = {
    "red": (214, 39, 40),
    "green": (44, 160, 44),
    "blue": (31, 90, 214),
    "yellow": (240, 200, 30),
}
SHAPES = ("circle", "square", "triangle")
COUNT, SIZE = 2400, 32  # 200 of each kind, where no folder is named
_STREAM = 0x736861706573
_FINER = 4  # times as many pixels a side are drawn, then averaged
_RADII = (0.2, 0.38)  # of the picture's side
_GROUNDS = ((16, 64), (208, 248))  # greys: dark, light

Point = tuple[float, float]


def draw_shape(number: int, size: int, seed: int = 0) -> tuple["Pillow.Image", str]:
    """Picture `number` of a set, [size x size] pixels, and its caption."""
    from PIL import Image, ImageDraw

    random = np.random.default_rng((_STREAM, seed, number))
    shape = SHAPES[number % len(SHAPES)]
    colour = list(COLOURS)[number // len(SHAPES) % len(COLOURS)]
    grey = int(random.integers(*_GROUNDS[int(random.integers(2))]))
    side = size * _FINER
    radius = side * random.uniform(*_RADII)
    middle = random.uniform(radius, side - radius, 2)
    image = Image.new("RGB", (side, side), (grey, grey, grey))
    draw = ImageDraw.Draw(image)
    x, y = float(middle[0]), float(middle[1])
    if shape == "circle":
        draw.ellipse((x - radius, y - radius, x + radius, y + radius), fill=COLOURS[colour])
    else:
        draw.polygon(_corners(shape, x, y, float(radius)), fill=COLOURS[colour])
    return image.reduce(_FINER), f"a {colour} {shape}"


def _corners(shape: str, x: float, y: float, radius: float) -> list[Point]:
    """The corners of a square that lies flat, or of a triangle that stands."""
    count, first = (4, math.pi / 4) if shape == "square" else (3, -math.pi / 2)
    angles = (first + 2 * math.pi * corner / count for corner in range(count))
    return [(x + radius * math.cos(angle), y + radius * math.sin(angle)) for angle in angles]


def write_shapes(home: Path, *, count: int = COUNT, size: int = SIZE, seed: int = 0) -> list[str]:
    """Write a set into a new directory, whole or not at all. Returns lines for the user.

    UserError: the directory is not empty, or can't be written to.
    """
    check_pillow()
    if home.exists() and not (home.is_dir() and not any(home.iterdir())):
        raise UserError(
            f"{home} is there already, and is not empty", "a new directory, or an empty one", "DIR"
        )
    try:
        with directory_made_once(home) as scratch:
            captions = _draw_files(scratch, count, size, seed)
            for name, caption in captions.items():
                (scratch / name).with_suffix(".txt").write_text(f"{caption}\n")
    except OSError as error:
        raise UserError(*explain_os_error(error, home, "write it again"), "DIR") from error
    kinds = min(count, len(COLOURS) * len(SHAPES))
    return [
        f"pictures  {count:,} of {size} x {size} pixels, each with its caption beside it",
        f"captions  {kinds} different ones: a, {' or '.join(COLOURS)}, {' or '.join(SHAPES)}",
    ]


def ensure_shapes(cache: Path) -> Path:
    """The folder of the set that is made where the config names none; it is drawn on first use.

    Its captions lie in one file: creating thousands of files takes longer than drawing.
    """
    home = cache / f"shapes-{VERSION}"
    if not home.is_dir():
        check_pillow()
        with directory_made_once(home) as scratch:
            captions = _draw_files(scratch, COUNT, SIZE, 0)
            rows = ({"file_name": name, "text": text} for name, text in captions.items())
            (scratch / METADATA).write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return home


def _draw_files(home: Path, count: int, size: int, seed: int) -> dict[str, str]:
    """Write the pictures. Returns their captions by file name, in the order of the numbers."""
    captions = {}
    digits = len(str(count - 1))
    for number in range(count):
        name = f"{number:0{digits}d}.png"
        image, captions[name] = draw_shape(number, size, seed)
        image.save(home / name, format="PNG")
    return captions
