"""One process's batches, in the run's order, prepared ahead by a background thread.

The thread computes ids for many steps at once and gathers rows; with prefetch 0 the same happens in place. Batches are
the same either way, and a feed can be opened at any step.
"""

import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from lockstep.core.dealing import Hand, deal
from lockstep.core.keys import row_keys
from lockstep.core.order import Ids
from lockstep.core.plan import Plan
from lockstep.core.protocols import Batch, Round, Slot, Source

Stage = Callable[[Sequence[Round], int], Any]
_IDS_AT_ONCE = 65_536


class Feed:
    """The steps from `start` to the plan's end, for these of the plan's devices. stage: rounds of host arrays, and how many a whole step has -> what the engine takes (pinned, or on the device)."""

    def __init__(self, plan: Plan, devices: Sequence[int], train: Source, evaluation: Source | None, stage: Stage, start: int = 0, prefetch: int = 2) -> None:
        self._plan, self._devices, self._stage = plan, devices, stage
        self._train, self._evaluation = train, evaluation
        self._start, self._prefetch = start, prefetch
        self._order = plan.order
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None

    def __iter__(self) -> Iterator[tuple[int, Batch]]:
        batches = self._ahead() if self._prefetch else self._steps()
        while True:
            began = time.perf_counter()
            item = next(batches, None)
            if item is None:
                return
            item.wait = time.perf_counter() - began
            yield item.step, item

    def evaluation(self) -> Iterator[Any]:
        """The evaluation, staged round by round: the first plan.eval_samples of it, in their own order."""
        if self._evaluation is not None:
            yield from (self._stage([found], 1) for found in self._rounds(self._evaluation, np.arange(self._plan.eval_samples), 0, 0))

    def ids(self, step: int) -> list[int]:
        """The sample ids of a whole step."""
        found: list[int] = self._order.ids(range(step, step + 1))[0].tolist()
        return found

    def close(self) -> None:
        """End the thread, and wait for it: one still inside an engine's code when the interpreter ends aborts the process."""
        self._closed.set()
        if self._thread is not None:
            self._thread.join()

    def _steps(self) -> Iterator[Batch]:
        at_once = max(1, _IDS_AT_ONCE // self._plan.batch)
        for block in range(self._start, self._plan.steps, at_once):
            steps = range(block, min(block + at_once, self._plan.steps))
            for step, ids in zip(steps, self._order.ids(steps), strict=True):
                epoch = self._order.position(step).epoch if self._plan.keyed else 0
                yield Batch(self._stage(list(self._rounds(self._train, ids, epoch, 0 if self._plan.exact else 1)), self._plan.rounds), step, len(ids))

    def _rounds(self, source: Source, ids: Ids, epoch: int, least: int) -> Iterator[Round]:
        """Rounds in which no device of this process has a slot are left out, unless all must take part in each; `least` remain."""
        hands = [deal(len(ids), self._plan.micro, device, self._plan.world) for device in self._devices]
        slots = [self._slots(source, ids, epoch, hand) for hand in hands]
        idle = len(hands[0].rounds) - max(len(hand.spans) for hand in hands)
        idle = 0 if self._plan.together else min(idle, len(hands[0].rounds) - least)
        for index in range(idle, len(hands[0].rounds)):
            made = [next(mine) if hand.rounds[index] else None for mine, hand in zip(slots, hands, strict=True)]
            if self._plan.together or not any(made):
                dummy = Slot(source[ids[:1]], False, self._keys(ids[:1], epoch))
                made = [slot or (dummy if self._plan.together or not device else None) for device, slot in enumerate(made)]
            yield tuple(made)

    def _slots(self, source: Source, ids: Ids, epoch: int, hand: Hand) -> Iterator[Slot]:
        """One gather for all of a device's slots, which neighbour each other; then views of it."""
        if not hand.spans:
            return
        first = hand.spans[0][0]
        rows = source[ids[first : hand.spans[-1][1]]]
        for begin, end in hand.spans:
            yield Slot({name: array[begin - first : end - first] for name, array in rows.items()}, True, self._keys(ids[begin:end], epoch), begin // self._plan.micro)

    def _keys(self, ids: Ids, epoch: int) -> Any:
        return row_keys(self._plan.fixed.seed, epoch, ids) if self._plan.keyed else None

    def _ahead(self) -> Iterator[Batch]:
        ready: queue.Queue[Batch | BaseException | None] = queue.Queue(self._prefetch)

        def put(item: Batch | BaseException | None) -> bool:
            while not self._closed.is_set():
                try:
                    ready.put(item, timeout=0.1)
                    return True
                except queue.Full:
                    continue
            return False

        def work() -> None:
            try:
                for item in self._steps():
                    if not put(item):
                        return
                put(None)
            except BaseException as error:  # handed to the loop, which raises it
                put(error)

        self._thread = threading.Thread(target=work, name="feed", daemon=True)
        self._thread.start()
        try:
            while (item := ready.get()) is not None:
                if isinstance(item, BaseException):
                    raise item
                yield item
        finally:
            self.close()
