"""Rounds of microbatches: which device idles in a round, and which computes a dummy.

A dummy is a copy of a real row, whose loss is scaled by 0.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from samecurve.core.determinism.data_order import Ids
from samecurve.core.determinism.microbatches import Assignment
from samecurve.core.determinism.sample_keys import RowKeys
from samecurve.core.planning.plan import Plan
from samecurve.core.protocols import Arrays, MicroBatch, Round

ReadRows = Callable[[], Arrays]  # waits for rows that were asked for
KeysOf = Callable[[Ids], RowKeys]
Read = tuple[int, int, ReadRows]  # begin, end, and the rows of positions [begin, end) of a step
Ask = Callable[[int, Ids, int], ReadRows]  # (source, ids, epoch)
TRAIN_SOURCE, HELD_OUT_SOURCE, TEST_SOURCE = 0, 1, 2


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
