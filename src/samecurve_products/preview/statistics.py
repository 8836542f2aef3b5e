"""Lengths, classes and ranges of a data set, from all samples or from some that are spread over it.

At most 2,048 samples are read, and no longer than ten seconds: a data set may be of any size.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from samecurve.tasks.adapter.rows import Rows
from samecurve_products.preview.about import AboutData
from samecurve_products.preview.parts import CLASS
from samecurve_products.preview.text_parts import TokenColumns, real_length

MOST_READ, MOST_SECONDS = 2048, 10.0
_TOGETHER, _MOST_BYTES = 64, 1 << 26  # samples, and bytes about, that are read at once
_MOST_CLASSES = 200  # different numbers, beyond which they are no classes


@dataclass(frozen=True)
class ArrayStatistics:
    """An array of the samples. shape: None where the samples' shapes differ"""

    name: str
    dtype: str
    shape: tuple[int, ...] | None
    low: float | None  # the lowest finite number that was read; None: there is none
    high: float | None
    not_finite: int  # numbers that are not finite


@dataclass(frozen=True)
class Statistics:
    """Statistics over the samples of a data set.

    read: samples that were read, of `samples`. lengths: of `lengths_of`; None: samples have no
    tokens. all_lengths: whether they are those of all. classes: names and counts; all_classes
    likewise
    """

    samples: int
    read: int
    seconds: float
    arrays: Sequence[ArrayStatistics]
    lengths: NDArray[np.int64] | None
    lengths_of: str
    all_lengths: bool
    classes: Sequence[tuple[str, int]]
    all_classes: bool


class _Array:
    """Statistics of one array."""

    def __init__(self, name: str, first: NDArray[Any]) -> None:
        self.name, self.dtype = name, str(first.dtype)
        self.shape: tuple[int, ...] | None = first.shape[1:]
        self.low, self.high, self.not_finite = np.inf, -np.inf, 0

    def add(self, array: NDArray[Any]) -> None:
        if self.shape != array.shape[1:]:
            self.shape = None
        if array.dtype.kind not in "biuf" or not array.size:
            return
        if array.dtype.kind == "f":
            finite = np.isfinite(array)
            self.not_finite += int((~finite).sum())
            array = array[finite]
        if array.size:
            self.low = min(self.low, float(array.min()))
            self.high = max(self.high, float(array.max()))

    def statistics(self) -> ArrayStatistics:
        known = self.low <= self.high
        return ArrayStatistics(
            name=self.name,
            dtype=self.dtype,
            shape=self.shape,
            low=self.low if known else None,
            high=self.high if known else None,
            not_finite=self.not_finite,
        )


def statistics_of(rows: Rows, columns: TokenColumns | None, about: AboutData) -> Statistics:
    """Read samples that are spread over the data, and what the task itself tells of all."""
    arrays: dict[str, _Array] = {}
    lengths: list[int] = []
    numbers: dict[str, list[NDArray[Any]]] = {}
    read, began = 0, time.monotonic()
    for count, batch in _spread(rows):
        read += count
        for name, array in batch.items():
            arrays.setdefault(name, _Array(name, array)).add(array)
            if array.ndim == 1 and array.dtype.kind in "iub":
                numbers.setdefault(name, []).append(array)
        if columns is not None:
            for index in range(count):
                row = {name: batch[name][index] for name in columns.names}
                lengths.append(real_length(row, columns))
        if time.monotonic() - began > MOST_SECONDS:
            break
    counts = _class_counts(numbers, read, about)
    whole, has_all = about.lengths, about.lengths is not None
    if whole is None and rows.lengths is not None:
        whole, has_all = rows.lengths, True
    return Statistics(
        samples=len(rows),
        read=read,
        seconds=time.monotonic() - began,
        arrays=[array.statistics() for array in arrays.values()],
        lengths=np.array(lengths, np.int64) if whole is None and lengths else whole,
        lengths_of=about.lengths_of if about.lengths is not None else "sample",
        all_lengths=has_all or read == len(rows),
        classes=counts,
        all_classes=bool(about.class_counts) or read == len(rows),
    )


def _spread(rows: Rows) -> Iterator[tuple[int, Mapping[str, NDArray[Any]]]]:
    """The samples of a data set, or 2,048 spread over it, several at a time.

    They come in an order in which the first ones are spread over the data too. Where rows are
    padded by microbatch, each is read alone, which shows its own length. Rows of several buckets
    are not read at once.
    """
    count = min(len(rows), MOST_READ)
    ids = np.unique(np.linspace(0, len(rows) - 1, count).astype(np.int64))
    together = 1
    if not rows.by_microbatch:
        size = sum(array.nbytes for array in rows.read(ids[:1], 0).values())
        together = max(1, min(_TOGETHER, _MOST_BYTES // max(1, size)))
    batches = -(-len(ids) // together)
    for first in range(batches):
        chosen = ids[first::batches]
        ends = np.searchsorted(chosen, np.cumsum(rows.bucket_sizes))
        for of_bucket in np.split(chosen, ends):
            if len(of_bucket):
                yield len(of_bucket), rows.read(of_bucket, 0)


def _class_counts(
    numbers: Mapping[str, Sequence[NDArray[Any]]], read: int, about: AboutData
) -> list[tuple[str, int]]:
    """How many samples each class has, by its name; nothing where no array seems to be a class."""
    if about.class_counts:
        return list(zip(about.classes, map(int, about.class_counts), strict=True))
    named = next((name for name in CLASS if name in numbers), None)
    if named is None and len(numbers) == 1 and "window" not in numbers:
        named = next(iter(numbers))
    if named is None:
        return []
    values, counts = np.unique(np.concatenate(list(numbers[named])), return_counts=True)
    if len(values) > _MOST_CLASSES or (len(values) > 1 and len(values) > read // 2):
        return []
    names = dict(enumerate(about.classes))
    shown = [
        (names.get(int(value), str(value)), int(count))
        for value, count in zip(values, counts, strict=True)
    ]
    present = {int(value) for value in values}
    return shown + [(name, 0) for number, name in names.items() if number not in present]
