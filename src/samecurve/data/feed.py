"""The batches of one process, in the run's order, prepared ahead by a background thread.

The thread computes ids for many steps at once, and reads rows itself or asks workers for the rows
of the next steps. With prefetch 0 the calling thread does the same. The batches do not depend on
who reads them, and a feed can be opened at any step.

Rows are read `prefetch` steps ahead of the step that trains, one step at a time. If a read takes
microseconds and brings less than a megabyte, rows of several steps are read together: a thread
that wakes at each step takes the interpreter's lock from the thread that computes (the step of a
tiny model took 1.4 times as long).
"""

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import groupby, islice, takewhile
from typing import TYPE_CHECKING, Generic

import numpy as np
from numpy.typing import NDArray

from samecurve.core.determinism.data_order import Ids, by_length
from samecurve.core.determinism.microbatches import Assignment, count_microbatches
from samecurve.core.determinism.sample_keys import HELD_OUT, RowKeys
from samecurve.core.planning.plan import Plan
from samecurve.core.protocols import (
    Arrays,
    Batch,
    Held,
    MicroBatch,
    Round,
    RowReader,
    Staged,
    TrialRows,
)
from samecurve.data import (
    HELD_OUT_SOURCE,
    TEST_SOURCE,
    TRAIN_SOURCE,
    DeviceShare,
    Read,
    ReadRows,
    Rounds,
    cut_rows,
    joined,
    unlike_rows,
)

if TYPE_CHECKING:
    from samecurve.data.workers import Workers

_IDS_AT_ONCE = 65_536
_TOGETHER = 16  # most steps whose rows are read at once
_QUICK, _SMALL = 1e-3, 1 << 20  # most seconds and bytes of a read of several steps
_LOOKED_AT = 128  # samples among which trial_rows() chooses
_TRIED = 16  # samples at most: enough to tell sizes, orders and weights apart


def samples_tried(micro_batch_size: int) -> int:
    """Count of samples that show what a loss does: at most a microbatch, but at least two."""
    return min(_TRIED, max(2, micro_batch_size))


