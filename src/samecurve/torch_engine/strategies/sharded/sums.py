"""The sums of gradients of a step that gathers its weights in each round.

After the backward pass of a group in a round each rank sends every other rank that rank's shard of
its gradients. The owner of a shard adds up what it is sent: along the step's tree, or, where the
order of additions is left to the library, as a reduce-scatter does it.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch

# public in torch.distributed, where type checkers don't see it
from torch._C._distributed_c10d import Work

from samecurve.core.determinism.microbatches import Node
from samecurve.torch_engine.strategies.sharded.exchange import FlatTree
from samecurve.torch_engine.strategies.sharded.group import WeightGroup
from samecurve.torch_engine.strategies.sharded.link import ShardLink

Numbers = Sequence[int | None]  # by rank: the microbatch that it has in a round; None: it idles


class _Sending(NamedTuple):
    group: WeightGroup
    work: Work
    received: torch.Tensor
    numbers: Numbers


class RoundSums:
    """Sums over rounds, each of which gives the gradients of one microbatch of each rank.

    is_tree: whether they are added along the tree
    used: names of the weights to which this rank's microbatches of the step gave a gradient
    """

    def __init__(self, groups: Sequence[WeightGroup], link: ShardLink, *, is_tree: bool) -> None:
        self._groups = [group for group in groups if group.trained]
        self._link, self._is_tree = link, is_tree
        self.used: set[str] = set()
        self._trees: dict[int, FlatTree] = {}
        self._totals: dict[int, torch.Tensor] = {}
        self._on_their_way: list[_Sending] = []
        self._sent: list[torch.Tensor] = []  # what the stream of sums may still read
        # on their way to host memory, where the shards lie there: group's number, values, event
        self._copying: list[tuple[int, torch.Tensor, torch.cuda.Event]] = []
        self._numbers: Numbers = ()
        self._is_real = True

    def begin_step(self, num_microbatches: int) -> None:
        self.drop()
        self.used.clear()
        self._trees = {group.number: FlatTree(num_microbatches) for group in self._groups}

    def begin_round(self, numbers: Numbers, *, is_real: bool, is_last: bool) -> None:
        """numbers: of the microbatches; is_real: whether this rank has one, and no dummy"""
        del is_last  # all rounds are summed alike
        self._numbers, self._is_real = numbers, is_real

    def send(self, group: WeightGroup) -> None:
        """Begin to sum a group's gradients. All ranks call it in the same order."""
        group.is_summed = True
        self.finish()  # of the group before, which had the time of a block to arrive
        if self._is_real:
            self.used |= group.names_with_gradient()
        sent = group.packed(group.gradients())
        group.drop_gradients()
        with self._link.summing():
            if self._is_tree:
                received = torch.empty_like(sent)
                work = self._link.all_to_all(received, sent)
            else:
                received = sent.new_empty(group.gradient_size)
                work = self._link.reduce_scatter(received, sent.view(-1))
            self._on_their_way.append(_Sending(group, work, received, self._numbers))
            del received  # _add() gives it back
            if self._link.has_streams:
                self._add()
        self._sent.append(sent)

    @torch.no_grad()
    def end_round(self) -> None:
        self.finish()
        for number, copied, event in self._copying:
            event.synchronize()
            self._add_to_total(number, copied)
        self._copying.clear()

    @torch.no_grad()
    def _add(self) -> None:
        """Add up what was sent first."""
        group, work, received, numbers = self._on_their_way.pop(0)
        work.wait()
        if self._is_tree:
            pairs = zip(numbers, received, strict=True)
            nodes = [((0, number), values) for number, values in pairs if number is not None]
            self._trees[group.number].give(nodes)
        elif self._link.home == self._link.device:
            self._add_to_total(group.number, received)
        else:
            copied, event = self._link.copy_home(received)
            self._copying.append((group.number, copied, event))

    def _add_to_total(self, number: int, values: torch.Tensor) -> None:
        if number in self._totals:
            self._totals[number].add_(values)
        else:
            self._totals[number] = values

    def finish(self) -> None:
        """Wait for all sums that are on their way."""
        while self._on_their_way:
            self._add()
        self._link.wait_for_sums()
        self._sent.clear()

    def drop(self) -> None:
        """Let go of all sums, those of a step that was not finished, too."""
        for sending in self._on_their_way:
            sending.work.wait()
        self._on_their_way.clear()
        self._link.wait_for_sums()
        self._sent.clear()
        self._copying.clear()
        self._trees.clear()
        self._totals.clear()

    def held(self, group: WeightGroup) -> list[tuple[Node, torch.Tensor]]:
        """The sums of the tree's nodes that there are."""
        return self._trees[group.number].held

    def take_totals(self) -> dict[int, torch.Tensor]:
        """The sums over this copy of the model, by group's number; they are kept here no longer."""
        totals = dict(self._totals)
        if self._is_tree:
            totals = {group.number: self._trees[group.number].total() for group in self._groups}
        self.drop()
        return totals
