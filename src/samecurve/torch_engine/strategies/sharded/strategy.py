"""fsdp and hsdp: weights, gradients and optimizer state are sharded over devices. The weights of a
block are gathered while the block runs.

A group of weights is one piece of memory that comes and goes (group.py); the order in which groups
are gathered is learnt in a first pass (order.py), and sums have their places in it (sums.py). A
step gathers weights and sums gradients in each round or, where memory is there, once (once.py).

Under bf16 and f16 the weights that autocast would round anyway (those of linear and convolution
layers) are gathered in two bytes, and embeddings as they are. So the arithmetic is that of the
other strategies. Where every bit counts all are gathered as they are, since code that asks for a
weight's format must see that of one device.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeGuard, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from samecurve.core.determinism.microbatches import subtrees
from samecurve.core.planning.plan import Plan
from samecurve.core.protocols import MicroBatch
from samecurve.torch_engine.model.sharded_parameter import ShardedParameter
from samecurve.torch_engine.optimizers import OptimizerParam
from samecurve.torch_engine.process_group import Comm, end_group
from samecurve.torch_engine.strategies import Materialize, Strategy
from samecurve.torch_engine.strategies.reducers.buckets import note_gradient
from samecurve.torch_engine.strategies.reducers.tree import (
    NodesByRank,
    without_negative_zeros,
)
from samecurve.torch_engine.strategies.row_norm import RowSquares, norm_of_rows
from samecurve.torch_engine.strategies.sharded.exchange import sum_over_copies
from samecurve.torch_engine.strategies.sharded.gathers import Gathers
from samecurve.torch_engine.strategies.sharded.link import ShardLink
from samecurve.torch_engine.strategies.sharded.once import OnceOrder, OnceSums
from samecurve.torch_engine.strategies.sharded.order import GatherOrder
from samecurve.torch_engine.strategies.sharded.partition import Cutter
from samecurve.torch_engine.strategies.sharded.passes import WeightReads
from samecurve.torch_engine.strategies.sharded.sums import Numbers, RoundSums
from samecurve.torch_engine.strategies.sharded.weight import Weight
from samecurve.torch_engine.whole_matrices import (
    MatrixFunction,
    Shard,
    gathered_whole,
    map_shards,
    meeting_place,
)

T = TypeVar("T")
_NARROW = {"bf16": torch.bfloat16, "f16": torch.float16}
_AHEAD = 2  # groups whose sums over the copies are on their way at once


class Sharded(Strategy):
    """The sharded strategies, with either reducer.

    fsdp has as many shards as ranks. hsdp has fewer: several copies of the model, each sharded, and
    gradients are summed over the copies after the last round.
    """

    gathers_weights = True

    def __init__(self, plan: Plan, comm: Comm, devices: Sequence[torch.device]) -> None:
        assert comm.group is not None
        super().__init__(plan, comm, devices)
        self._by_tree = plan.compute.reducer == "tree"
        self._device = devices[0]
        self._own_groups: list[dist.ProcessGroup] = []  # made here, and so ended here
        self._shards, self._copies = self._make_comms(comm.group)
        self._copy = comm.rank // plan.layout.shards
        home = torch.device("cpu") if plan.keeps_state_on_host else self._device
        self._link = ShardLink(self._shards, self._device, home)
        self._fired: set[int] = set()  # ids of weights that have a gradient of this backward pass
        self._reads = WeightReads(self._link, self._note_gradient)
        self._rounds: dict[int, list[Numbers]] = {}  # by the number of a step's microbatches
        self._count, self._round, self._is_last = 0, -1, False
        self._squares: RowSquares | None = None

    def _make_comms(self, group: dist.ProcessGroup) -> tuple[Comm, Comm | None]:
        """The ranks with the other shards of this copy of the model, and those with this shard of
        the other copies.
        """
        shards = self._plan.layout.shards
        if shards == self._comm.world_size:
            return Comm(group), None
        by_copy = torch.tensor(dist.get_process_group_ranks(group)).view(-1, shards)
        # every process makes all groups, in the same order
        for ranks in (*by_copy.T.tolist(), *by_copy.tolist()):
            new_group = dist.new_group(ranks)
            if dist.get_rank() in ranks:
                self._own_groups.append(new_group)
        copies, of_copy = self._own_groups
        return Comm(of_copy), Comm(copies)

    def close(self) -> None:
        super().close()
        self._reads.close()
        for group in self._own_groups:
            end_group(group)

    # --- laying out

    def distribute(self, models: list[nn.Module], materialize: Materialize) -> None:
        model = models[0]
        narrow = None if self._by_tree else _NARROW.get(self._plan.compute.precision)
        parts = Cutter(model, self._link, narrow, self._reads.read).cut(materialize)
        self._groups = parts.groups
        for buffer in model.buffers():
            buffer.data = buffer.data.to(self._device)
        self.models = [model]
        self._weights = {
            id(weight.standing): weight for group in self._groups for weight in group.weights
        }
        self._trained_whole = [  # by group: trained weights that are not cut
            (group, place)
            for group in self._groups
            for place, weight in enumerate(group.trained)
            if not weight.is_cut
        ]
        self._sums, self._order = self._make_order(model)
        self._reads.follow(self._order, self._groups, parts.blocks)

    def _make_order(self, model: nn.Module) -> tuple[RoundSums | OnceSums, Gathers]:
        groups, link, is_tree = self._groups, self._link, self._by_tree
        if self._plan.layout.gathers_once:
            once = OnceSums(groups, link, self._nodes_of_ranks, is_tree=is_tree)
            return once, OnceOrder(groups, once, link)
        sums = RoundSums(groups, link, is_tree=is_tree)
        keeps_whole = not self._plan.layout.reshards_by_block
        order = GatherOrder(model, groups, sums, link, self._comm, keeps_whole=keeps_whole)
        return sums, order

    def _note_gradient(self, whole: nn.Parameter) -> None:
        """Refuse gradients that the tree can't reproduce."""
        if self._by_tree:
            note_gradient(self._fired, whole, in_tree=True)

    # --- a step

    def begin_step(self, parameters: Sequence[nn.Parameter], num_microbatches: int) -> None:
        super().begin_step(parameters, num_microbatches)
        self._order.begin_step()
        self._sums.begin_step(num_microbatches)
        self._count, self._round = num_microbatches, -1
        if num_microbatches not in self._rounds:
            batch = self._plan.batch
            interleaved = self._comm.rank // batch.interleaved  # the number of the group of ranks
            self._rounds[num_microbatches] = [
                *batch.numbers_by_round(num_microbatches, interleaved)
            ]

    def begin_microbatch(self, _index: int, microbatch: MicroBatch, *, is_last: bool) -> None:
        self._round += 1
        self._is_last = is_last
        self._fired.clear()
        numbers = self._rounds[self._count][self._round] if self._by_tree else ()
        self._sums.begin_round(numbers, is_real=bool(microbatch.real), is_last=is_last)

    def train(self, _device_index: int, function: Callable[..., T], *arguments: object) -> T:
        self._order.begin(_key(function, arguments), trains=True)
        with self._reads.saved_weights():
            result: T = self._reads.without_views(function(self.models[0], *arguments))
        self._order.end_forward()
        return result

    def call(self, _device_index: int, function: Callable[..., T], *arguments: object) -> T:
        self._order.begin(_key(function, arguments), trains=False)
        with self._reads.saved_weights():  # a function may take gradients itself
            result: T = self._reads.without_views(function(self.models[0], *arguments))
        self._order.end()
        return result

    def end_microbatch(self, _device_index: int, _microbatch: MicroBatch) -> None:
        self._order.end(is_last=self._is_last)
        self._sums.end_round()

    def has_gradient(self, parameter: nn.Parameter) -> bool:
        return self._weights[id(parameter)].name in self._sums.used

    @torch.no_grad()
    def reduce(self, _parameters: Sequence[nn.Parameter]) -> None:
        """Leave the sums over all microbatches in the gradients of this rank's rows."""
        self._sums.finish()
        if self._copies is None:
            totals = self._sums.take_totals()
        else:
            totals = self._sum_over_copies(self._copies)
        self._share_whole(totals)
        for group in self._groups:
            if group.trained:
                group.set_gradients(without_negative_zeros(totals.pop(group.number)))

    def _sum_over_copies(self, copies: Comm) -> dict[int, torch.Tensor]:
        """Add up what the copies of the model have, each the nodes of neighbouring microbatches."""
        totals: dict[int, torch.Tensor] = {}
        waiting: list[tuple[int, Callable[[], torch.Tensor]]] = []
        nodes = self._nodes_of_copies(self._count, copies.world_size)
        of_copy = {} if self._by_tree else self._sums.take_totals()
        for group in (group for group in self._groups if group.trained):
            like = group.like_packed().new_zeros(group.gradient_size)
            if self._by_tree:
                held = [values for _, values in self._sums.held(group)]
                wait = sum_over_copies(held, nodes, self._count, copies, like)
            else:  # a copy may have had no round
                wait = copies.all_reduce(of_copy.pop(group.number, like).to(self._device))
            waiting.append((group.number, wait))
            if len(waiting) > _AHEAD:
                number, first = waiting.pop(0)
                totals[number] = first()
        totals |= {number: wait() for number, wait in waiting}
        self._sums.drop()
        return totals

    def _nodes_of_copies(self, count: int, num_copies: int) -> NodesByRank:
        """The nodes that each copy of the model has after its microbatches."""
        interleaved, shards = self._plan.batch.interleaved, self._plan.layout.shards
        if interleaved == shards:
            numbers = [
                self._plan.batch.microbatches_of_group(count, copy) for copy in range(num_copies)
            ]
            return [subtrees(of_copy, count) for of_copy in numbers]
        return [self._nodes_of_copy(count, copy) for copy in range(num_copies)]

    def _nodes_of_ranks(self, count: int) -> NodesByRank:
        """The nodes that each rank of this copy has of its own, where weights are gathered once."""
        shards = self._plan.layout.shards
        ranks = range(self._copy * shards, (self._copy + 1) * shards)
        return [subtrees(self._plan.batch.microbatches_of(count, rank), count) for rank in ranks]

    def _nodes_of_copy(self, count: int, copy: int) -> list[Any]:
        """The nodes of one copy, whose ranks have neighbouring microbatches."""
        shards, batch = self._plan.layout.shards, self._plan.batch
        ranks = range(copy * shards, (copy + 1) * shards)
        of_ranks = [batch.microbatches_of(count, rank) for rank in ranks]
        return subtrees(range(of_ranks[0].start, of_ranks[-1].stop), count)

    def _share_whole(self, totals: Mapping[int, torch.Tensor]) -> None:
        """Give all ranks the sums of weights that are not cut, which the first rank has."""
        if not self._trained_whole:
            return
        parts = [group.split(totals[group.number])[at] for group, at in self._trained_whole]
        if self._link.place:
            for part in parts:
                part.zero_()
        own = torch.cat([part.double() for part in parts]).to(self._device)
        summed = self._shards.all_reduce(own)()
        for part, values in zip(parts, torch.split(summed, list(map(len, parts))), strict=True):
            part.copy_(values)

    # --- norms, and parts of arrays

    def norm(
        self, trained: Sequence[OptimizerParam], gradients: list[torch.Tensor]
    ) -> torch.Tensor:
        """The norm of the whole gradient.

        Where every bit counts the ranks of a copy put the sums of all rows together, and these are
        added up in one order.
        """
        if not self._by_tree:
            return self._shards.all_reduce(self._squared(trained, gradients))().sqrt()
        shapes = [gradient.shape for gradient in gradients]
        if self._squares is None or self._squares.shapes != shapes:  # of the step's other update
            self._squares = RowSquares(gradients)
            self._row_places = self._places_of_rows(trained, gradients)
        places, counted, total = self._row_places
        of_rows = torch.zeros(total, dtype=torch.float64, device=self._device)
        of_rows.index_copy_(0, places, self._squares(gradients).to(self._device) * counted)
        return norm_of_rows(self._shards.all_reduce(of_rows)())

    def _squared(
        self, trained: Sequence[OptimizerParam], gradients: Sequence[torch.Tensor]
    ) -> torch.Tensor:
        """The square of this rank's part of the norm. The first rank counts what is not cut."""
        counted = [
            gradient
            for param, gradient in zip(trained, gradients, strict=True)
            if _is_cut(param.parameter) or self._link.place == 0
        ]
        squared = torch.zeros((), dtype=torch.float64, device=self._device)
        if counted:
            norms = torch._foreach_norm(counted)  # noqa: SLF001 - public nowhere
            squared += torch.stack(norms).double().square().sum().to(self._device)
        return squared

    def _places_of_rows(
        self, trained: Sequence[OptimizerParam], gradients: Sequence[torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor, int]:
        """Where this rank's rows lie among all rows of the model; 1.0 for those that it counts; and
        how many rows there are. The first rank counts those of weights that are not cut.
        """
        places, counted, total = [], [], 0
        for param, gradient in zip(trained, gradients, strict=True):
            own = gradient.shape[0] if gradient.ndim else 1
            parameter: torch.Tensor = param.parameter
            is_cut, first, rows = False, 0, own
            if _is_cut(parameter):
                is_cut, first, rows = True, parameter.first_row, parameter.shape[0]
            places.append(torch.arange(own) + total + first)
            counts = is_cut or self._link.place == 0
            counted.append(torch.full((own,), float(counts), dtype=torch.float64))
            total += rows
        in_a_row = torch.cat(places).to(self._device), torch.cat(counted).to(self._device)
        return *in_a_row, total

    def sum_over_parts(
        self, params: Sequence[OptimizerParam], values: Sequence[torch.Tensor]
    ) -> list[torch.Tensor]:
        """Sum over the shards, in one reduction."""
        cut = [number for number, param in enumerate(params) if _is_cut(param.parameter)]
        sums = list(values)
        if cut:
            flat = torch.cat([values[number] for number in cut])
            summed = self._shards.all_reduce(flat.to(self._device))().to(flat.device)
            parts = torch.split(summed, [len(values[number]) for number in cut])
            for number, part in zip(cut, parts, strict=True):
                sums[number] = part
        return sums

    def map_whole(
        self,
        params: Sequence[OptimizerParam],
        matrices: Sequence[torch.Tensor],
        function: MatrixFunction,
    ) -> Iterator[tuple[int, torch.Tensor]]:
        """Gather the matrices, compute and cut the results, within each copy of the model."""
        shards = [
            Shard(rows, tuple(param.parameter.shape))
            for param, rows in zip(params, matrices, strict=True)
        ]
        meet = meeting_place(self._plan, self._device)
        return map_shards(self._shards, shards, function, device=self._device, meet=meet)

    def put_together(
        self, shards: Sequence[tuple[torch.Tensor, tuple[int, ...]]]
    ) -> Iterator[tuple[int, torch.Tensor]]:
        meet = meeting_place(self._plan, self._device)
        return gathered_whole(self._shards, shards, meet=meet)

    def local_shard(self, tensor: torch.Tensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
        if not _is_cut(tensor):
            return super().local_shard(tensor)
        return tuple(tensor.shape), (tensor.first_row, *[0] * (tensor.ndim - 1))

    def own_part(self, parameter: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
        if not _is_cut(parameter):
            return whole
        return whole[parameter.first_row : parameter.first_row + len(parameter.own_rows)]

    def replica_index(self, tensor: torch.Tensor) -> tuple[int, int]:
        if not _is_cut(tensor):
            return super().replica_index(tensor)
        layout = self._plan.layout
        return self._copy, layout.num_devices // layout.shards

    # --- outside of a step

    def leaves(self, _device_index: int) -> dict[str, nn.Parameter]:
        """The lasting leaves, gathered or not."""
        named = self.models[0].named_parameters()
        by_name = {w.name: w for group in self._groups for w in group.trained}
        trained = {id(w.whole): w for w in by_name.values()}
        trained |= {id(w.standing): w for w in by_name.values()}
        return {name: trained[id(p)].whole for name, p in named if id(p) in trained}

    def change(self, function: Callable[..., None], *arguments: object) -> None:
        """Call the function with whole weights, then cut the changed weights into shards again."""
        wholes: dict[int, nn.Parameter] = {}
        for key, weight in self._weights.items():
            whole = nn.Parameter(self._gathered(weight), weight.standing.requires_grad)
            wholes[key] = whole
            weight.put(whole)
        function(self.models[0], *arguments)
        for weight in self._weights.values():
            module, name = weight.places[0]
            changed = self.own_part(weight.standing, getattr(module, name))
            weight.own.detach().copy_(changed)
            weight.put(weight.standing)

    def whole_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, parameter in self.models[0].named_parameters():
            yield name, self._gathered(self._weights[id(parameter)])

    @torch.no_grad()
    def _gathered(self, weight: Weight) -> torch.Tensor:
        """The whole weight, as a copy: a sum in which each process adds its part to zeros."""
        if not weight.is_cut:
            return weight.own.detach().to(self._device, copy=True)
        whole = torch.empty_strided(
            weight.shape, weight.stride, dtype=weight.dtype, device=self._device
        ).zero_()
        self.own_part(weight.standing, whole).copy_(weight.own.detach())
        self._shards.all_reduce(torch.view_as_real(whole) if whole.is_complex() else whole)()
        return whole

    def reset(self) -> None:
        super().reset()
        self._order.reset()
        self._sums.drop()
        for group in self._groups:
            group.drop_gradients()


def _key(function: Callable[..., object], arguments: Sequence[object]) -> tuple[str, ...]:
    words = [argument for argument in arguments if isinstance(argument, str)]
    return (getattr(function, "__qualname__", ""), *words)


def _is_cut(tensor: torch.Tensor) -> TypeGuard[ShardedParameter]:
    """Whether other processes have other rows of a tensor."""
    return isinstance(tensor, ShardedParameter) and tensor.is_cut
