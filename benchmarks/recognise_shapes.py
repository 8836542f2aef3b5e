"""Name the colour and the shape in a picture, to measure what a trained model draws.

Made for the pictures of `samecurve data shapes`: one coloured shape on a plain grey ground. It
knows nothing of how they are drawn: only the names of colours with about their values, and what a
circle, a square and a triangle look like. Plain numpy; no model.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

COLOURS = {
    "red": (210, 40, 40),
    "green": (40, 160, 45),
    "blue": (35, 90, 210),
    "yellow": (240, 200, 30),
}
SHAPES = ("circle", "square", "triangle")
NOTHING = "nothing"
_LEAST_SATURATION = 50.0  # difference of a colour's channels, of 255
_LEAST_PIXELS = 4  # of a shape
_CORE = 0.75  # share of the largest distance from the ground's colour
_FINER = 4  # times as many points a side, between which an edge is found
_WINDOW = 64  # points a side at which shapes are compared
_REACH = 1.9  # half the side of the window, in radii of a circle of the shape's area

Numbers = NDArray[np.float64]


def recognise(picture: NDArray[np.uint8]) -> tuple[str, str]:
    """The names of the colour and the shape in a picture [height, width, 3].

    Both are "nothing" where there is no coloured shape.
    """
    pixels = picture.astype(np.float64)
    border = [pixels[0], pixels[-1], pixels[:, 0], pixels[:, -1]]
    ground = np.median(np.concatenate(border), axis=0)
    smooth = _smoothed(pixels - ground)
    distance = np.sqrt(np.square(smooth).sum(2))
    core = distance > _CORE * distance.max()
    if core.sum() < _LEAST_PIXELS:
        return NOTHING, NOTHING
    towards = np.median(smooth[core], axis=0)
    colour = ground + towards
    if colour.max() - colour.min() < _LEAST_SATURATION:
        return NOTHING, NOTHING
    share = smooth @ towards / (towards @ towards)  # how much of each pixel the shape covers
    return _nearest(colour), _shape(_finer(share) > 0.5)


def score(pictures: Sequence[NDArray[np.uint8]], captions: Sequence[str]) -> tuple[float, float]:
    """The shares of pictures whose colour, and whose shape, is what the caption asks for."""
    seen = [recognise(picture) for picture in pictures]
    colours = [colour in text.split() for (colour, _), text in zip(seen, captions, strict=True)]
    shapes = [shape in text.split() for (_, shape), text in zip(seen, captions, strict=True)]
    return float(np.mean(colours)), float(np.mean(shapes))


def _smoothed(values: Numbers) -> Numbers:
    """Each pixel mixed with its neighbours, which takes off most noise."""
    padded = np.pad(values, ((1, 1), (1, 1), (0, 0)), mode="edge")
    across = padded[:, :-2] + 2 * padded[:, 1:-1] + padded[:, 2:]
    mixed: Numbers = (across[:-2] + 2 * across[1:-1] + across[2:]) / 16
    return mixed


def _finer(values: Numbers) -> Numbers:
    """More points a side, interpolated linearly."""
    for _ in range(2):
        side = len(values)
        places = np.linspace(0, side - 1, _FINER * side)
        below = np.minimum(places.astype(int), side - 2)
        share = (places - below)[:, None]
        values = (values[below] * (1 - share) + values[below + 1] * share).T
    return values


def _nearest(value: Numbers) -> str:
    """The name of the nearest colour."""
    return min(COLOURS, key=lambda name: float(np.square(value - COLOURS[name]).sum()))


def _shape(inside: NDArray[np.bool_]) -> str:
    """The shape that overlaps most, when both have the same middle and the same area."""
    rows, columns = np.nonzero(inside)
    radius = np.sqrt(len(rows) / np.pi)
    steps = np.linspace(-_REACH, _REACH, _WINDOW)
    room = int(_REACH * radius) + 2  # a shape may touch the border
    padded = np.pad(inside, room, constant_values=False)
    down = np.rint(rows.mean() + steps * radius).astype(int) + room
    across = np.rint(columns.mean() + steps * radius).astype(int) + room
    seen = padded[np.ix_(down, across)]
    y, x = np.meshgrid(steps, steps, indexing="ij")
    return max(SHAPES, key=lambda name: _overlap(seen, _ideal(name, x, y)))


def _ideal(name: str, x: Numbers, y: Numbers) -> NDArray[np.bool_]:
    """Which points lie in a shape of the area of a circle of radius 1, its middle of mass at 0."""
    inner = np.sqrt(np.pi / np.sqrt(27))  # radius of the circle within a triangle that stands
    ideal: dict[str, NDArray[np.bool_]] = {
        "circle": x**2 + y**2 <= 1,
        "square": np.maximum(np.abs(x), np.abs(y)) <= np.sqrt(np.pi) / 2,
        "triangle": (y <= inner) & (np.sqrt(3) * np.abs(x) - y <= 2 * inner),
    }
    return ideal[name]


def _overlap(one: NDArray[np.bool_], other: NDArray[np.bool_]) -> float:
    """The area in both shapes, of the area in either."""
    return float((one & other).sum() / (one | other).sum())
