"""The numbers of a run's steps in bounded memory, however long the run is.

A point stands for `each` following steps: the first value of a column, and the sum, the number, the
lowest and the highest of its finite values. A run of at most 2048 steps has a point for each step.
When the points are full, neighbours are joined and `each` doubles. Steps that fill no point yet are
kept one by one, so a point is never half made.

Sums over a run are exact; so is what a resume makes void: the point that the resume cuts is read
from the journal again.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

Column = NDArray[np.float64]
Table = NDArray[np.float64]  # a row for each step or point, a column for each name
Offsets = NDArray[np.int64]

MEANS = "metrics/"  # prefix of columns of the means that the loss returns beside the loss value
MAX_POINTS = 2048
MAX_COLUMNS = 80
_MAX_SAMPLES = 1e12  # most samples of one step; a larger number is damaged
_READ = (
    "step",
    "time",
    "loss",
    "grad_norm",
    "lr",
    "samples_per_second",
    "tokens_per_second",
    "seconds",
    "memory_bytes",
    "mfu",
    "scale",
)
# computed for each step, so that their sums are exact
_DERIVED = ("samples", "tokens", "waited", "wait_percent", "skipped")
_STEP = 0
_FIRST, _SUM, _COUNT, _LOW, _HIGH = range(5)
_NUMBERS = {int, float, bool, type(None)}

# reads the steps again whose lines begin at a byte from the first to the second (None: to the end)
ReadAgain = Callable[[int, int | None], tuple[Table, Offsets]]


def number(value: object, otherwise: float = math.nan) -> float:
    """The value as a finite number; `otherwise`, if it is none."""
    if not isinstance(value, int | float):
        return otherwise
    try:
        as_float = float(value)
    except OverflowError:
        return otherwise
    if not math.isfinite(as_float):
        return otherwise
    return as_float


@dataclass(frozen=True)
class Points:
    """Points of steps. values: by point, by kind of value, by name of a column."""

    values: NDArray[np.float64]  # first, sum, number of finite ones, lowest, highest
    offsets: Offsets  # byte of the first step's line

    def __len__(self) -> int:
        return len(self.offsets)

    def chosen(self, which: slice | NDArray[np.bool_]) -> "Points":
        return Points(self.values[which], self.offsets[which])

    def followed_by(self, others: "Points") -> "Points":
        return Points(
            np.concatenate((self.values, others.values)),
            np.concatenate((self.offsets, others.offsets)),
        )

    def joined_in_pairs(self) -> "Points":
        """Points of twice as many steps. The number of points is even."""
        one, two = self.values[::2], self.values[1::2]
        values = one + two
        values[:, _FIRST] = one[:, _FIRST]
        values[:, _LOW] = np.fmin(one[:, _LOW], two[:, _LOW])
        values[:, _HIGH] = np.fmax(one[:, _HIGH], two[:, _HIGH])
        return Points(values, self.offsets[::2])


def _points_of(rows: Table, offsets: Offsets, each: int) -> Points:
    """Points of `each` rows; the number of rows is a multiple of it."""
    grouped = rows.reshape(-1, each, rows.shape[1])
    finite = np.isfinite(grouped)
    counts = finite.sum(axis=1)
    values = np.stack(
        [
            grouped[:, 0],
            np.where(finite, grouped, 0.0).sum(axis=1),
            counts,
            np.where(counts, np.where(finite, grouped, np.inf).min(axis=1), np.nan),
            np.where(counts, np.where(finite, grouped, -np.inf).max(axis=1), np.nan),
        ],
        axis=1,
    )
    return Points(values, offsets[::each])


class Steps:
    """The steps of a run that no resume made void, as at most MAX_POINTS points."""

    def __init__(self) -> None:
        self.names = [*_READ, *_DERIVED]
        self.each = 1
        self.generation = 0  # changes when points are joined or made void
        self._closed = _points_of(self._no_rows(), np.zeros(0, np.int64), 1)
        self._open, self._open_offsets = self._no_rows(), np.zeros(0, np.int64)
        self._points: Points | None = None  # closed and open ones together

    def _no_rows(self) -> Table:
        return np.zeros((0, len(self.names)))

    def __len__(self) -> int:
        """The number of steps."""
        return len(self._closed) * self.each + len(self._open)

    @property
    def means(self) -> list[str]:
        """The names of the means that the loss returns beside the loss value."""
        return [name.removeprefix(MEANS) for name in self.names if name.startswith(MEANS)]

    @property
    def last_is_open(self) -> bool:
        """Whether the last point can still grow."""
        return bool(len(self._open))

    # -- what a chart or a summary asks for: a number for each point

    @property
    def points(self) -> Points:
        """All points; the last one may stand for fewer than `each` steps."""
        if self._points is None:
            self._points = self._closed
            if len(self._open):
                last = _points_of(self._open, self._open_offsets, len(self._open))
                self._points = self._closed.followed_by(last)
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
        return self.points.values[:, kind, self.names.index(name)]

    # -- adding and removing

    def rows_of(self, events: Sequence[Mapping[str, object]]) -> Table:
        """The numbers of `step` lines, a row for each. New means get columns."""
        read = {name: _numbers([event.get(name) for event in events]) for name in _READ}
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
        values = np.concatenate((self._closed.values, none), axis=2)
        self._closed = Points(values, self._closed.offsets)
        self._open = np.hstack((self._open, np.full((len(self._open), len(names)), np.nan)))

    @np.errstate(all="ignore")
    def add(self, rows: Table, offsets: Offsets) -> None:
        rows = np.concatenate((self._open, rows))
        offsets = np.concatenate((self._open_offsets, offsets))
        self._points = None
        while True:
            room = (MAX_POINTS - len(self._closed)) * self.each
            count = min(room, len(rows)) // self.each * self.each
            if count:
                added = _points_of(rows[:count], offsets[:count], self.each)
                self._closed = self._closed.followed_by(added)
            rows, offsets = rows[count:], offsets[count:]
            if len(self._closed) < MAX_POINTS or not len(rows):
                break
            self._closed = self._closed.joined_in_pairs()
            self.each *= 2
            self.generation += 1
        self._open, self._open_offsets = rows.copy(), offsets.copy()

    def truncate(self, step: int, read_again: ReadAgain) -> tuple[int, float]:
        """Remove the steps beyond `step`. Returns their number, and the sum of their seconds.

        read_again: reads the steps of the point that is cut
        """
        count, seconds = len(self), self.total("seconds")
        closed = self._closed
        low, high = closed.values[:, _LOW, _STEP], closed.values[:, _HIGH, _STEP]
        keep = high <= step
        keep_open = self._open[:, _STEP] <= step
        if keep.all() and keep_open.all():
            return 0, 0.0
        rows, offsets = self._open[keep_open], self._open_offsets[keep_open]
        cut = np.flatnonzero(~keep & (low <= step))
        if len(cut):
            first = int(cut[0])
            ends = [*closed.offsets[first + 1 :], *self._open_offsets[:1]]
            found, found_offsets = read_again(int(closed.offsets[first]), ends[0] if ends else None)
            counts = found[:, _STEP] <= step
            rows = np.concatenate((found[counts][: self.each - 1], rows))
            offsets = np.concatenate((found_offsets[counts][: self.each - 1], offsets))
        self._closed = closed.chosen(keep)
        self._open, self._open_offsets = self._no_rows(), np.zeros(0, np.int64)
        self.generation += 1
        self.add(rows, offsets)
        return count - len(self), max(0.0, seconds - self.total("seconds"))

    # -- saving

    def to_arrays(self) -> dict[str, NDArray[Any]]:
        """The whole state as arrays, for np.savez."""
        return {
            "names": np.array([name.encode() for name in self.names], np.bytes_),
            "about": np.array([self.each, self.generation], np.int64),
            "closed": self._closed.values,
            "closed_offsets": self._closed.offsets,
            "open": self._open,
            "open_offsets": self._open_offsets,
        }

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, NDArray[Any]]) -> "Steps":
        """The inverse of to_arrays(). KeyError, ValueError: the arrays are no such state."""
        steps = cls()
        steps.names = [name.decode() for name in arrays["names"].tolist()]
        steps.each, steps.generation = (int(value) for value in arrays["about"])
        steps._closed = Points(arrays["closed"], arrays["closed_offsets"])
        steps._open, steps._open_offsets = arrays["open"], arrays["open_offsets"]
        if not steps._closed.values.shape[2] == steps._open.shape[1] == len(steps.names):
            raise ValueError("the tables have other columns than the names")
        return steps


def _numbers(values: Sequence[object]) -> Column:
    """The values as numbers; nan: a value is no finite number."""
    types = set(map(type, values))
    if types == {type(None)}:
        return np.full(len(values), np.nan)
    if types <= _NUMBERS:
        try:
            column = np.array(values, np.float64)
        except OverflowError:  # an integer beyond all floats
            pass
        else:
            column[~np.isfinite(column)] = np.nan
            return column
    return np.array([number(value) for value in values], np.float64)
