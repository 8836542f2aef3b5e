"""One rank's batches, in the run's order, prepared ahead by a background thread.

The thread computes ids for many steps at once and gathers rows; with prefetch 0 the same happens in place. Batches are
the same either way, and a feed can be opened at any step.
"""

import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from lockstep.core.dealing import Hand, deal
from lockstep.core.order import Ids
from lockstep.core.plan import Plan
from lockstep.core.protocols import Arrays, Batch, Source

Stage = Callable[[Mapping[str, Any]], Arrays]
_IDS_AT_ONCE = 65_536


class Feed:
    """The steps from `start` to the plan's end, for device `device`. stage: host arrays -> what the engine takes (pinned, say)."""

    def __init__(self, plan: Plan, device: int, train: Source, evaluation: Source | None, stage: Stage, start: int = 0, prefetch: int = 2) -> None:
        self._plan, self._device, self._stage = plan, device, stage
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
            item[1].wait = time.perf_counter() - began
            yield item

    def evaluation(self) -> Iterator[Arrays]:
        """This device's slots of the evaluation: the first plan.eval_samples of it, in their own order."""
        if self._evaluation is None:
            return
        for first, last in deal(self._plan.eval_samples, self._plan.micro, self._device, self._plan.world).spans:
            yield self._stage(self._evaluation[np.arange(first, last)])

    def ids(self, step: int) -> list[int]:
        """The sample ids of a whole step."""
        found: list[int] = self._order.ids(range(step, step + 1))[0].tolist()
        return found

    def close(self) -> None:
        """End the thread, and wait for it: one still inside an engine's code when the interpreter ends aborts the process."""
        self._closed.set()
        if self._thread is not None:
            self._thread.join()

    def _steps(self) -> Iterator[tuple[int, Batch]]:
        at_once = max(1, _IDS_AT_ONCE // self._plan.batch)
        for block in range(self._start, self._plan.steps, at_once):
            steps = range(block, min(block + at_once, self._plan.steps))
            for step, ids in zip(steps, self._order.ids(steps), strict=True):
                yield step, self._batch(ids)

    def _batch(self, ids: Ids) -> Batch:
        hand = deal(len(ids), self._plan.micro, self._device, self._plan.world)
        if not hand.spans:
            return Batch([self._stage(self._train[ids[:1]])], real=False, samples=len(ids))
        return Batch([self._stage(slot) for slot in self._gather(ids, hand)], real=True, samples=len(ids))

    def _gather(self, ids: Ids, hand: Hand) -> Iterator[dict[str, Any]]:
        """One gather for all of this device's slots, which neighbour each other; then views of it."""
        first = hand.spans[0][0]
        rows = self._train[ids[first : hand.spans[-1][1]]]
        for begin, end in hand.spans:
            yield {name: array[begin - first : end - first] for name, array in rows.items()}

    def _ahead(self) -> Iterator[tuple[int, Batch]]:
        ready: queue.Queue[tuple[int, Batch] | BaseException | None] = queue.Queue(self._prefetch)

        def put(item: tuple[int, Batch] | BaseException | None) -> bool:
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