class Feed(Generic[Staged]):
    """The steps from `start` to the plan's end, for some of the plan's devices.

    devices: numbers of this process's devices in the plan.
    held_out: the evaluation and the test data; None: neither exists.
    stage: (rounds of host arrays, number of rounds in a whole step) -> what the engine takes
        (pinned, or on the device).
    prefetch: groups of steps that a thread prepares ahead; a group is one step, or several if reads
        are quick and small. 0: the caller's thread reads.
    workers: processes that read the sources; None: the feed's thread reads.
    """

    def __init__(
        self,
        plan: Plan,
        devices: Sequence[int],
        train: RowReader,
        held_out: Mapping[Held, RowReader | None] | None,
        stage: Callable[[Sequence[Round], int], Staged],
        *,
        start: int = 0,
        prefetch: int = 2,
        workers: "Workers | None" = None,
    ) -> None:
        self._plan, self._devices, self._stage = plan, devices, stage
        held = held_out or {}
        self._train = train
        self._sources = (train, held.get("eval"), held.get("test"))
        self._workers = workers
        self._start, self._prefetch = start, prefetch
        self._rounds = Rounds(plan, self._ask)
        self._order = plan.order
        self._assignments: dict[int, list[Assignment]] = {}  # by the number of a step's samples
        self._together = 1  # steps read at once: more while reading is quick
        # True: the thread may read one more group; False: the thread must end
        self._permits: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def __iter__(self) -> Iterator[tuple[int, Batch[Staged]]]:
        groups = self._groups_ahead() if self._prefetch else self._groups()
        while True:
            began = time.perf_counter()
            group = next(groups, None)
            if group is None:
                return
            group[0].wait_seconds = time.perf_counter() - began
            for batch in group:
                yield batch.step, batch

    def evaluation(self, which: Held = "eval") -> Iterator[Staged]:
        """Held-out data, staged round by round, in the source's order."""
        source = TEST_SOURCE if which == "test" else HELD_OUT_SOURCE
        if self._sources[source] is None:
            return
        keys = partial(RowKeys, self._plan.fixed.seed, HELD_OUT, 0)
        for first, last in self._plan.held_out_parts(which):
            ids = np.arange(first, last)
            shares = [
                DeviceShare(assignment, self._read_in_turn(source, ids, assignment.spans))
                for assignment in self._assigned(len(ids))
            ]
            for one_round in self._rounds.of(source, shares, ids, keys):
                yield self._stage([one_round], 1)

    def ids(self, step: int) -> list[int]:
        """The sample ids of a whole step."""
        ids: list[int] = self._order.ids(range(step, step + 1))[0].tolist()
        return ids

    def trial_rows(self, most: int = 0) -> TrialRows:
        """At most `most` samples (0: a microbatch, but at least two) of the next steps, on whatever
        devices they train; where an epoch is nearly over, of its earlier steps, too: an only row
        would show nothing.

        Samples of rare classes come first, if rows can be looked at beforehand. A source that pads
        by microbatch is read again for each part, so that a loss that depends on padding shows.
        """
        most = most or samples_tried(self._plan.batch.micro_batch_size)
        step = min(self._start, self._plan.steps - 1)
        epoch = self._epoch(step)
        count = -(-_LOOKED_AT // self._plan.batch.global_batch_size)
        steps = range(step, min(step + count, self._plan.steps))
        in_epoch = list(takewhile(lambda each: self._epoch(each) == epoch, steps))
        of_steps = self._order.ids(range(step, in_epoch[-1] + 1))
        if sum(map(len, of_steps)) < most:
            first = epoch * self._plan.order.steps_per_epoch
            of_steps += self._order.ids(range(max(step - count, first), step))
        if self._in_buckets:  # rows of several steps may have unlike shapes
            of_steps = [max(of_steps, key=len)]
        ids = np.concatenate(of_steps)[:_LOOKED_AT]
        rows: Arrays = {}
        if self._train.by_microbatch:
            ids = ids[:most]
        else:
            rows = self._ask(TRAIN_SOURCE, ids, epoch)()
            numbers = unlike_rows(rows, len(ids), most)
            ids, rows = ids[numbers], {name: array[numbers] for name, array in rows.items()}

        def pick(numbers: Sequence[int]) -> MicroBatch:
            chosen = list(numbers)
            arrays = {name: array[chosen] for name, array in rows.items()}
            if not rows:
                arrays = dict(self._ask(TRAIN_SOURCE, ids[chosen], epoch)())
            return MicroBatch(arrays, keys=RowKeys(self._plan.fixed.seed, epoch, step, ids[chosen]))

        return TrialRows(ids, step, pick)

    def close(self) -> None:
        """End the thread, and wait for it: a thread that is inside an engine's code when the
        interpreter ends aborts the process.
        """
        self._permits.put(False)
        if self._thread is not None:
            self._thread.join()

    def _groups(self) -> Iterator[list[Batch[Staged]]]:
        """Groups of steps whose rows were read at once.

        If each microbatch is a read of its own, a group is one step, and workers are asked for
        enough steps ahead to keep them busy.
        """
        if not self._reads_by_microbatch:
            numbered = self._numbered_ids()
            while group := list(islice(numbered, self._together)):
                for of_one_epoch in self._epochs_apart(group):
                    yield from self._read_group(of_one_epoch)
            return
        ahead: deque[tuple[int, Ids, list[DeviceShare]]] = deque()
        for step, ids in self._numbered_ids():
            ahead.append((step, ids, self._ask_shares(step, ids)))
            if len(ahead) > self._steps_ahead(len(ids)):
                yield [self._batch(*ahead.popleft())]
        while ahead:
            yield [self._batch(*ahead.popleft())]

    def _read_group(self, group: Sequence[tuple[int, Ids]]) -> Iterator[list[Batch[Staged]]]:
        """Read these steps at once.

        If that fails they are read one by one, so that the steps before the failure are trained.
        The failure is raised even if it does not happen again.
        """
        try:
            batches = self._read_at_once(group)
        except Exception:
            if len(group) == 1:
                raise
            self._together = 1
            yield from (
                [self._batch(step, ids, self._ask_shares(step, ids))] for step, ids in group
            )
            raise
        yield batches

    def _epochs_apart(
        self, group: Sequence[tuple[int, Ids]]
    ) -> Iterator[Sequence[tuple[int, Ids]]]:
        """Cut a group between epochs, if the source's rows may depend on the epoch."""
        if not self._train.by_epoch:
            yield group
            return
        for _, of_one_epoch in groupby(group, lambda numbered: self._epoch(numbered[0])):
            yield list(of_one_epoch)

    def _read_at_once(self, group: Sequence[tuple[int, Ids]]) -> list[Batch[Staged]]:
        """Read once for each device of this process; microbatches are views of the rows read."""
        began, size = time.perf_counter(), 0
        epoch = self._epoch(group[0][0])
        assignments = [self._assigned(len(ids)) for _, ids in group]
        shares: list[list[DeviceShare]] = [[] for _ in group]
        for place in range(len(self._devices)):
            of_device = [by_device[place] for by_device in assignments]
            device_ids = [
                ids[begin:end]
                for (_, ids), assignment in zip(group, of_device, strict=True)
                for begin, end in joined(assignment.spans)
            ]
            rows = _read_joined(self._train, device_ids, epoch)
            size += sum(array.nbytes for array in rows.values())
            first = 0
            for step_shares, assignment in zip(shares, of_device, strict=True):
                reads: list[Read] = []
                for begin, end in joined(assignment.spans):
                    last = first + end - begin
                    reads.append((begin, end, partial(cut_rows, rows, first, last)))
                    first = last
                step_shares.append(DeviceShare(assignment, reads))
        batches = [
            self._batch(step, ids, step_shares)
            for (step, ids), step_shares in zip(group, shares, strict=True)
        ]
        self._adapt_group_size(time.perf_counter() - began, size)
        return batches

    def _adapt_group_size(self, seconds: float, size: int) -> None:
        """Double the steps of the next read while reads stay quick and small, else halve them.

        Rows of several steps are not read at once where they lie in buckets of unlike shape.
        """
        if self._in_buckets:
            return
        if 2 * seconds < _QUICK and 2 * size < _SMALL:
            self._together = min(2 * self._together, _TOGETHER)
        elif seconds > _QUICK or size > _SMALL:
            self._together = max(self._together // 2, 1)

    def _steps_ahead(self, samples: int) -> int:
        """Steps to ask the workers for ahead; a worker reads one microbatch at a time."""
        if not self._workers:
            return 0
        microbatches = sum(len(assignment.spans) for assignment in self._assigned(samples))
        return -(-self._workers.depth // max(1, microbatches))

    def _numbered_ids(self) -> Iterator[tuple[int, Ids]]:
        at_once = max(1, _IDS_AT_ONCE // self._plan.batch.global_batch_size)
        for block in range(self._start, self._plan.steps, at_once):
            steps = range(block, min(block + at_once, self._plan.steps))
            yield from zip(steps, self._laid(self._order.ids(steps)), strict=True)

    def _laid(self, ids_by_step: list[Ids]) -> list[Ids]:
        """The samples of each step, those of a microbatch about equally long where rows are unlike;
        in their order where the loss looks at the whole batch.
        """
        lengths = self._train.lengths
        if lengths is None or self._plan.sees_whole_batch:
            return ids_by_step
        size = self._plan.batch.micro_batch_size
        return [by_length(ids, lengths[ids], size) for ids in ids_by_step]

    def _batch(self, step: int, ids: Ids, shares: list[DeviceShare]) -> Batch[Staged]:
        progress = self._plan.progress_at(step)
        keys = partial(RowKeys, self._plan.fixed.seed, progress.epoch, step)
        rounds = list(self._rounds.of(TRAIN_SOURCE, shares, ids, keys))
        return Batch(
            self._stage(rounds, self._plan.batch.accumulation_steps),
            progress,
            samples=len(ids),
            num_microbatches=count_microbatches(len(ids), self._plan.batch.micro_batch_size),
        )

    def _assigned(self, samples: int) -> list[Assignment]:
        """The work of each of this process's devices in a step of this many samples."""
        if samples not in self._assignments:
            self._assignments[samples] = [
                self._plan.batch.assignment(samples, device) for device in self._devices
            ]
        return self._assignments[samples]

    def _epoch(self, step: int) -> int:
        return self._order.position(step).epoch

    @property
    def _in_buckets(self) -> bool:
        """Whether the shape of a row follows from its bucket."""
        return bool(self._plan.data.buckets.get("train"))

    @property
    def _reads_by_microbatch(self) -> bool:
        """Whether a read brings one microbatch; else it brings all microbatches of a device."""
        return self._workers is not None or self._train.by_microbatch

    def _ask_shares(self, step: int, ids: Ids) -> list[DeviceShare]:
        """The share of each device of this process, for a step that is read alone."""
        shares, epoch = [], self._epoch(step)
        for assignment in self._assigned(len(ids)):
            intervals = assignment.spans if self._reads_by_microbatch else joined(assignment.spans)
            reads = [
                (begin, end, self._ask(TRAIN_SOURCE, ids[begin:end], epoch))
                for begin, end in intervals
            ]
            shares.append(DeviceShare(assignment, reads))
        return shares

    def _read_in_turn(
        self, source: int, ids: Ids, spans: Sequence[tuple[int, int]]
    ) -> Iterator[Read]:
        """Read held-out data microbatch by microbatch, since it may not fit in memory.

        Workers are asked for some microbatches ahead.
        """
        most = self._workers.depth if self._workers else 0
        ahead: deque[Read] = deque()
        for begin, end in spans:
            ahead.append((begin, end, self._ask(source, ids[begin:end], 0)))
            if len(ahead) > most:
                yield ahead.popleft()
        yield from ahead

    def _ask(self, which: int, ids: Ids, epoch: int) -> ReadRows:
        if self._workers:
            return self._workers.ask(which, ids, epoch)
        source = self._sources[which]
        assert source is not None
        return lambda: source.read(ids, epoch)

    def _groups_ahead(self) -> Iterator[list[Batch[Staged]]]:
        ready: queue.SimpleQueue[list[Batch[Staged]] | BaseException | None] = queue.SimpleQueue()

        def prepare() -> None:
            try:
                groups = self._groups()
                while self._permits.get():
                    group = next(groups, None)
                    ready.put(group)
                    if group is None:
                        return
            except BaseException as error:  # the loop takes it from the queue and raises it
                ready.put(error)

        for _ in range(self._prefetch):
            self._permits.put(True)
        self._thread = threading.Thread(target=prepare, name="feed", daemon=True)
        self._thread.start()
        try:
            while (group := ready.get()) is not None:
                if isinstance(group, BaseException):
                    raise group
                self._permits.put(True)
                yield group
        finally:
            self.close()


def _read_joined(
    source: RowReader, ids: Sequence[Ids], epoch: int
) -> Mapping[str, NDArray[np.generic]]:
    """The rows of all these ids; without ids nothing is read."""
    if not ids:
        return {}
    return source.read(np.concatenate(ids) if len(ids) > 1 else ids[0], epoch)
