"""Pathfinder: do two dots lie on one contour? Drawn images; no download is needed.

An image has two dashed contours of one length, shorter ones that distract, and two dots: at both
ends of one contour, or at one end of each. Each image is a pure function of (seed, number), so any
part of a set can be made anywhere.

What decides lies in the contours alone. A scene is drawn without regard to its label. Its contours
lie so that the ends of one are as far apart as an end of the one and an end of the other (within a
few per cent of the image), and any of the four ends may have a dot. So neither the number of bright
pixels tells the label, nor the distance of the dots, nor any sum over pixels.

A set may have images of shorter contours, too, from which a model learns to follow long ones.

After Linsley, Kim, Veerabadran, Windolf and Serre, "Learning long-range spatial dependencies with
horizontal gated recurrent units", NeurIPS 2018.
"""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

CLASSES = ("apart", "connected")  # by label
VERSION = 2  # of what is drawn
LEAST, MOST = 32, 128  # pixels a side
LEAST_PITCH = 2.5  # pixels from dash to dash
_STREAM = 0x70617468
_TRIES = 48  # contours that are drawn at once
_PITCH = {9: 0.09, 14: 0.06, 20: 0.045}  # from dash to dash, in sides of the image
_DASH, _HALF_WIDTH = 0.62, 0.17  # length and half the width of a dash, in pitches
_LEAST_HALF_WIDTH = 0.55  # of a dash, in pixels
_DOT = 0.05  # radius of a dot, in sides of the image
_EDGE = 0.07  # that contours stay away from the edge
_APART, _LEAST_APART = 1.0, 0.09  # of two contours: in pitches, and in sides of the image
_TURN, _STEADY, _MOST_TURN = 0.16, 0.85, 0.45  # radians a dash: noise, memory, largest
# differences of the distances of dots, in sides of the image; larger ones are commoner, so that the
# mean of those within these limits is 0
_LIKE = (-0.055, 0.022)
# of shorter contours, whose ends' distances are more alike: at most, and for each dash^2 and side
_LIKE_SHORTER, _LIKE_BY_LENGTH = 0.01, 0.00072
_LEAST_DOTS = 0.2  # distance of the dots, in sides of the image
_SHORT = 3  # a contour that distracts has so many times fewer dashes
_SHORTEST = 0.36  # length of the shortest long contour, in sides of the image

Points = NDArray[np.float64]  # [..., 2], in sides of the image


@dataclass(frozen=True)
class Scene:
    """The contours of an image, and the dots for each label.

    long: two contours [dashes + 1, 2]. short: those that distract
    dots: by label
    """

    long: tuple[Points, Points]
    short: tuple[Points, ...]
    dots: tuple[Points, Points]


def least_size(contour: int) -> int:
    """The fewest pixels a side in which the dashes of a contour can be told apart."""
    return max(LEAST, math.ceil(LEAST_PITCH / _PITCH[contour]))


def least_dashes(contour: int) -> int:
    """The fewest dashes that the shortest long contour of a set may have."""
    return math.ceil(round(_SHORTEST / _PITCH[contour], 6))


def draw_image(
    number: int,
    *,
    size: int,
    contour: int,
    distractors: int,
    shortest: int | None = None,
    seed: int = 0,
) -> tuple[NDArray[np.uint8], int]:
    """Image `number` of a set, uint8 [size, size], and its label: 1 if one contour joins the dots.

    contour, shortest, distractors: as of draw_scene
    """
    scene = draw_scene(
        number, contour=contour, distractors=distractors, shortest=shortest, seed=seed
    )
    label = number % len(CLASSES)
    return _rasterized(scene, label, size, contour), label


