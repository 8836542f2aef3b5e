"""Sources of samples, and the rounds of microbatches in which devices take them.

Sources: windows of a token file, for the next token; parts of another source; and which of a task's
sources an evaluation reads. Rounds: which device idles in a round, and which computes a dummy, a
copy of a real row whose loss is scaled by 0.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from samecurve.core.determinism.data_order import Ids
from samecurve.core.determinism.microbatches import Assignment
from samecurve.core.determinism.sample_keys import RowKeys
from samecurve.core.planning.plan import Plan
from samecurve.core.protocols import Arrays, Held, MicroBatch, Round, RowReader, Source, Task

_SORTED = 1 << 20  # numbers at most of an array whose most frequent number is looked for
IGNORED = -100  # the label of a place that has no next token
ReadRows = Callable[[], Arrays]  # waits for rows that were asked for
KeysOf = Callable[[Ids], RowKeys]
Read = tuple[int, int, ReadRows]  # begin, end, and the rows of positions [begin, end) of a step
Ask = Callable[[int, Ids, int], ReadRows]  # (source, ids, epoch)
TRAIN_SOURCE, HELD_OUT_SOURCE, TEST_SOURCE = 0, 1, 2


class TokenWindows:
    """Samples of `length` tokens; labels are the tokens shifted by one.

    Sample i begins at token first + i*length of the file. The last window may be short: its rest
    has the label IGNORED. So each token but the first is predicted once an epoch.
    Rows: tokens int64 [length], labels int64 [length].
    """

    def __init__(self, path: Path, dtype: str, first: int, last: int, length: int) -> None:
        self._tokens: NDArray[Any] = np.memmap(path, dtype=dtype, mode="r")[first:last]
        self._length = length
        self._steps = np.arange(length + 1)

    def __len__(self) -> int:
        return window_count(len(self._tokens), self._length)

    def __getitem__(self, ids: Ids) -> dict[str, NDArray[np.int64]]:
        at = np.asarray(ids)[:, None] * self._length + self._steps
        end = len(self._tokens)
        if at.size and at[:, -1].max() < end:
            rows = self._tokens[at].astype(np.int64)
            return {"tokens": rows[:, :-1], "labels": rows[:, 1:]}
        rows = self._tokens[np.minimum(at, end - 1)].astype(np.int64)
        return {"tokens": rows[:, :-1], "labels": np.where(at[:, 1:] < end, rows[:, 1:], IGNORED)}


def window_count(tokens: int, length: int) -> int:
    """The number of windows of `length` predictions in this many tokens; the last may be short."""
    return max(0, -(-(tokens - 1) // length))


def spread_out(source: Source, count: int | None) -> Source | None:
    """The held-out samples that an evaluation reads; None: there are none.

    count: how many at most; None: all
    """
    if not len(source) or count == 0:
        return None
    return Spread(source, min(len(source), count or len(source)))


class Spread:
    """`count` samples spread evenly over a source."""

    def __init__(self, source: Source, count: int) -> None:
        self._source, self._count = source, count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, ids: Ids) -> Mapping[str, Any]:
        return self._source[np.asarray(ids) * len(self._source) // self._count]


def unlike_rows(rows: Mapping[str, NDArray[Any]], count: int, most: int) -> list[int]:
    """Choose at most `most` of `count` rows for the split check; their numbers, ascending.

    The emptiest rows come first, as the loss of a sample with nothing to count often differs; up to
    half of the places. Then rows that have a whole number (a class, a domain) that no earlier row
    has: a loss may weigh a rare class differently, which shows only if one of its samples is tried.
    """
    columns = [
        array.tolist() for array in rows.values() if array.ndim == 1 and array.dtype.kind in "iub"
    ]
    seen: list[set[int]] = [set() for _ in columns]
    chosen: list[int] = list(dict.fromkeys(_emptiest_rows(rows, count)))[: most // 2]
    for row in chosen:
        for column, values in zip(columns, seen, strict=True):
            values.add(column[row])
    for row in range(count):
        is_new = [column[row] not in values for column, values in zip(columns, seen, strict=True)]
        if any(is_new) and row not in chosen and len(chosen) < most:
            chosen.append(row)
            for column, values in zip(columns, seen, strict=True):
                values.add(column[row])
    others = (row for row in range(count) if row not in set(chosen))
    chosen += [row for row, _ in zip(others, range(most - len(chosen)), strict=False)]
    return sorted(chosen)


def _emptiest_rows(rows: Mapping[str, NDArray[Any]], count: int) -> Iterator[int]:
    """The rows with the fewest whole numbers that are not the array's most frequent one (padding,
    the class "no object"), or not negative (labels of -100); then those with the most zeros.
    """
    whole = [a for a in rows.values() if a.dtype.kind in "iub" and a.ndim > 1 and a.size]
    ways = [a != _most_frequent(a) for a in whole if a.size <= _SORTED]
    ways += [a >= 0 for a in whole if a.dtype.kind == "i"]
    ways += [a != 0 for a in rows.values() if a.dtype.kind == "f" and a.size]
    for is_filled in ways:
        filled = is_filled.reshape(count, -1).sum(1)
        if filled.min() < filled.max():
            yield int(filled.argmin())


def _most_frequent(array: NDArray[Any]) -> Any:
    ordered = np.sort(array, axis=None)  # np.unique would import numpy's masked arrays
    begins = np.flatnonzero(np.concatenate([[True], ordered[1:] != ordered[:-1]]))
    return ordered[begins[np.diff(np.append(begins, len(ordered))).argmax()]]


def held_out_data(task: Task, evaluate: str | None) -> dict[Held, RowReader | None]:
    """The data of evaluations.

    evaluate: what a start that only evaluates reads, "held-out", "train" or "test"; None: it trains
    """
    test = task.test_data()
    evaluation = task.eval_data()
    if evaluate == "train":
        evaluation = task.train_data()
    if evaluate == "test":
        evaluation = test
    return {"eval": evaluation, "test": test}


class DeviceShare(NamedTuple):
    """A device's share of a step, and the reads that bring its rows."""

    assignment: Assignment
    reads: Iterable[Read]  # each brings one microbatch or several


