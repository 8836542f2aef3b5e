"""The microbatches of a step: which device computes which, and the tree that adds their sums.

A microbatch is at most `micro_batch_size` neighbouring positions of a step, and it is the same
computation on every device. Each device takes neighbouring microbatches, or with others in turn
(in_turn): as many as the others, give or take one, or as many as its speed allows. In a round each
device computes one microbatch. A device with fewer microbatches than others idles in its first
rounds. So every device that has any work computes in the last round, in which gradients are
reduced. The assignment never sees the permutation of the samples.

microbatch_seconds, below: how long each device takes for one microbatch; only the ratios count.
Empty: all devices are equally fast.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Generic, TypeVar

T = TypeVar("T")
# A node of the tree, (level, index): the microbatches [index << level, (index + 1) << level).
Node = tuple[int, int]


@dataclass(frozen=True)
class Assignment:
    """A device's work in one step, round by round."""

    # for each round the microbatch, as an interval of the step's positions; None: the device idles
    rounds: tuple[tuple[int, int] | None, ...]

    @cached_property
    def spans(self) -> list[tuple[int, int]]:
        """The device's microbatches, in the order in which they run."""
        return [span for span in self.rounds if span is not None]


def split_batch(samples: int, micro_batch_size: int) -> list[tuple[int, int]]:
    """The intervals [first, last) of positions into which a step of `samples` is cut."""
    bounds = [*range(0, samples, micro_batch_size), samples]
    return list(pairwise(bounds))


def count_microbatches(samples: int, micro_batch_size: int) -> int:
    """The number of intervals that split_batch() gives."""
    return -(-samples // micro_batch_size)


def microbatches_of(
    count: int, device: int, num_devices: int, microbatch_seconds: Sequence[float] = ()
) -> range:
    """The microbatches of one device, by their numbers. count: how many the step has."""
    if not microbatch_seconds:
        return range(count * device // num_devices, count * (device + 1) // num_devices)
    counts = _earliest_finish(count, microbatch_seconds)
    first = sum(counts[:device])
    return range(first, first + counts[device])


def in_turn(of_group: range, place: int, num_devices: int) -> range:
    """The microbatches of one device of a group that takes neighbouring ones in each round. The
    first round is short where the devices do not divide the group's microbatches.
    """
    num_idle = -len(of_group) % num_devices
    return of_group[(place - num_idle) % num_devices :: num_devices]


def _earliest_finish(count: int, microbatch_seconds: Sequence[float]) -> list[int]:
    """How many microbatches each device takes so that the step ends as early as possible.

    Each microbatch goes to the device that would finish it first, the later device in a tie. That
    is optimal for jobs of one size on machines of any speeds. To be quick, each device first gets
    what it finishes within the time of a perfect split; only the rest is given out one by one.
    """
    # the time of a perfect split, a little less because of rounding
    even_share = count / sum(1 / seconds for seconds in microbatch_seconds) * (1 - 1e-9)
    counts = [int(even_share / seconds) for seconds in microbatch_seconds]

    def done_with_one_more(device: int) -> tuple[float, int]:
        return (counts[device] + 1) * microbatch_seconds[device], -device

    while sum(counts) < count:
        counts[min(range(len(counts)), key=done_with_one_more)] += 1
    return counts


def assign(samples: int, micro_batch_size: int, numbers: range, rounds: int) -> Assignment:
    """The work of a device that has these microbatches of a step of `samples`."""
    intervals = split_batch(samples, micro_batch_size)
    idle = (None,) * (rounds - len(numbers))
    return Assignment(idle + tuple(intervals[number] for number in numbers))


def accumulation_steps(
    count: int, num_devices: int, microbatch_seconds: Sequence[float] = ()
) -> int:
    """The rounds of a step: as many as the device with the most microbatches needs."""
    if microbatch_seconds:
        return max(_earliest_finish(count, microbatch_seconds))
    return -(-count // num_devices)


class TreeSum(Generic[T]):
    """A sum over the microbatches of a step along one binary tree.

    The tree depends only on the number of microbatches, so the sum has the same bits whichever
    device computes which part. A node is the sum of its two children, (level - 1, 2 * index) and
    (level - 1, 2 * index + 1). Where the right child would begin at or beyond `count`, the node has
    the value of the left child.

    Values are given from left to right; some may be left out, because another device has them.
    Siblings are added as soon as both are there: of neighbouring microbatches at most
    log2(count) + 1 values are held.

    add: (left, right) -> their sum; it may overwrite both.
    """

    def __init__(self, count: int, add: Callable[[T, T], T]) -> None:
        self._count, self._add = count, add
        self.held: list[tuple[Node, T]] = []

    def give(self, node: Node, value: T) -> None:
        """Add the value of one node; (0, number) is a microbatch."""
        while True:
            (level, index), size = node, 1 << node[0]
            if index % 2 and self.held and self.held[-1][0] == (level, index - 1):
                value = self._add(self.held.pop()[1], value)
            elif index % 2 or (index + 1) * size < self._count or size >= self._count:
                break  # its left sibling is elsewhere, its right one is yet to come, or it is all
            node = (level + 1, index // 2)
        self.held.append((node, value))

    def take(self, node: Node) -> T | None:
        """Remove and return the last value held, if it is this node's, to add it elsewhere."""
        return self.held.pop()[1] if self.held and self.held[-1][0] == node else None

    def total(self) -> T:
        """The sum of all microbatches, each of which has been given."""
        ((_, value),) = self.held
        return value


def subtrees(mine: range, count: int) -> list[Node]:
    """The nodes whose sums one device has after its microbatches `mine`, from left to right: the
    largest nodes that lie within them.
    """
    sums: TreeSum[None] = TreeSum(count, lambda _left, _right: None)
    for number in mine:
        sums.give((0, number), None)
    return [node for node, _ in sums.held]