def draw_scene(
    number: int, *, contour: int, distractors: int, shortest: int | None = None, seed: int = 0
) -> Scene:
    """Contours that keep apart from each other, and the dots for each label.

    With either label each of the four ends has a dot in half of all cases: so where the dots lie
    tells nothing.

    contour: dashes of both long contours; if `shortest` is given any number from that on, equally
    often. distractors: how many short ones
    """
    random = np.random.default_rng((_STREAM, seed, number))
    clearance = _clearance(contour)
    dashes = contour if shortest is None else int(random.integers(shortest, contour + 1))
    limits = _LIKE if dashes == contour else _shorter_limits(dashes, contour)
    while True:
        walks = _walks(random, dashes, _PITCH[contour])
        firsts, seconds, turns = _like_ends(walks[:, [0, -1]], limits)
        apart = (_distances(walks[firsts], walks[seconds]) >= clearance).all((1, 2))
        for place in np.flatnonzero(apart):
            long = walks[firsts[place]], walks[seconds[place]]
            short = _distractors(random, long, contour, distractors)
            if short is None:
                continue
            ends = np.stack([long[0][[0, -1]], long[1][[0, -1]][:: 1 - 2 * turns[place]]])
            one, other = random.integers(2, size=2)
            return Scene(long, short, (ends[:, one], ends[other]))


def _walks(random: np.random.Generator, dashes: int, pitch: float) -> Points:
    """Smooth contours, each at a random place within the image; none comes close to itself."""
    turns, change = np.zeros(_TRIES), random.normal(0, _TURN, (dashes, _TRIES))
    heading = random.uniform(0, 2 * np.pi, _TRIES)
    headings = []
    for dash in range(dashes):
        headings.append(heading)
        turns = np.clip(_STEADY * turns + change[dash], -_MOST_TURN, _MOST_TURN)
        heading = heading + turns
    angles = np.stack(headings, 1)
    steps = pitch * np.stack([np.cos(angles), np.sin(angles)], -1)
    walks = np.concatenate([np.zeros((_TRIES, 1, 2)), steps.cumsum(1)], 1)
    lowest, highest = walks.min(1), walks.max(1)
    room = 1 - 2 * _EDGE - (highest - lowest)
    walks = walks + (_EDGE - lowest + random.random((_TRIES, 2)) * room)[:, None]
    gaps = _distances(walks, walks)
    number = np.arange(dashes + 1)
    far = np.abs(number[:, None] - number) > 2
    crosses = np.asarray(((gaps < _APART * pitch) & far).any((1, 2)))
    kept: Points = walks[(room > 0).all(1) & ~crosses]
    return kept


def _shorter_limits(dashes: int, contour: int) -> tuple[float, float]:
    """As _LIKE, of contours with fewer dashes: the fewer, the straighter they are, so the more
    alike are the distances of their ends, and the more a difference would tell.
    """
    limit = min(_LIKE_SHORTER, _LIKE_BY_LENGTH * _PITCH[contour] * dashes**3)
    return -limit, limit


def _like_ends(
    ends: Points, limits: tuple[float, float]
) -> tuple[NDArray[np.intp], NDArray[np.intp], NDArray[np.intp]]:
    """Pairs of contours whose ends are as far from each other's as from their own: the numbers of
    the two, and 1 where the second is to be turned round. ends: [contours, 2, 2]
    """
    firsts, seconds = np.triu_indices(len(ends), 1)
    own = _length(ends[:, 0] - ends[:, 1])
    nearer = np.minimum(own[firsts], own[seconds])[:, None]
    farther = np.maximum(own[firsts], own[seconds])[:, None]
    turned = np.stack([ends[seconds], ends[seconds, ::-1]], 1)  # [pairs, turn, ends, 2]
    across = np.moveaxis(_length(turned - ends[firsts, None]), -1, 0)
    nearer_across, farther_across = np.minimum(*across), np.maximum(*across)
    like = (nearer >= _LEAST_DOTS) & (nearer_across >= _LEAST_DOTS)
    for more in (nearer_across - nearer, farther_across - farther):
        like &= (more > limits[0]) & (more < limits[1])
    pairs, turns = np.nonzero(like)
    return firsts[pairs], seconds[pairs], turns