class Rounds:
    """The rounds of a step, or of an evaluation, for some devices of a plan."""

    def __init__(self, plan: Plan, ask: Ask) -> None:
        self._plan, self._ask = plan, ask

    def of(self, source: int, shares: list[DeviceShare], ids: Ids, keys: KeysOf) -> Iterator[Round]:
        """The rounds of these shares.

        A round in which no device of this process has a microbatch is left out, unless the strategy
        needs every rank in every round.
        """
        assignments = [share.assignment for share in shares]
        microbatches = [self._microbatches(share, ids, keys) for share in shares]
        count = len(assignments[0].rounds)
        idle = 0
        if not self._plan.layout.every_rank_every_round:
            idle = count - max(len(assignment.spans) for assignment in assignments)
        for index in range(idle, count):
            by_device = [
                next(of_device) if assignment.rounds[index] else None
                for of_device, assignment in zip(microbatches, assignments, strict=True)
            ]
            yield self._with_dummies(by_device, source, ids, keys)

    def _with_dummies(
        self, by_device: list[MicroBatch | None], source: int, ids: Ids, keys: KeysOf
    ) -> Round:
        """Add a dummy for each device that must take part without a microbatch.

        If the strategy needs every rank in every round these are all devices; else it is the first
        device of a process that has no microbatch in the round.
        """
        each = self._plan.layout.every_rank_every_round
        if all(by_device) or (any(by_device) and not each):
            return tuple(by_device)
        row_keys = keys(ids[:1])
        epoch = row_keys.epoch if source == TRAIN_SOURCE else 0
        dummy = MicroBatch(self._ask(source, ids[:1], epoch)(), real=False, keys=row_keys)
        return tuple(
            microbatch or (dummy if each or not device else None)
            for device, microbatch in enumerate(by_device)
        )

    def _microbatches(self, share: DeviceShare, ids: Ids, keys: KeysOf) -> Iterator[MicroBatch]:
        """The microbatches of a device, as views of the rows read."""
        reads = iter(share.reads)
        first, last = 0, 0
        rows: Arrays = {}
        for begin, end in share.assignment.spans:
            if begin >= last:
                first, last, read_rows = next(reads)
                rows = read_rows()
            yield MicroBatch(
                cut_rows(rows, begin - first, end - first),
                keys=keys(ids[begin:end]),
                number=begin // self._plan.batch.micro_batch_size,
            )


def joined(spans: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Intervals of positions, neighbouring ones made one."""
    intervals: list[tuple[int, int]] = []
    for begin, end in spans:
        first = intervals.pop()[0] if intervals and intervals[-1][1] == begin else begin
        intervals.append((first, end))
    return intervals


def cut_rows(rows: Arrays, first: int, last: int) -> Arrays:
    return {name: array[first:last] for name, array in rows.items()}
