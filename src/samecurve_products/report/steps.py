"""The numbers of a run's steps in bounded memory, however long the run is.

A point stands for `each` following steps: the first value of a column, and the sum, the number, the
lowest and the highest of its finite values. A run of at most 2048 steps has a point for each step.
When the points are full, neighbours are joined and `each` doubles. Steps that fill no point yet are
kept one by one, so a point is never half made.

Sums over a run count each step, and leave out what a resume makes void: the point that the resume
cuts is read from the journal again.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

Column = NDArray[np.float64]
Table = NDArray[np.float64]  # a row for each step, a column for each name
Points = NDArray[np.float64]  # by point, by kind of value (_FIRST and so on), by name

MEANS = "metrics/"  # prefix of columns of the means that the loss returns beside the loss value
MAX_POINTS = 2048
MAX_COLUMNS = 80
_MAX_SAMPLES = 1e12  # most samples of one step; a larger number is damaged
_READ = (
    *("step", "time", "loss", "grad_norm", "lr", "samples_per_second", "tokens_per_second"),
    *("seconds", "memory_bytes", "mfu", "scale"),
)
# computed for each step, so that sums are not rounded
_DERIVED = ("samples", "tokens", "waited", "wait_percent", "skipped")
OFFSET, STEP, TIME = 0, 1, 2  # the first columns
_FIRST, _SUM, _COUNT, _LOW, _HIGH = range(5)
_NUMBERS = {int, float, bool, type(None)}

# reads the steps again whose lines begin at a byte from the first to the second (None: to the end)
ReadAgain = Callable[[int, int | None], Table]


def number(value: object, otherwise: float = math.nan) -> float:
    """The value as a finite number; `otherwise`, if it is none."""
    try:
        if isinstance(value, int | float) and math.isfinite(value):
            return float(value)
    except OverflowError:  # an integer beyond all floats
        pass
    return otherwise


def _points_of(rows: Table, each: int) -> Points:
    """Points of `each` rows; the number of rows is a multiple of it."""
    grouped = rows.reshape(-1, each, rows.shape[1])
    finite = np.isfinite(grouped)
    counts = finite.sum(axis=1)
    lowest = np.where(finite, grouped, np.inf).min(axis=1)
    highest = np.where(finite, grouped, -np.inf).max(axis=1)
    values = [
        grouped[:, 0],
        np.where(finite, grouped, 0.0).sum(axis=1),
        counts,
        np.where(counts, lowest, np.nan),
        np.where(counts, highest, np.nan),
    ]
    return np.stack(values, axis=1)


def _joined_in_pairs(points: Points) -> Points:
    """Points of twice as many steps. The number of points is even."""
    one, two = points[::2], points[1::2]
    joined = one + two
    joined[:, _FIRST] = one[:, _FIRST]
    joined[:, _LOW] = np.fmin(one[:, _LOW], two[:, _LOW])
    joined[:, _HIGH] = np.fmax(one[:, _HIGH], two[:, _HIGH])
    return joined


class Steps:
    """The steps of a run that no resume made void, as at most MAX_POINTS points."""

    def __init__(self) -> None:
        self.names = ["offset", *_READ, *_DERIVED]
        self.each = 1
        self.generation = 0  # changes when points are joined or made void
        self._closed: Points = np.zeros((0, 5, len(self.names)))
        self._open: Table = np.zeros((0, len(self.names)))  # steps that fill no point yet
        self._points: Points | None = None  # closed and open ones together

    def __len__(self) -> int:
        """The number of steps."""
        return len(self._closed) * self.each + len(self._open)

    @property
    def means(self) -> list[str]:
        """The names of the means that the loss returns beside the loss value."""
        return [name.removeprefix(MEANS) for name in self.names if name.startswith(MEANS)]

    # -- what a chart or a summary asks for: a number for each point

    @property
    def points(self) -> Points:
        """All points; the last one may stand for fewer than `each` steps."""
        if self._points is None:
            rest = [_points_of(self._open, len(self._open))] if len(self._open) else []
            self._points = np.concatenate((self._closed, *rest))
        return self._points

    def first(self, name: str) -> Column:
        return self._values(_FIRST, name)

    def sums(self, name: str) -> Column:
        """Sums of the finite values."""
        return np.nan_to_num(self._values(_SUM, name))

    def counts(self, name: str) -> Column:
        """How many values are finite."""
        return np.nan_to_num(self._values(_COUNT, name))

    def low(self, name: str) -> Column:
        return self._values(_LOW, name)

    def high(self, name: str) -> Column:
        return self._values(_HIGH, name)

    def mean(self, name: str) -> Column:
        """Means of the finite values; nan: a point has none."""
        if self.each == 1:
            return self.first(name)
        with np.errstate(all="ignore"):
            return self._values(_SUM, name) / self._values(_COUNT, name)

    def total(self, name: str) -> float:
        """The sum over all steps."""
        return float(self.sums(name).sum())

    def last(self, name: str) -> float:
        """The last step's value, or the mean of the last point. nan: there is none."""
        if len(self._open) and name in self.names:
            return float(self._open[-1, self.names.index(name)])
        column = self.high(name) if name == "step" else self.mean(name)
        return float(column[-1]) if len(column) else math.nan

    def has_values(self, name: str) -> bool:
        return bool(self.counts(name).any())

    def _values(self, kind: int, name: str) -> Column:
        if name not in self.names:
            return np.full(len(self.points), np.nan)
        return self.points[:, kind, self.names.index(name)]

    # -- adding and removing

    def rows_of(self, events: Sequence[Mapping[str, object]], offsets: Sequence[int]) -> Table:
        """The numbers of `step` lines, a row for each. New means get columns.

        offsets: the bytes of the journal at which the lines begin
        """
        read = {name: _numbers([event.get(name) for event in events]) for name in _READ}
        read["offset"] = np.array(offsets, np.float64)
        wait, seconds = _numbers([event.get("wait_seconds") for event in events]), read["seconds"]
        skipped = _numbers([event.get("skipped") for event in events])
        with np.errstate(all="ignore"):  # a damaged journal may hold any number
            for unit in ("samples", "tokens"):
                count = np.rint(np.nan_to_num(read[f"{unit}_per_second"] * seconds))
                read[unit] = np.clip(count, 0, _MAX_SAMPLES)
            read["waited"] = np.minimum(wait, seconds)
            read["wait_percent"] = np.minimum(100.0, 100.0 * wait / seconds)
        read["skipped"] = (skipped > 0).astype(float)
        metrics = [event.get("metrics") for event in events]
        if any(metrics):
            read |= self._means_of([each if isinstance(each, dict) else {} for each in metrics])
        rows = np.full((len(events), len(self.names)), np.nan)
        for index, name in enumerate(self.names):
            if name in read:
                rows[:, index] = read[name]
        return rows

    def _means_of(self, metrics: Sequence[Mapping[str, object]]) -> dict[str, Column]:
        names = dict.fromkeys(MEANS + name for name in chain.from_iterable(metrics))
        new = [name for name in names if name not in self.names]
        self._add_columns(new[: max(0, MAX_COLUMNS - len(self.names))])
        return {
            name: _numbers([each.get(name.removeprefix(MEANS)) for each in metrics])
            for name in names
            if name in self.names
        }

    def _add_columns(self, names: Sequence[str]) -> None:
        """Add columns without a value in earlier steps."""
        if not names:
            return
        self.names += names
        self._points = None
        none = np.full((len(self._closed), 5, len(names)), np.nan)
        none[:, (_SUM, _COUNT)] = 0
        self._closed = np.concatenate((self._closed, none), axis=2)
        self._open = np.hstack((self._open, np.full((len(self._open), len(names)), np.nan)))

    @np.errstate(all="ignore")
    def add(self, rows: Table) -> None:
        rows = np.concatenate((self._open, rows))
        self._points = None
        while True:
            room = (MAX_POINTS - len(self._closed)) * self.each
            count = min(room, len(rows)) // self.each * self.each
            if count:
                added = _points_of(rows[:count], self.each)
                self._closed = np.concatenate((self._closed, added))
            rows = rows[count:]
            if len(self._closed) < MAX_POINTS or not len(rows):
                break
            self._closed = _joined_in_pairs(self._closed)
            self.each *= 2
            self.generation += 1
        self._open = rows.copy()

    def truncate(self, step: int, read_again: ReadAgain) -> tuple[int, float]:
        """Remove the steps beyond `step`. Returns their number, and the sum of their seconds.

        read_again: reads the steps of the point that is cut
        """
        count, seconds = len(self), self.total("seconds")
        closed = self._closed
        low, high = closed[:, _LOW, STEP], closed[:, _HIGH, STEP]
        keep = high <= step
        rows = self._open[self._open[:, STEP] <= step]
        if keep.all() and len(rows) == len(self._open):
            return 0, 0.0
        cut = np.flatnonzero(~keep & (low <= step))
        if len(cut):
            begins = [*closed[cut[0] :, _FIRST, OFFSET], *self._open[:1, OFFSET]]
            end = int(begins[1]) if len(begins) > 1 else None
            again = read_again(int(begins[0]), end)
            kept = again[again[:, STEP] <= step]
            rows = np.concatenate((kept[: self.each - 1], rows))
        self._closed, self._open = closed[keep], self._open[:0]
        self.generation += 1
        self.add(rows)
        return count - len(self), max(0.0, seconds - self.total("seconds"))

    # -- saving

    def to_arrays(self) -> dict[str, NDArray[Any]]:
        """The whole state as arrays, for np.savez."""
        return {
            "names": np.array([name.encode() for name in self.names], np.bytes_),
            "about": np.array([self.each, self.generation], np.int64),
            "closed": self._closed,
            "open": self._open,
        }

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, NDArray[Any]]) -> "Steps":
        """The inverse of to_arrays(). KeyError, ValueError: the arrays are no such state."""
        steps = cls()
        steps.names = [name.decode() for name in arrays["names"].tolist()]
        steps.each, steps.generation = (int(value) for value in arrays["about"])
        steps._closed, steps._open = arrays["closed"], arrays["open"]
        if not steps._closed.shape[2] == steps._open.shape[1] == len(steps.names):
            raise ValueError("the tables have other columns than the names")
        return steps


def _numbers(values: Sequence[object]) -> Column:
    """The values as numbers; nan: a value is no finite number."""
    types = set(map(type, values))
    if types == {type(None)}:
        return np.full(len(values), np.nan)
    if types <= _NUMBERS:
        with suppress(OverflowError):  # an integer beyond all floats
            column = np.array(values, np.float64)
            column[~np.isfinite(column)] = np.nan
            return column
    return np.array([number(value) for value in values], np.float64)