def _length(vectors: Points) -> NDArray[np.float64]:
    return np.asarray(np.hypot(vectors[..., 0], vectors[..., 1]))


def _distractors(
    random: np.random.Generator, long: tuple[Points, Points], contour: int, count: int
) -> tuple[Points, ...] | None:
    """Short contours that keep apart from all others; None: so many did not fit."""
    kept: list[Points] = []
    clearance = _clearance(contour)
    candidates = _walks(random, contour // _SHORT, _PITCH[contour])
    for other in long:
        candidates = candidates[~_near(candidates, other, clearance)]
    while len(kept) < count and len(candidates):
        kept.append(candidates[0])
        candidates = candidates[1:]
        candidates = candidates[~_near(candidates, kept[-1], clearance)]
    return tuple(kept) if len(kept) == count else None


def _clearance(contour: int) -> float:
    """The least distance of two contours, in sides of the image."""
    return max(_LEAST_APART, _APART * _PITCH[contour])


def _near(walks: Points, other: Points, clearance: float) -> NDArray[np.bool_]:
    """Which of the walks come closer to another contour."""
    return np.asarray((_distances(walks, other[None]) < clearance).any((1, 2)))


def _distances(walks: Points, others: Points) -> NDArray[np.float64]:
    """From each point of a walk to each of another: [walks, points, others' points]."""
    across = walks[:, :, None, 0] - others[:, None, :, 0]
    down = walks[:, :, None, 1] - others[:, None, :, 1]
    return np.sqrt(across * across + down * down)


def _rasterized(scene: Scene, label: int, size: int, contour: int) -> NDArray[np.uint8]:
    """The scene in pixels of grey, with smooth edges."""
    contours = (*scene.long, *scene.short)
    begins, ends = (
        np.concatenate([points[part] for points in contours])
        for part in (slice(None, -1), slice(1, None))
    )
    middles, halves = (begins + ends) / 2, (ends - begins) / 2
    radius = max(_HALF_WIDTH * _PITCH[contour], _LEAST_HALF_WIDTH / size)
    core = max(0.0, _DASH - 2 * radius / _PITCH[contour])  # round ends are beside it
    lines = _brightness(middles, halves * core, radius, size)
    dots = _brightness(scene.dots[label], np.zeros((2, 2)), _DOT, size)
    pixels_of_grey: NDArray[np.uint8] = np.rint(np.maximum(lines, dots) * 255).astype(np.uint8)
    return pixels_of_grey


def _brightness(middles: Points, halves: Points, radius: float, size: int) -> NDArray[np.float64]:
    """How much of each pixel lies within `radius` of a line; the most of all lines.

    middles: of the lines. halves: from a middle to an end
    """
    lengths = halves[:, 0] ** 2 + halves[:, 1] ** 2
    reach = radius + float(np.sqrt(lengths.max())) + 1 / size
    side = math.ceil(2 * reach * size) + 1  # pixels, around each line, that it may cover
    places = np.floor((middles - reach) * size).astype(np.int64)[:, :, None] + np.arange(side)
    towards = (places + 0.5) / size - middles[:, :, None]
    across, down = towards[:, 0, None, :], towards[:, 1, :, None]
    half_across, half_down = halves[:, 0, None, None], halves[:, 1, None, None]
    along = across * half_across + down * half_down
    along = np.clip(along / np.maximum(lengths, 1e-12)[:, None, None], -1, 1)
    distances = np.hypot(across - along * half_across, down - along * half_down)
    covered = np.clip((radius - distances) * size + 0.5, 0, 1)
    beyond = np.zeros((size + 2 * side, size + 2 * side))
    rows, columns = places[:, 1, :, None] + side, places[:, 0, None, :] + side
    np.maximum.at(beyond, (rows, columns), covered)
    return beyond[side : side + size, side : side + size]
