"""train.exact under fsdp and hsdp, where a step gathers its weights once.

Weights and gradients are whole on each rank through the rounds of a step. A rank takes neighbouring
microbatches and adds its part of the tree by itself, as under ddp (exact_own_sums.py). After the
last round each rank sends the owners of shards its sums, once, and they add up the rest.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from samecurve.core.determinism.microbatches import Node, subtrees
from samecurve.core.planning.plan import Plan
from samecurve.core.protocols import MicroBatch
from samecurve.torch_engine.optimizers.optimizer import local_view
from samecurve.torch_engine.process_group import Comm
from samecurve.torch_engine.strategies.exact_fsdp import ExactFSDP
from samecurve.torch_engine.strategies.exact_own_sums import GroupShards, OwnSums
from samecurve.torch_engine.strategies.exact_sums import ShardSums
from samecurve.torch_engine.strategies.group_gradients import trains
from samecurve.torch_engine.strategies.reducers.buckets import Gradients

_AHEAD = 2  # groups that are on their way before the first of them is waited for


class ExactFSDPOnce(ExactFSDP):
    """The exact form of fsdp and hsdp that gathers weights and sends gradients once a step."""

    def __init__(self, plan: Plan, comm: Comm, devices: Sequence[torch.device]) -> None:
        super().__init__(plan, comm, devices)
        self._own: dict[int, OwnSums] = {}  # by the group's id
        self._own_whole = OwnSums(lambda: self._whole, self._packed_whole, self._whole_sums)
        self._node: Node | None = None  # that the microbatch in work is, or completes
        self._nodes: dict[int, list[list[Node]]] = {}  # by the number of a step's microbatches

    def _make_sums(self, groups: Sequence[Any]) -> Sequence[ShardSums]:
        self._by_round = []  # no round sums
        shards = {id(group): GroupShards(group) for group in groups}
        self._own = {key: OwnSums(one.weights, one.packed, one) for key, one in shards.items()}
        return list(shards.values())

    def _all_own(self) -> Iterator[OwnSums]:
        yield from self._own.values()
        yield self._own_whole

    def begin_step(self, parameters: Sequence[nn.Parameter], num_microbatches: int) -> None:
        super().begin_step(parameters, num_microbatches)
        for own in self._all_own():
            own.begin_step(num_microbatches)

    def begin_microbatch(self, index: int, microbatch: MicroBatch, *, is_last: bool) -> None:
        super().begin_microbatch(index, microbatch, is_last=is_last)
        self._order.gradients.begin_round(is_last=is_last, sums=False)
        (number,) = self._numbers
        for own in self._all_own():
            self._node = own.begin_microbatch(number)

    def _end_round(self) -> None:
        with_gradient = (one for one in self._whole if one.grad is not None)
        self._order.gradients.used |= {self._names[id(parameter)] for parameter in with_gradient}
        for own in self._all_own():
            own.end_microbatch(self._node)

    @torch.no_grad()
    def reduce(self, parameters: Sequence[nn.Parameter]) -> None:
        called = [self._own[id(group)] for group in self._called_groups()]
        if self._whole:
            called.append(self._own_whole)
        nodes, on_their_way = self._nodes_by_rank(), list[Callable[[], None]]()
        for own in called:
            on_their_way.append(own.send(nodes, self._shards))
            if len(on_their_way) > _AHEAD:
                on_their_way.pop(0)()
        for add in on_their_way:
            add()
        self._order.gradients.drop()
        super().reduce(parameters)

    def _called_groups(self) -> list[Any]:
        """The groups of trained weights that some rank has called in this step."""
        return [*filter(trains, self._order.gradients.kept_groups())]

    def _nodes_by_rank(self) -> list[list[Node]]:
        """The nodes that each rank of this copy has after its microbatches."""
        count, num_ranks = self._num_microbatches, self._shards.world_size
        if count not in self._nodes:
            ranks = range(self._copy * num_ranks, (self._copy + 1) * num_ranks)
            numbers = [self._plan.batch.microbatches_of(count, rank) for rank in ranks]
            self._nodes[count] = [subtrees(of_rank, count) for of_rank in numbers]
        return self._nodes[count]

    def _packed_whole(self, gradients: Gradients, num_ranks: int) -> torch.Tensor:
        """All gradients of the weights that are not sharded, for each rank."""
        flat = [
            local_view(torch.zeros_like(parameter) if gradient is None else gradient).reshape(-1)
            for parameter, gradient in zip(self._whole, gradients, strict=True)
        ]
        return torch.cat(flat).expand(num_ranks, -1).contiguous()
