"""Events of a pass under fsdp, in their order: 2n gathers the weights of group n, 2n + 1 sums its
gradients. A forward pass and a backward pass each have an end.
"""

import re
from collections.abc import Collection, Hashable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from samecurve.torch_engine.process_group import Comm

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


class ListOwners:
    """Notes, in a pass that is learnt, which modules are called that hold a list of blocks. A model
    that skips blocks at random may skip a whole list; a module that is not called skips nothing.

    titles: of all groups
    """

    def __init__(self, model: nn.Module, titles: list[str]) -> None:
        self._lists = sorted({_blocks(title)[0][0] for title in titles if _blocks(title)})
        self._owners = [_owner(model, path) for path in self._lists]
        self._called: set[str] = set()
        self._hooks: list[Any] = []

    def watch(self) -> None:
        """Note the calls from now on."""
        self._end_watch()
        self._called.clear()
        for path, owner in zip(self._lists, self._owners, strict=True):
            self._hooks.append(owner.register_forward_pre_hook(partial(self._note, path)))

    def _note(self, path: str, *_: object) -> None:
        self._called.add(path)

    def _end_watch(self) -> None:
        while self._hooks:
            self._hooks.pop().remove()

    def lists_at_work(self, comm: Comm, device: torch.device) -> list[str]:
        """The lists whose owner was called since watch(), by any rank. All ranks ask together."""
        self._end_watch()
        flags = [float(path in self._called) for path in self._lists]
        self._called.clear()
        counts = comm.all_reduce(torch.tensor(flags, dtype=torch.float64, device=device))().tolist()
        return [path for path, count in zip(self._lists, counts, strict=True) if count]


def _owner(model: nn.Module, path: str) -> nn.Module:
    """The module that holds a list, and calls its blocks; the list may lie in other containers."""
    while path:
        path = path.removesuffix(".").rpartition(".")[0]
        owner = model.get_submodule(path)
        if not isinstance(owner, nn.ModuleList | nn.ModuleDict):
            return owner
    return model


def skipped_blocks(
    called: set[int], titles: list[str], at_work: Collection[str] = ()
) -> list[list[int]]:
    """The groups that no rank has called, by block: those in lists of which a block was called, or
    whose owner was; all blocks, where none was called.

    called: groups; at_work: lists whose owner was called
    """
    called_blocks = [pair for group in called for pair in _blocks(titles[group])]
    lists = {before for before, _ in called_blocks}.union(at_work)
    if not called_blocks:
        lists.update(before for title in titles for before, _ in _blocks(title))
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
