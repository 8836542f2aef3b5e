"""Pictures of what the blocks have learnt: their filters, over frequencies and in space.

A picture shows one kind of filter of a block, for a few channels from top to bottom. On the left is
the magnitude over frequencies, the mean of an image in the middle; black is 0. On the right is the
filter in space: blue below 0, red above. No engine is imported here.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from samecurve.seam import Picture
from samecurve_products.pictures.vision.captions import INK, PAPER, SIDE, TEXT, font, with_text
from samecurve_products.pictures.vision.layout import RHO, Grid

SHOWN = 6  # pictures at most
_CHANNELS = 3  # of a picture
_HEAD = 30  # pixels above the filters
_GAP = 8  # pixels between them
_TILE = (SIDE - _GAP) // 2  # pixels a side
_NAME = re.compile(
    r"(?:^|\.)blocks\.(\d+)\.mixer\.(kernel\w*|conv\.filter|(?:delta|gain|readout)\.bias)$"
)
# colours of a magnitude from 0 to its largest, and of a number from below 0 to above
_MAGNITUDE = ((8, 8, 24), (30, 60, 130), (40, 150, 150), (240, 225, 120))
_SIGNED = ((30, 70, 180), (245, 245, 245), (190, 40, 30))

Array = NDArray[Any]
Filter = tuple[Array, Array]  # magnitudes over frequencies [down, across], numbers in space


def is_of_a_filter(name: str) -> bool:
    """Whether a parameter is among those that filter_pictures() shows."""
    return _NAME.search(name) is not None


def filter_pictures(parameters: Mapping[str, Array], grid: Grid) -> list[Picture]:
    """Pictures of the filters of blocks that are spread over the model; none if it has no filter.

    parameters: by name, those of is_of_a_filter() at least
    """
    by_block: dict[int, dict[str, Array]] = {}
    for name, values in parameters.items():
        match = _NAME.search(name)
        if match:
            wide = np.asarray(values, np.float64)
            by_block.setdefault(int(match[1]), {})[match[2]] = wide
    by_kind: dict[str, list[tuple[str, list[Filter]]]] = {}
    for block in sorted(by_block):
        for kind, filters in _kinds(by_block[block], grid):
            by_kind.setdefault(kind, []).append((f"block {block}, {kind}", filters))
    titled = [each for of_kind in by_kind.values() for each in of_kind]
    places = np.unique(np.linspace(0, len(titled) - 1, min(len(titled), SHOWN)).astype(np.int64))
    return [_picture(*titled[place]) for place in places.tolist()]


def _kinds(values: Mapping[str, Array], grid: Grid) -> list[tuple[str, list[Filter]]]:
    """The kinds of filters of a block, each with a few channels."""
    kinds = [
        (name.replace("_", " "), _of_channels(kernels, grid, _bounded))
        for name, kernels in sorted(values.items())
        if name.startswith("kernel")
    ]
    if "delta.bias" in values:
        kinds.append(("gates", [_gates(values, grid)]))
    if not values.keys() & {"kernel"} and "conv.filter" in values:
        kinds.append(("3 x 3", _of_channels(values["conv.filter"], grid, lambda plane: plane)))
    return kinds


def _of_channels(kernels: Array, grid: Grid, change: Callable[[Array], Array]) -> list[Filter]:
    """Filters of channels that are spread over all. kernels: [channels, down, across]"""
    channels = np.linspace(0, len(kernels) - 1, min(len(kernels), _CHANNELS)).astype(np.int64)
    size = (grid.height, grid.width)
    filters = []
    for kernel in kernels[np.unique(channels)]:
        frequencies: Array = np.abs(change(np.fft.fft2(kernel, size)))
        filters.append((np.fft.fftshift(frequencies), kernel))
    return filters


def _bounded(frequencies: Array) -> Array:
    bounded: Array = RHO * frequencies / (1 + np.abs(frequencies))
    return bounded


def _gates(values: Mapping[str, Array], grid: Grid) -> Filter:
    """What the gates of `gated` multiply a frequency with in one step, where the context is 0."""
    delta, gain, readout = (
        _both_halves(values[f"{name}.bias"], grid) for name in ("delta", "gain", "readout")
    )
    factors = np.logaddexp(delta, 0) * gain * readout
    in_space = np.fft.fftshift(np.fft.ifft2(factors).real)
    return np.fft.fftshift(np.abs(factors)), in_space


def _both_halves(gates: Array, grid: Grid) -> Array:
    """Gates of all frequencies [down, across] from those that rfft2 holds, even ones."""
    half = gates.reshape(grid.height, grid.width // 2 + 1)
    down = -np.arange(grid.height) % grid.height
    whole = np.zeros((grid.height, grid.width))
    whole[:, : half.shape[1]] = half
    mirrored = whole[down][:, -np.arange(grid.width) % grid.width]
    columns = np.arange(grid.width)
    alone = columns > grid.width // 2
    both = (columns == 0) | (2 * columns == grid.width)
    return np.where(alone, mirrored, np.where(both, (whole + mirrored) / 2, whole))


def _picture(title: str, filters: Sequence[Filter]) -> Picture:
    from PIL import Image, ImageDraw

    height = _HEAD + len(filters) * (_TILE + _GAP)
    page = Image.new("RGB", (SIDE, height), PAPER)
    pen = ImageDraw.Draw(page)
    for number, words in enumerate(("frequency", "space")):
        left = number * (_TILE + _GAP)
        pen.text((left + 2, 0), words, fill=INK, font=font(TEXT - 2))
    for number, (magnitudes, values) in enumerate(filters):
        top = _HEAD + number * (_TILE + _GAP)
        page.paste(_tile(magnitudes, 0.0, _MAGNITUDE), (0, top))
        page.paste(_tile(values, -float(np.abs(values).max()), _SIGNED), (_TILE + _GAP, top))
    return with_text(np.asarray(page), [title])


def _tile(values: Array, low: float, colors: Sequence[tuple[int, int, int]]) -> Any:
    """Numbers as a square of colours, from `low` to the largest magnitude."""
    from PIL import Image

    high = float(np.abs(values).max()) or 1.0
    share = (values - low) / (high - low)
    places = np.linspace(0, 1, len(colors))
    planes = [np.interp(share, places, plane) for plane in np.array(colors, np.float64).T]
    image = Image.fromarray(np.stack(planes, -1).round().astype(np.uint8))
    return image.resize((_TILE, _TILE), Image.Resampling.NEAREST)
