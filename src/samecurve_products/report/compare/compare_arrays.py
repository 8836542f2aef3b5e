"""The arrays of two checkpoints, compared piece by piece.

A checkpoint knows no strategy: whole arrays are put together from what the ranks wrote, so those of
fsdp are compared with those of ddp or of one device, and jax's with torch's.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from samecurve.checkpoint.format import Arrays
from samecurve.seam import CorruptCheckpointError, UserError, verify_checkpoint

_PIECE = 32 << 20  # bytes of an array that are held at once


@dataclass(frozen=True)
class ArrayDifference:
    """How an array of two checkpoints differs.

    distance: the norm of the difference, relative to the larger norm of the two; None: the arrays
        have no numbers to compare
    form: what else differs, in words
    """

    name: str
    distance: float | None
    form: str = ""

    def __str__(self) -> str:
        return f"{self.name} ({self.form or f'by {self.distance:.1e}'})"


def compare_saved_arrays(first: Path, second: Path) -> tuple[list[ArrayDifference], int]:
    """The arrays of two checkpoints that differ in a bit, and how many there are.

    The model's come first; layers are in the order of their numbers.

    UserError: a file is damaged or gone.
    """
    one, other = _Saved(first), _Saved(second)
    names = sorted({*one.arrays, *other.arrays}, key=_order)
    compared = (_difference(name, one, other) for name in names)
    return [difference for difference in compared if difference], len(names)


class _Saved:
    """An open checkpoint. UserError: its files are damaged, or a live run has removed them."""

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            self.arrays = Arrays(path, verify_checkpoint(path))
            self.arrays.hold()
        except (OSError, CorruptCheckpointError) as error:
            raise self._unreadable(error) from None

    def part(self, name: str, offsets: tuple[int, ...], shape: tuple[int, ...]) -> NDArray[Any]:
        try:
            return self.arrays.part(name, offsets, shape)
        except (OSError, CorruptCheckpointError) as error:
            raise self._unreadable(error) from None

    def _unreadable(self, error: Exception) -> UserError:
        return UserError(
            f"{self._path.name} can't be read: {error}",
            "compare runs with complete checkpoints; a live run removes old ones (train.keep)",
            str(self._path),
        )


def _order(name: str) -> tuple[bool, list[tuple[int, str]]]:
    """The model's arrays first; layers.2 before layers.10."""
    parts = re.split(r"(\d+)", name)
    return not name.startswith("model/"), [
        (int(part), "") if part.isdigit() else (-1, part) for part in parts
    ]


def _difference(name: str, first: _Saved, second: _Saved) -> ArrayDifference | None:
    for saved, word in ((first, "second"), (second, "first")):
        if name not in saved.arrays:
            return ArrayDifference(name, None, f"in the {word} run only")
    both = first.arrays, second.arrays
    forms = [(arrays.dtype(name), list(arrays.shape(name))) for arrays in both]
    if forms[0] != forms[1]:
        one, other = (f"{dtype} {shape}" for dtype, shape in forms)
        return ArrayDifference(name, None, f"{one} against {other}")
    squares, differs = np.zeros(3), False  # of the difference, of the first, of the second
    for offsets, shape in _pieces(first.arrays.shape(name)):
        values, others = (saved.part(name, offsets, shape) for saved in (first, second))
        differs |= values.tobytes() != others.tobytes()
        squares += _squares(values, others)
    if not differs:
        return None
    off, *norms = np.sqrt(squares).tolist()
    return ArrayDifference(name, off / max(norms) if max(norms) else 0.0)


def _pieces(shape: tuple[int, ...]) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """The offsets and shapes of the parts of an array, by its first dimension."""
    if not shape:
        yield (), ()
        return
    row = 8 * int(np.prod(shape[1:], dtype=np.int64))
    rows = max(1, _PIECE // max(1, row))
    for begin in range(0, shape[0], rows):
        size = min(rows, shape[0] - begin)
        yield (begin, *(0 for _ in shape[1:])), (size, *shape[1:])


def _squares(first: NDArray[Any], second: NDArray[Any]) -> NDArray[np.float64]:
    """Sums of squares, in float64; what is not finite on both sides counts as equal."""
    one, other = first.astype(np.float64), second.astype(np.float64)
    with np.errstate(invalid="ignore", over="ignore"):
        same = (one == other) | (np.isnan(one) & np.isnan(other))
        off = np.where(same, 0.0, one - other)
        kept = [np.where(np.isfinite(values), values, 0.0) for values in (one, other)]
        return np.array([np.square(values).sum() for values in (off, *kept)])
