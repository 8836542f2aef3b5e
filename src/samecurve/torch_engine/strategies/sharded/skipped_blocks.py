"""The blocks that no rank has called in a pass, because the model skips blocks at random."""

import re
from collections.abc import Collection
from functools import partial
from typing import Any

import torch
from torch import nn

from samecurve.torch_engine.process_group import Comm


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
