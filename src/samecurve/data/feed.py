"""One process's batches, in the run's order, prepared ahead by a background thread.

The thread computes ids for many steps at once and gathers rows, of several steps together where
that is a matter of microseconds, or lets workers gather them for some steps to come; with prefetch
0 the same happens in place. Batches are the same in every way, and a feed can be opened at any
step.
"""

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
from typing import Any, NamedTuple

import numpy as np

from samecurve.core.determinism.data_order import Ids
from samecurve.core.determinism.microbatches import Assignment
from samecurve.core.determinism.sample_keys import row_keys
from samecurve.core.planning.plan import Plan
from samecurve.core.protocols import Batch, MicroBatch, Round, Source
from samecurve.data.workers import Workers

Stage = Callable[[Sequence[Round], int], Any]
Read = Callable[[], Mapping[str, Any]]  # rows that were asked for
_IDS_AT_ONCE = 65_536
_TOGETHER = 16  # steps at most whose rows are read at once
_QUICK, _SMALL = 1e-3, 1 << 20  # seconds and bytes of such a read at most
_TRAIN, _HELD_OUT = 0, 1


class _Asked(NamedTuple):
    """A device's share of a step: its hand, and its slots' rows, several slots in a read that
    begins at a position of the step.
    """

    hand: Assignment
    reads: Iterable[tuple[int, int, Read]]


