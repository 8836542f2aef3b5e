"""Which rank the others wait for: all take a step together, so only what each does by itself tells
them apart, its wait for data and its forward pass.
"""

import statistics
from collections import deque
from collections.abc import Sequence
from typing import Any

_WINDOW = 50  # steps whose medians are compared: one odd step says nothing
_EVERY = 10  # steps
_RATIO, _LEAST = (
    1.5,
    0.002,
)  # a forward pass so many times as long as the others', and so many seconds
_SHARE = 0.1  # of a step


class StragglerDetector:
    """Found once each: a rank that holds the others up, by what it does longer.

    slots: of each rank, where it has its own number of them. remedy: more that helps against a slow
    forward pass.
    """

    def __init__(self, slots: Sequence[int] = (), remedy: str = "") -> None:
        self._slots, self._remedy = slots, remedy
        self._steps = 0
        self._window: deque[tuple[float, Sequence[float], Sequence[float]]] = deque(maxlen=_WINDOW)
        self._found: set[tuple[int, str]] = set()

    def add(
        self, seconds: float, waits: Sequence[float], forwards: Sequence[float]
    ) -> list[dict[str, Any]]:
        """Of one step.

        waits: for data, by rank; forwards: of the step's first slot, by rank, zeros where they say
        nothing. Returns what is new, as values of a `slow` event.
        """
        if len(waits) < 2:
            return []
        self._steps += 1
        if self._slots:
            forwards = [took * count for took, count in zip(forwards, self._slots, strict=True)]
        self._window.append((seconds, waits, forwards))
        if len(self._window) < _WINDOW or self._steps % _EVERY:
            return []
        steps, data, forward = zip(*self._window, strict=True)
        return self._compared(statistics.median(steps), _medians(data), _medians(forward))

    def _compared(
        self, step: float, data: list[float], forward: list[float]
    ) -> list[dict[str, Any]]:
        found = []
        for rank, wait, others in _beside(data):
            if wait - others > _SHARE * step and self._new(rank, "data"):
                text = (
                    f"rank {rank} waits {wait:.3g} s of each step of {step:.3g} s for its data, the"
                    f" others {others:.2g} s, and then for it: --num-workers or --prefetch, or a"
                    " quicker disk there"
                )
                found.append({"text": text, "rank": rank, "wait_seconds": wait, "seconds": step})
        for rank, own, others in _beside(forward):
            if (
                others
                and own > _LEAST
                and own > _RATIO * others
                and own - others > _SHARE * step / 3
                and self._new(rank, "forward")
            ):
                ratio = (
                    f"{own / others:.1f} times as long as the others for its forward pass"
                    f" ({own:.3g} s, {others:.3g} s)"
                )
                text = (
                    f"rank {rank} takes {ratio}: they wait for it; nvidia-smi or top shows what"
                    f" else uses its device or cores{self._remedy}"
                )
                found.append({"text": text, "rank": rank, "ratio": own / others, "seconds": step})
        return found

    def _new(self, rank: int, kind: str) -> bool:
        new = (rank, kind) not in self._found
        self._found.add((rank, kind))
        return new


def _medians(rows: Sequence[Sequence[float]]) -> list[float]:
    """By rank, over steps."""
    return [statistics.median(column) for column in zip(*rows, strict=True)]


def _beside(values: Sequence[float]) -> list[tuple[int, float, float]]:
    """(rank, its value, the median of the others)."""
    return [
        (rank, value, statistics.median([*values[:rank], *values[rank + 1 :]]))
        for rank, value in enumerate(values)
    ]
