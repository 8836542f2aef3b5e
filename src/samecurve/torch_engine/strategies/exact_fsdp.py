"""train.exact under fsdp and hsdp: weights are sharded, and sums have the bits of one device.

FSDP2 gathers whole weights, so a microbatch's gradient is that of one device. What follows is made
exact here: gradients are added along the step's tree by the owner of each shard (exact_sums.py),
under hsdp first within each copy of the model, then over the copies; the norm is taken by rows
(row_norm.py). The updates of numbers one by one are the same for a part of an array.

Under bf16 and f16 weights are gathered as they are, and autocast rounds them as on one device.

All ranks take part in each round. In the first round some may idle: they compute a dummy, which the
owners leave out.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from samecurve.core.determinism.microbatches import microbatches_of
from samecurve.core.planning.plan import Plan
from samecurve.core.protocols import MicroBatch
from samecurve.errors import UserError
from samecurve.torch_engine.optimizers.optimizer import OptimizerParam, local_view
from samecurve.torch_engine.process_group import Comm
from samecurve.torch_engine.strategies.base import Materialize
from samecurve.torch_engine.strategies.exact_sums import GroupSums, Numbers, RoundSums, ShardSums
from samecurve.torch_engine.strategies.fsdp import FSDP
from samecurve.torch_engine.strategies.fsdp_groups import all_groups, whole_weights
from samecurve.torch_engine.strategies.reducers.buckets import Gradients, note_gradient
from samecurve.torch_engine.strategies.reducers.tree_exchange import (
    Held,
    TreeExchange,
    without_negative_zeros,
)
from samecurve.torch_engine.strategies.row_norm import norm_of_rows, num_rows, squares_by_row

T = TypeVar("T")


class ExactFSDP(FSDP):
    """The exact form of fsdp and hsdp."""

    def __init__(self, plan: Plan, comm: Comm, devices: Sequence[torch.device]) -> None:
        self._copies: Comm | None = None  # the ranks with this rank's shard of the other copies
        super().__init__(plan, comm, devices)
        self._copy, self._place = divmod(comm.rank, plan.layout.shards)
        # code that asks for a weight's format (peft's layers do) must see that of one device
        self._narrow = None
        self._whole_sums = RoundSums()
        self._rounds: dict[int, list[Numbers]] = {}  # by the number of a step's microbatches
        self._round = -1
        self._used_before: set[str] | None = None  # by real microbatches, while a dummy is computed
        self._fired: set[int] = set()  # ids of weights that have a gradient of this backward pass

    def _make_mesh(self, group: dist.ProcessGroup) -> DeviceMesh:
        """The mesh of one copy's shards: FSDP2 must not add up over copies."""
        mesh = super()._make_mesh(group)
        if mesh.ndim == 1:
            return mesh
        self._copies = Comm(mesh.get_group("copy"))
        return mesh["shard"]

    def distribute(self, models: list[nn.Module], materialize: Materialize) -> None:
        """UserError: this torch has no place for another sum of gradients."""
        if not hasattr(FSDPModule, "set_custom_reduce_scatter"):
            raise UserError(
                f"train.exact: torch {torch.__version__} can't sum fsdp's gradients in another way",
                "a newer torch (2.11 does it), or --strategy ddp",
                "devices.strategy",
            )
        super().distribute(models, materialize)
        self._whole = [
            parameter
            for parameter in self.models[0].parameters()
            if parameter.requires_grad and not isinstance(parameter, DTensor)
        ]
        for parameter in self._whole:
            self._watch(parameter)

    def _set_reduction(self) -> None:
        super()._set_reduction()
        self._unwatched = all_groups(self._root)
        self._sums: Sequence[ShardSums] = self._make_sums(self._unwatched)

    def _make_sums(self, groups: Sequence[Any]) -> Sequence[ShardSums]:
        self._by_round = [GroupSums(group, self._is_repeated) for group in groups]
        return self._by_round

    def _is_repeated(self, group: Any) -> bool:
        return self._order.is_repeated(group)

    def _watch(self, parameter: torch.Tensor) -> None:
        """Refuse gradients that the tree can't reproduce (exact.py)."""
        hook = partial(note_gradient, self._fired, in_tree=True)
        parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]

    def begin_step(self, parameters: Sequence[nn.Parameter], num_microbatches: int) -> None:
        super().begin_step(parameters, num_microbatches)
        self._num_microbatches, self._round = num_microbatches, -1
        if num_microbatches not in self._rounds:
            batch = self._plan.batch
            interleaved = self._comm.rank // batch.interleaved  # the number of the group of ranks
            self._rounds[num_microbatches] = [
                *batch.numbers_by_round(num_microbatches, interleaved)
            ]
        for sums in (*self._sums, self._whole_sums):
            sums.begin_step(num_microbatches)

    def begin_microbatch(self, _index: int, microbatch: MicroBatch, *, is_last: bool) -> None:
        del is_last  # every round is summed
        self._round += 1
        for sums in self._by_round:
            sums.begin_round(self._numbers)
        self._fired.clear()
        self._used_before = None if microbatch.real else set(self._order.gradients.used)

    @property
    def _numbers(self) -> Numbers:
        """The microbatches of the interleaved ranks in the round in work."""
        return self._rounds[self._num_microbatches][self._round]

    def train(self, _device_index: int, function: Callable[..., T], *arguments: object) -> T:
        result = super().train(_device_index, function, *arguments)
        if self._unwatched:
            self._watch_gathered()
        return result

    def _watch_gathered(self) -> None:
        """Watch the gradients of the groups that have been gathered for the first time."""
        gathered = [group for group in self._unwatched if whole_weights(group)]
        self._unwatched = [group for group in self._unwatched if group not in gathered]
        for group in gathered:
            for parameter in whole_weights(group):
                if parameter.requires_grad:
                    self._watch(parameter)

    def end_microbatch(self, device_index: int, microbatch: MicroBatch) -> None:
        super().end_microbatch(device_index, microbatch)
        self._end_round()
        if self._used_before is not None:
            self._order.gradients.used = self._used_before

    def _end_round(self) -> None:
        """Sum what the backward pass of a round has left."""
        for sums in self._by_round:
            sums.end_round()
        if self._whole:
            self._send_whole()

    @torch.no_grad()
    def _send_whole(self) -> None:
        """Give all ranks of this copy this round's gradients of the weights that are not sharded:
        single numbers, mostly.
        """
        values = []
        for parameter in self._whole:
            if parameter.grad is None:
                values.append(torch.zeros_like(local_view(parameter)).view(-1))
            else:
                self._order.gradients.used.add(self._names[id(parameter)])
                values.append(local_view(parameter.grad).reshape(-1))
            parameter.grad = None
        num_ranks = self._shards.world_size
        sent = torch.cat(values).repeat(num_ranks)
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=self._shards.group)
        self._whole_sums.give(received.view(num_ranks, -1), self._numbers)

    @torch.no_grad()
    def reduce(self, _parameters: Sequence[nn.Parameter]) -> None:
        """Leave the sums over all microbatches in the gradients."""
        if self._copies is None:
            self._set_gradients()
        else:
            self._sum_over_copies(self._copies)

    def _set_gradients(self) -> None:
        for sums in self._sums:
            total = sums.total() if sums.is_summed else None
            if total is not None:
                sums.set_gradients(sums.split(without_negative_zeros(total)))
        total = self._whole_sums.total() if self._whole else None
        if total is not None:
            of_whole = self._split_whole(without_negative_zeros(total))
            for parameter, gradient in zip(self._whole, of_whole, strict=True):
                parameter.grad = gradient

    def _sum_over_copies(self, copies: Comm) -> None:
        """Add up what the copies of the model have, each the nodes of neighbouring microbatches."""
        summed = [sums for sums in self._sums if sums.is_summed]
        # parameters of the form of a sum's parts, for their gradients
        buckets = [[nn.Parameter(shard) for shard in sums.shards()] for sums in summed]
        held: list[Held] = [
            [(node, sums.split(sum_)) for node, sum_ in sums.held] for sums in summed
        ]
        if self._whole:
            buckets.append(self._whole)
            nodes = self._whole_sums.held
            held.append([(node, self._split_whole(sum_)) for node, sum_ in nodes])
        all_reduce = TreeExchange(
            buckets, copies, self._plan.layout.backend, self._microbatches_of_copy
        )
        for number, of_bucket in enumerate(held):
            all_reduce.send(number, of_bucket, self._num_microbatches)
        all_reduce.finish()
        for sums, bucket in zip(summed, buckets, strict=False):
            sums.set_gradients([stand_in.grad for stand_in in bucket])

    def _microbatches_of_copy(self, count: int, copy: int) -> range:
        """The numbers, of a step's `count`, that the ranks of one copy of the model compute."""
        num_copies = self._plan.layout.num_devices // self._plan.layout.shards
        return microbatches_of(count, copy, num_copies)

    def _split_whole(self, flat: torch.Tensor | None) -> Gradients:
        """The parts of a sum of the weights that are not sharded."""
        if flat is None:
            return [None] * len(self._whole)
        sizes = [local_view(parameter.detach()).numel() for parameter in self._whole]
        parts = torch.split(flat, sizes)
        # complex numbers begin at even places, which a part need not
        numbers = [
            torch.view_as_complex(part.reshape(-1, 2).clone()) if weight.is_complex() else part
            for weight, part in zip(self._whole, parts, strict=True)
        ]
        return [part.view(one.shape) for one, part in zip(self._whole, numbers, strict=True)]

    def norm(
        self, trained: Sequence[OptimizerParam], gradients: list[torch.Tensor]
    ) -> torch.Tensor:
        """The norm of the whole gradient, from the sums of all rows, which the ranks of a copy put
        together.
        """
        sums = []
        for param, gradient in zip(trained, gradients, strict=True):
            own = squares_by_row(gradient).to(self._device)
            if not isinstance(param.parameter, DTensor):
                sums.append(own if self._place == 0 else torch.zeros_like(own))
                continue
            of_rows = own.new_zeros(num_rows(param.parameter.shape))
            begin = self._place * -(-len(of_rows) // self._shards.world_size)
            of_rows[begin : begin + len(own)] = own
            sums.append(of_rows)
        return norm_of_rows(self._shards.all_reduce(torch.cat(sums))())
