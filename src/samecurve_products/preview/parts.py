"""The arrays of a sample as what a reader can look at: text, curves, pictures, numbers.

The rules look at type, shape and name alone, so they serve a user's own task as they serve ours:
- whole numbers in a row are token ids: text, where a tokenizer is known (text_parts.py);
- uint8 or floats of [H, W], [H, W, 1|3|4] or [1|3|4, H, W] are a picture; floats of [H, W] only
  where H = W;
- other floats of two dimensions are curves, one a channel over the longer axis, and so is a longer
  row of floats;
- one number is a number, or the name of its class;
- of anything else, type, shape and range are told.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from samecurve_products.preview.about import AboutData
from samecurve_products.preview.text_parts import Row, Text, TokenColumns, texts_of

CLASS = ("label", "labels", "target", "targets", "class", "y")  # names of a class's number
MOST_CURVES = 12  # of an array
_MOST_POINTS = 1024  # of a curve
_MOST_FRAMES = 4  # of a clip
_LEAST_CURVE, _LEAST_PICTURE = 16, 8  # numbers of a curve; pixels of a side
_COLOURS = (1, 3, 4)
_SHOWN_NUMBERS = 8  # of a short row


@dataclass(frozen=True)
class Curves:
    """Channels of a window over time. every: of how many time steps one is shown"""

    name: str
    labels: Sequence[str]
    values: Sequence[NDArray[Any]]
    every: int
    more: int  # channels that are not shown


@dataclass(frozen=True)
class Picture:
    """A picture, uint8 [H, W] or [H, W, 3]. form: type, shape and range of the array"""

    name: str
    pixels: NDArray[np.uint8]
    form: str


@dataclass(frozen=True)
class Value:
    """Something that one cell of a table tells."""

    name: str
    text: str


Part = Text | Curves | Picture | Value


@dataclass(frozen=True)
class Sample:
    """A sample of the data. step: of the run, from 1; None: not known, or of no step"""

    id: int
    step: int | None
    parts: Sequence[Part]

    def of(self, kind: type[Any]) -> list[Any]:
        return [part for part in self.parts if isinstance(part, kind)]


def parts_of(row: Row, columns: TokenColumns | None, about: AboutData) -> list[Part]:
    """The parts of one sample. columns: the arrays that are text; None: none is"""
    parts: list[Part] = []
    texts = set() if columns is None else columns.names
    if columns is not None:
        parts += texts_of(row, columns, about.decode)
    parts += [_part(name, array, about) for name, array in row.items() if name not in texts]
    return parts


def form_of(array: NDArray[Any]) -> str:
    """Type, shape and range of an array, in words."""
    shape = " x ".join(map(str, array.shape)) or "one number"
    return f"{array.dtype} {shape}{_range(array)}"


def _range(array: NDArray[Any]) -> str:
    if not array.size or array.dtype.kind not in "biuf":
        return ""
    if array.dtype.kind == "f" and not np.isfinite(array).all():
        finite = array[np.isfinite(array)]
        inside = f", otherwise {finite.min():.4g} to {finite.max():.4g}" if finite.size else ""
        return f", {array.size - finite.size} not finite{inside}"
    return f", {_short(array.min())} to {_short(array.max())}"


def _short(number: Any) -> str:
    return f"{number:.4g}" if isinstance(number, np.floating) else str(int(number))


def _part(name: str, array: NDArray[Any], about: AboutData) -> Part:
    array = np.asarray(array)
    if not array.ndim:
        return Value(name, _number(name, array, about))
    pixels = _frames(array) if array.ndim == 4 else _pixels(array)
    if pixels is not None:
        return Picture(name, pixels, form_of(array))
    if array.dtype.kind == "f" and array.ndim in {1, 2} and max(array.shape) >= _LEAST_CURVE:
        return _curves(name, array, about.channels)
    if array.ndim == 1 and array.size <= _SHOWN_NUMBERS and array.dtype.kind in "biuf":
        return Value(name, ", ".join(map(_short, array)))
    return Value(name, form_of(array))


def _number(name: str, number: NDArray[Any], about: AboutData) -> str:
    value: int | float | complex = number.item()
    if name in CLASS and isinstance(value, int) and 0 <= value < len(about.classes):
        return about.classes[value]
    return f"{value:.6g}" if number.dtype.kind == "f" else str(value)


def _curves(name: str, array: NDArray[Any], channels: Sequence[str]) -> Curves:
    lines = array[None] if array.ndim == 1 else array
    known = len(channels) == len(lines)
    if not known and lines.shape[0] > lines.shape[1]:
        lines = lines.T  # time steps in rows
    labels = list(channels) if known else [f"channel {number}" for number in range(len(lines))]
    if len(lines) == 1 and not known:
        labels = [name]
    every = -(-lines.shape[1] // _MOST_POINTS)
    return Curves(
        name,
        labels[:MOST_CURVES],
        [line[::every] for line in lines[:MOST_CURVES]],
        every,
        max(0, len(lines) - MOST_CURVES),
    )


def _pixels(array: NDArray[Any]) -> NDArray[np.uint8] | None:
    """The array as pixels; None: it is no picture."""
    is_bytes, is_float = array.dtype == np.uint8, array.dtype.kind == "f"
    if not (is_bytes or is_float) or array.ndim not in {2, 3}:
        return None
    if array.ndim == 2:
        is_picture = is_bytes or array.shape[0] == array.shape[1]
        planes = array[..., None]
    elif array.shape[2] in _COLOURS:
        is_picture, planes = True, array
    else:
        is_picture, planes = array.shape[0] in _COLOURS, np.moveaxis(array, 0, 2)
    if not is_picture or min(planes.shape[:2]) < _LEAST_PICTURE:
        return None
    pixels = _as_bytes(planes)[..., :3]  # without transparency
    return pixels[..., 0] if pixels.shape[2] == 1 else pixels


def _frames(array: NDArray[Any]) -> NDArray[np.uint8] | None:
    """Frames of a clip [frames, ...], side by side; None: they are no pictures."""
    places = np.linspace(0, len(array) - 1, min(len(array), _MOST_FRAMES)).round().astype(int)
    frames = [_pixels(array[place]) for place in places]
    shown = [frame for frame in frames if frame is not None]
    return np.concatenate(shown, axis=1) if frames and len(shown) == len(frames) else None


def _as_bytes(planes: NDArray[Any]) -> NDArray[np.uint8]:
    """Values of 0 to 1, -1 to 1 or 0 to 255 as these stand for grey; others are stretched."""
    if planes.dtype == np.uint8:
        return planes
    wide = np.nan_to_num(planes.astype(np.float64), posinf=0.0, neginf=0.0)
    low, high = float(wide.min()), float(wide.max())
    if low >= 0 and high <= 1:
        wide = wide * 255
    elif low >= -1 and high <= 1:
        wide = (wide + 1) * 127.5
    elif not (low >= 0 and high <= 255):
        wide = (wide - low) * (255 / (high - low))
    return wide.round().astype(np.uint8)
