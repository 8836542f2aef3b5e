"""Which microbatches of a step each device computes; and the tree along which they are added where
every bit counts.

A microbatch is at most `micro` neighbouring positions of a step, and one computation wherever it
runs. Devices take contiguous runs of microbatches, as many as their speeds ask for, or all alike. A
device with fewer of them than rounds idles in its first rounds, so that the last round, which
reduces, is real on every device that has work at all. The assignment never sees the permutation.

times: what one microbatch takes each device, in any unit; empty: devices are alike.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Generic, TypeVar

T = TypeVar("T")
Node = tuple[int, int]  # level, index: microbatches [index << level, (index + 1) << level)


@dataclass(frozen=True)
class Assignment:
    """What one device does in a step, round by round."""

    # of each round, the microbatch's interval of the step's positions; None: the device idles
    rounds: tuple[tuple[int, int] | None, ...]

    @cached_property
    def spans(self) -> list[tuple[int, int]]:
        """The microbatches, in the order in which they run."""
        return [span for span in self.rounds if span is not None]

    @cached_property
    def extent(self) -> list[tuple[int, int]]:
        """The one interval that they fill together; none, where there are none."""
        return [(self.spans[0][0], self.spans[-1][1])] if self.spans else []


def split_batch(samples: int, micro: int) -> list[tuple[int, int]]:
    """The intervals [first, last) that a step of so many samples is cut into."""
    bounds = [*range(0, samples, micro), samples]
    return list(pairwise(bounds))


def count_microbatches(samples: int, micro: int) -> int:
    """How many intervals split_batch() gives."""
    return -(-samples // micro)


def microbatches_of(count: int, device: int, world: int, times: Sequence[float] = ()) -> range:
    """Which of `count` microbatches are one device's."""
    if not times:
        return range(count * device // world, count * (device + 1) // world)
    counts = _soonest(count, times)
    first = sum(counts[:device])
    return range(first, first + counts[device])


def _soonest(count: int, times: Sequence[float]) -> list[int]:
    """How many microbatches each device takes so that the last is done as soon as can be.

    Each goes to whoever has it done first, which is optimal for jobs of one size on machines of any
    speeds; those that all have done by the time in which they would be if microbatches could be cut
    go first, at once. Of two devices that tie, the later one.
    """
    if_cut = count / sum(1 / time for time in times) * (1 - 1e-9)
    counts = [int(if_cut / time) for time in times]

    def done_with_one_more(device: int) -> tuple[float, int]:
        return (counts[device] + 1) * times[device], -device

    while sum(counts) < count:
        counts[min(range(len(times)), key=done_with_one_more)] += 1
    return counts


def assign(
    samples: int, micro: int, device: int, world: int, times: Sequence[float] = ()
) -> Assignment:
    """What one of `world` devices does in a step of `samples`, cut into microbatches of `micro`."""
    intervals = split_batch(samples, micro)
    numbers = microbatches_of(len(intervals), device, world, times)
    idle = accumulation_steps(len(intervals), world, times) - len(numbers)
    return Assignment((None,) * idle + tuple(intervals[number] for number in numbers))


def accumulation_steps(count: int, world: int, times: Sequence[float] = ()) -> int:
    """Microbatches of the device that has most of them."""
    return max(_soonest(count, times)) if times else -(-count // world)


class TreeSum(Generic[T]):
    """What the microbatches of a step give, added along one binary tree, so that the sum does not
    depend on who computed what.

    A node is the sum of its two children, (level - 1, 2 index) and the one after it; where the
    right one would begin at or beyond `count`, the left one is passed on as it is. Values come from
    left to right (some may be left out: they are another device's); what can be added is added at
    once, so that at most log2(count) + 1 values are held for neighbouring microbatches.

    add: (left, right) -> their sum; it may use both up.
    """

    def __init__(self, count: int, add: Callable[[T, T], T]) -> None:
        self._count, self._add = count, add
        self.held: list[tuple[Node, T]] = []

    def give(self, node: Node, value: T) -> None:
        while True:
            (level, index), size = node, 1 << node[0]
            if index % 2 and self.held and self.held[-1][0] == (level, index - 1):
                value = self._add(self.held.pop()[1], value)
            elif index % 2 or (index + 1) * size < self._count or size >= self._count:
                break
            node = (level + 1, index // 2)
        self.held.append((node, value))

    def take(self, node: Node) -> T | None:
        """The last value, if it is this node's: its sibling is to be added to it elsewhere."""
        return self.held.pop()[1] if self.held and self.held[-1][0] == node else None

    def total(self) -> T:
        """Once every microbatch was given."""
        ((_, value),) = self.held
        return value


def subtrees(mine: range, count: int) -> list[Node]:
    """The nodes whose sums one device has after its microbatches: the largest that lie within them,
    from left to right.
    """
    sums: TreeSum[None] = TreeSum(count, lambda _left, _right: None)
    for number in mine:
        sums.give((0, number), None)
    return [node for node, _ in sums.held]
