"""Events of a pass under fsdp, in their order: 2n gathers the weights of group n, 2n + 1 sums its
gradients. A forward pass and a backward pass each have an end.
"""

import re
from collections.abc import Hashable, Sequence

END = -1


def is_sum(event: int) -> bool:
    return event != END and event % 2 == 1


def num_repeats(order: Sequence[int]) -> int:
    """How many gathers of a forward pass gather a block once more."""
    gathers = order[: order.index(END)]
    return len(gathers) - len(set(gathers))


class CallCounts:
    """The functions that call blocks now more often, now less, as they work in chunks."""

    def __init__(self) -> None:
        self._repeats: dict[Hashable, int] = {}  # of a first pass
        self._varying: set[Hashable] = set()

    def compare(
        self, key: tuple[Hashable, ...], order: Sequence[int], *, has_diverged: bool
    ) -> None:
        """Notice, in a pass that all ranks learnt together, that the number of calls varies.

        key: whether the pass has gradients and a backward pass, and the function that was called
        has_diverged: whether ranks went different ways in this pass
        """
        repeats = num_repeats(order)
        varies = self._repeats.setdefault(key, repeats) != repeats
        if varies or (repeats and has_diverged):
            self._varying.add(key[1:])

    def vary(self, key: tuple[Hashable, ...]) -> bool:
        return key[1:] in self._varying


def add_skipped_blocks(order: list[int], blocks: list[list[int]]) -> bool:
    """Give blocks that no rank has called a place in the order, beside those of their list.

    order: a forward and a backward pass, each with its end; changed in place
    blocks: the groups of each

    Returns False where their place is not known: the model calls its groups, each for the first
    time, in another order than that of their numbers.
    """
    end = order.index(END)
    forward, backward = order[:end], order[end + 1 : -1]
    firsts = list(dict.fromkeys(forward))
    if blocks and firsts != sorted(firsts):
        return False
    for groups in blocks:
        gathers = [2 * group for group in groups]
        lower = max((event for event in forward if event < gathers[0]), default=None)
        at = 0 if lower is None else len(forward) - forward[::-1].index(lower)
        later = forward[at : at + 1]
        forward[at:at] = gathers
        if backward:
            sums = [gather + 1 for gather in reversed(gathers)]
            backward = [event for event in backward if event not in sums]
            at = backward.index(later[0] + 1) + 1 if later else 0
            backward[at:at] = [*gathers, *sums]
    order[:] = [*forward, END, *backward, END]
    return True


def skipped_blocks(called: set[int], titles: list[str]) -> list[list[int]]:
    """The groups that no rank has called, by block: those in lists of which a block was called."""
    called_blocks = [pair for group in called for pair in _blocks(titles[group])]
    lists = {before for before, _ in called_blocks}
    skipped: dict[str, list[int]] = {}
    for group in sorted(set(range(len(titles))) - called):
        for before, block in _blocks(titles[group]):  # the outermost one that was not called
            if before in lists and (before, block) not in called_blocks:
                skipped.setdefault(block, []).append(group)
                break
    return list(skipped.values())


def _blocks(title: str) -> list[tuple[str, str]]:
    """(list, block) for each numbered block that a module lies in: layers, layers.3."""
    ends = [match.span() for match in re.finditer(r"(?<=\.)\d+(?=\.|$)", title)]
    return [(title[:begin], title[:end]) for begin, end in ends]
