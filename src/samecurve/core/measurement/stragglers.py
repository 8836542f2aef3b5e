"""The search for the rank that the others wait for. All take a step together, so only what each
does by itself tells them apart: its wait for data and its forward pass.
"""

import statistics
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

_WINDOW = 50  # steps whose medians are compared: one odd step says nothing
_EVERY = 10  # steps between two looks
_RATIO = 1.5  # a forward pass is slow that takes so many times as long as the others'
_LEAST = 0.002  # and so many seconds
_SHARE = 0.1  # of a step: a wait for data is long that takes more

SlowRank = dict[str, Any]  # values of a `slow` event


class _StepTimes(NamedTuple):
    seconds: float
    waits: Sequence[float]  # for data, by rank
    forwards: Sequence[float]  # by rank


class StragglerDetector:
    """Finds ranks that hold the others up, by what they do longer; each of them once.

    microbatches: of each rank, where each has its own number of them.
    remedy: more that helps against a slow forward pass.
    on_cpu: the ranks share this machine's cores.
    """

    def __init__(
        self, microbatches: Sequence[int] = (), remedy: str = "", *, on_cpu: bool = False
    ) -> None:
        self._microbatches, self._remedy = microbatches, remedy
        self._look = "nvidia-smi or top shows what else uses its device or cores"
        if on_cpu:
            self._look = "`uptime` shows the load, `top` what else uses these cores"
        self._steps = 0
        self._window: deque[_StepTimes] = deque(maxlen=_WINDOW)
        self._reported: set[tuple[int, str]] = set()

    def add(
        self, seconds: float, waits: Sequence[float], forwards: Sequence[float]
    ) -> list[SlowRank]:
        """Add a step. Returns what is new, as values of a `slow` event.

        waits: for data, by rank.
        forwards: of the step's first microbatch, by rank; zeros where they say nothing.
        """
        if len(waits) < 2:
            return []
        self._steps += 1
        if self._microbatches:
            by_rank = zip(forwards, self._microbatches, strict=True)
            forwards = [forward * count for forward, count in by_rank]
        self._window.append(_StepTimes(seconds, waits, forwards))
        if len(self._window) < _WINDOW or self._steps % _EVERY:
            return []
        step = statistics.median(times.seconds for times in self._window)
        waiting = self._slow_data(step, _medians([times.waits for times in self._window]))
        computing = self._slow_forward(step, _medians([times.forwards for times in self._window]))
        return [*waiting, *computing]

    def _slow_data(self, step: float, waits: list[float]) -> Iterator[SlowRank]:
        for rank, wait, others in _beside_others(waits):
            if wait - others > _SHARE * step and self._is_new(rank, "data"):
                text = (
                    f"rank {rank} waits {wait:.3g} s of each step of {step:.3g} s for its data, the"
                    f" others {others:.2g} s, and then for it: --num-workers or --prefetch, or a"
                    " quicker disk there"
                )
                yield {"text": text, "rank": rank, "wait_seconds": wait, "seconds": step}

    def _slow_forward(self, step: float, forwards: list[float]) -> Iterator[SlowRank]:
        for rank, forward, others in _beside_others(forwards):
            is_slow = others and forward > _LEAST and forward > _RATIO * others
            matters = forward - others > _SHARE * step / 3
            if is_slow and matters and self._is_new(rank, "forward"):
                ratio = forward / others
                text = (
                    f"rank {rank} takes {ratio:.1f} times as long as the others for its forward"
                    f" pass ({forward:.3g} s, {others:.3g} s): they wait for it;"
                    f" {self._look}{self._remedy}"
                )
                yield {"text": text, "rank": rank, "ratio": ratio, "seconds": step}

    def _is_new(self, rank: int, kind: str) -> bool:
        is_new = (rank, kind) not in self._reported
        self._reported.add((rank, kind))
        return is_new


def _medians(rows: Sequence[Sequence[float]]) -> list[float]:
    """The medians over steps, by rank."""
    return [statistics.median(column) for column in zip(*rows, strict=True)]


def _beside_others(values: Sequence[float]) -> Iterator[tuple[int, float, float]]:
    """(rank, its value, the median of the others)."""
    for rank, value in enumerate(values):
        others = [*values[:rank], *values[rank + 1 :]]
        yield rank, value, statistics.median(others)