class Feed:
    """The steps from `start` to the plan's end, for these of the plan's devices.

    stage: rounds of host arrays, and how many a whole step has -> what the engine takes (pinned, or
    on the device). workers: who reads the two sources; None: this thread.
    """

    def __init__(
        self,
        plan: Plan,
        devices: Sequence[int],
        train: Source,
        evaluation: Source | None,
        stage: Stage,
        start: int = 0,
        prefetch: int = 2,
        workers: Workers | None = None,
    ) -> None:
        self._plan, self._devices, self._stage = plan, devices, stage
        self._sources, self._workers = (train, evaluation), workers
        self._start, self._prefetch = start, prefetch
        self._order = plan.order
        self._hands: dict[int, list[Assignment]] = {}
        self._together = 1  # steps read at once: more while reading is quick
        self._leave: queue.SimpleQueue[bool] = (
            queue.SimpleQueue()
        )  # for the thread to hand over one more; False: to end
        self._thread: threading.Thread | None = None

    def __iter__(self) -> Iterator[tuple[int, Batch]]:
        groups = self._ahead() if self._prefetch else self._groups()
        while True:
            began = time.perf_counter()
            group = next(groups, None)
            if group is None:
                return
            group[0].wait_seconds = time.perf_counter() - began
            for item in group:
                yield item.step, item

    def evaluation(self) -> Iterator[Any]:
        """The evaluation, staged round by round: the first plan.eval_samples of it, in their own
        order.
        """
        if self._sources[_HELD_OUT] is not None:
            ids = np.arange(self._plan.eval_samples)
            asked = [_Asked(hand, self._in_turn(ids, hand.spans)) for hand in self._dealt(len(ids))]
            yield from (
                self._stage([found], 1) for found in self._rounds(_HELD_OUT, asked, ids, 0, 0)
            )

    def ids(self, step: int) -> list[int]:
        """The sample ids of a whole step."""
        found: list[int] = self._order.ids(range(step, step + 1))[0].tolist()
        return found

    def close(self) -> None:
        """End the thread, and wait for it: one still inside an engine's code when the interpreter
        ends aborts the process.
        """
        self._leave.put(False)
        if self._thread is not None:
            self._thread.join()

    def _groups(self) -> Iterator[list[Batch]]:
        """Steps whose rows were read at once.

        With workers, one by one: each is asked for as many steps ahead as keep them busy.
        """
        if not self._workers:
            numbered = self._numbered()
            while group := list(islice(numbered, self._together)):
                yield from self._read(group)
            return
        ahead: deque[tuple[int, Ids, list[_Asked]]] = deque()
        for step, ids in self._numbered():
            ahead.append((step, ids, self._asked(ids)))
            if len(ahead) > self._depth(len(ids)):
                yield [self._made(*ahead.popleft())]
        while ahead:
            yield [self._made(*ahead.popleft())]

    def _read(self, group: Sequence[tuple[int, Ids]]) -> Iterator[list[Batch]]:
        """These steps, read at once; if that fails, one by one, so that what can be trained on
        before the failure is. A failure stands, even if it does not come again.
        """
        try:
            made = self._at_once(group)
        except Exception:
            if len(group) == 1:
                raise
            self._together = 1
            yield from ([self._made(step, ids, self._asked(ids))] for step, ids in group)
            raise
        yield made

    def _at_once(self, group: Sequence[tuple[int, Ids]]) -> list[Batch]:
        """One read for each device of this process, however many its slots and steps: they are
        views of it.
        """
        source, began, size = self._sources[_TRAIN], time.perf_counter(), 0
        assert source is not None
        hands = [self._dealt(len(ids)) for _, ids in group]
        asked: list[list[_Asked]] = [[] for _ in group]
        for place in range(len(self._devices)):
            own = [
                ids[begin:end]
                for (_, ids), dealt in zip(group, hands, strict=True)
                for begin, end in dealt[place].whole
            ]
            rows = source[np.concatenate(own) if len(own) > 1 else own[0]] if own else {}
            size += sum(array.nbytes for array in rows.values())
            first = 0
            for mine, dealt in zip(asked, hands, strict=True):
                hand = dealt[place]
                mine.append(
                    _Asked(
                        hand,
                        [
                            (begin, end, partial(_rows, rows, first, first + end - begin))
                            for begin, end in hand.whole
                        ],
                    )
                )
                first += sum(end - begin for begin, end in hand.whole)
        made = [self._made(step, ids, mine) for (step, ids), mine in zip(group, asked, strict=True)]
        self._judge(time.perf_counter() - began, size)
        return made

    def _judge(self, seconds: float, size: int) -> None:
        """Twice as many next time, as long as that stays quick and small."""
        if 2 * seconds < _QUICK and 2 * size < _SMALL:
            self._together = min(2 * self._together, _TOGETHER)
        elif seconds > _QUICK or size > _SMALL:
            self._together = max(self._together // 2, 1)

    def _depth(self, samples: int) -> int:
        """Steps to ask for ahead: workers read a slot at a time."""
        if not self._workers:
            return 0
        slots = sum(len(self._plan.assignment(samples, device).spans) for device in self._devices)
        return -(-self._workers.depth // max(1, slots))

    def _numbered(self) -> Iterator[tuple[int, Ids]]:
        at_once = max(1, _IDS_AT_ONCE // self._plan.global_batch_size)
        for block in range(self._start, self._plan.steps, at_once):
            steps = range(block, min(block + at_once, self._plan.steps))
            yield from zip(steps, self._order.ids(steps), strict=True)

    def _made(self, step: int, ids: Ids, asked: list[_Asked]) -> Batch:
        epoch = self._order.position(step).epoch if self._plan.keyed_dropout else 0
        return Batch(
            self._stage(
                list(self._rounds(_TRAIN, asked, ids, epoch, 0 if self._plan.exact else 1)),
                self._plan.accumulation_steps,
            ),
            step,
            len(ids),
        )

    def _dealt(self, samples: int) -> list[Assignment]:
        """The hands of this process's devices in a step of so many samples."""
        if samples not in self._hands:
            self._hands[samples] = [
                self._plan.assignment(samples, device) for device in self._devices
            ]
        return self._hands[samples]

    def _asked(self, ids: Ids) -> list[_Asked]:
        """What each device of this process is to have of a step by itself.

        Without workers one read for all of its slots, which neighbour each other; with them, one
        each.
        """
        return [
            _Asked(
                hand,
                [
                    (begin, end, self._ask(_TRAIN, ids[begin:end]))
                    for begin, end in (hand.spans if self._workers else hand.whole)
                ],
            )
            for hand in self._dealt(len(ids))
        ]

    def _in_turn(
        self, ids: Ids, spans: Sequence[tuple[int, int]]
    ) -> Iterator[tuple[int, int, Read]]:
        """Slot by slot, since held-out data may be more than memory holds, some asked for ahead."""
        ahead: deque[tuple[int, int, Read]] = deque()
        for begin, end in spans:
            ahead.append((begin, end, self._ask(_HELD_OUT, ids[begin:end])))
            if len(ahead) > (self._workers.depth if self._workers else 0):
                yield ahead.popleft()
        yield from ahead

    def _ask(self, source: int, ids: Ids) -> Read:
        if self._workers:
            return self._workers.ask(source, ids)
        found = self._sources[source]
        assert found is not None
        return lambda: found[ids]

    def _rounds(
        self, source: int, asked: list[_Asked], ids: Ids, epoch: int, least: int
    ) -> Iterator[Round]:
        """Rounds in which no device of this process has a slot are left out, unless all must take
        part in each; `least` remain.
        """
        hands = [mine.hand for mine in asked]
        slots = [self._slots(mine, ids, epoch) for mine in asked]
        idle = len(hands[0].rounds) - max(len(hand.spans) for hand in hands)
        idle = 0 if self._plan.every_rank_every_round else min(idle, len(hands[0].rounds) - least)
        for index in range(idle, len(hands[0].rounds)):
            made = [
                next(mine) if hand.rounds[index] else None
                for mine, hand in zip(slots, hands, strict=True)
            ]
            if (self._plan.every_rank_every_round and not all(made)) or not any(made):
                dummy = MicroBatch(self._ask(source, ids[:1])(), False, self._keys(ids[:1], epoch))
                made = [
                    slot or (dummy if self._plan.every_rank_every_round or not device else None)
                    for device, slot in enumerate(made)
                ]
            yield tuple(made)

    def _slots(self, asked: _Asked, ids: Ids, epoch: int) -> Iterator[MicroBatch]:
        """The slots of a device, views of what was read."""
        reads = iter(asked.reads)
        first, last = 0, 0
        rows: Mapping[str, Any] = {}
        for begin, end in asked.hand.spans:
            if begin >= last:
                first, last, read = next(reads)
                rows = read()
            yield MicroBatch(
                {name: array[begin - first : end - first] for name, array in rows.items()},
                True,
                self._keys(ids[begin:end], epoch),
                begin // self._plan.micro_batch_size,
            )

    def _keys(self, ids: Ids, epoch: int) -> Any:
        return row_keys(self._plan.fixed.seed, epoch, ids) if self._plan.keyed_dropout else None

    def _ahead(self) -> Iterator[list[Batch]]:
        ready: queue.SimpleQueue[list[Batch] | BaseException | None] = queue.SimpleQueue()

        def work() -> None:
            try:
                for group in self._groups():
                    if not self._leave.get():
                        return
                    ready.put(group)
                ready.put(None)
            except BaseException as error:  # handed to the loop, which raises it
                ready.put(error)

        for _ in range(self._prefetch):
            self._leave.put(True)
        self._thread = threading.Thread(target=work, name="feed", daemon=True)
        self._thread.start()
        try:
            while (group := ready.get()) is not None:
                if isinstance(group, BaseException):
                    raise group
                self._leave.put(True)
                yield group
        finally:
            self.close()


def _rows(rows: Mapping[str, Any], first: int, last: int) -> Mapping[str, Any]:
    return {name: array[first:last] for name, array in rows.items()}
