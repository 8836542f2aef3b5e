"""The reducer that adds along the step's tree (core/determinism/microbatches.py), so that the sum
has the same bits on any devices.

autograd itself adds the gradient of every second microbatch to that of its left neighbour, so
gradient accumulation costs what it always does. Over ranks each one holds some nodes of the tree,
and is responsible for one shard of all gradients. It sends every other rank that rank's shard of
its nodes (all_to_all), adds up its own shard along the tree, and gets the sums of all shards
(all_gather). No collective adds anything.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

# public in torch.distributed, where type checkers don't see it
from torch._C._distributed_c10d import Work

from samecurve.core.determinism.microbatches import Node, TreeSum, subtrees
from samecurve.core.planning.plan import Plan
from samecurve.core.protocols import MicroBatch
from samecurve.torch_engine.process_group import Comm
from samecurve.torch_engine.strategies.reducers import Reducer, clear
from samecurve.torch_engine.strategies.reducers.buckets import (
    Bucket,
    GradientQueue,
    Gradients,
    cut_into_buckets,
)
from samecurve.torch_engine.strategies.row_norm import RowSquares, norm_of_rows

# torch 2.13 renamed it
_all_gather: Any = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_AHEAD = 2  # buckets that are on their way before the first of them is waited for
Held = Sequence[tuple[Node, Gradients]]  # the nodes of a step's tree that a rank has
NodesByRank = Sequence[Sequence[Node]]
Received = Callable[[], Iterator[tuple[Node, torch.Tensor]]]  # waits for the pieces of nodes


class Tree(Reducer):
    """Adds along the tree in one process, which has one device or several."""

    def __init__(self, plan: Plan, comm: Comm, replicas: Sequence[Sequence[nn.Parameter]]) -> None:
        super().__init__(plan, comm, replicas)
        self._squares: RowSquares | None = None
        self._buckets = [slice(None)]  # what is sent together: here all of them, to nobody
        self._queues = self._make_queues()  # by device
        # by device: the node of the tree that its microbatch is, or completes
        self._nodes: list[Node] = [(0, 0) for _ in replicas]

    def _make_queues(self) -> list[GradientQueue]:
        return [GradientQueue([parameters], in_tree=True) for parameters in self._replicas]

    def begin_step(self, num_microbatches: int) -> None:
        super().begin_step(num_microbatches)
        self._num_microbatches = num_microbatches
        self._with_gradient: set[int] = set()  # ids of the first replica's parameters
        # by device and bucket
        self._sums = [
            [TreeSum[Gradients](num_microbatches, add_gradients) for _ in self._buckets]
            for _ in self._replicas
        ]

    def begin_microbatch(self, device_index: int, microbatch: MicroBatch, *, is_last: bool) -> None:
        """The backward pass of an odd microbatch adds to the gradients of the even one before it,
        if this device has that one. Any other microbatch begins without gradients.
        """
        sums, number = self._sums[device_index], microbatch.number
        left_siblings = [one.take((0, number - 1)) for one in sums] if number % 2 else [None]
        is_paired = left_siblings[0] is not None  # in every bucket, or in none
        self._nodes[device_index] = (1, number // 2) if is_paired else (0, number)
        if not is_paired:
            clear(self._replicas[device_index])
        self._queues[device_index].begin_pass(is_last=is_last)

    def end_microbatch(self, device_index: int) -> None:
        self._queues[device_index].end_pass()
        for number in range(len(self._buckets)):
            self._add(device_index, number)

    def _add(self, device_index: int, bucket: int) -> None:
        """Add the gradients of a bucket to the tree."""
        parameters = self._replicas[device_index][self._buckets[bucket]]
        gradients = [parameter.grad for parameter in parameters]
        self._sums[device_index][bucket].give(self._nodes[device_index], gradients)

    def _note_gradients(self, bucket: slice, held: Held) -> None:
        for _, gradients in held:
            pairs = zip(self._replicas[0][bucket], gradients, strict=True)
            self._with_gradient |= {id(one) for one, gradient in pairs if gradient is not None}

    def has_gradient(self, parameter: nn.Parameter) -> bool:
        return id(parameter) in self._with_gradient

    def norm(self, gradients: list[torch.Tensor]) -> torch.Tensor:
        shapes = [gradient.shape for gradient in gradients]
        if self._squares is None or self._squares.shapes != shapes:  # of the step's other update
            self._squares = RowSquares(gradients)
        return norm_of_rows(self._squares(gradients))

    def reduce(self) -> None:
        total: TreeSum[Gradients] = TreeSum(self._num_microbatches, add_gradients)
        first = self._replicas[0]
        device = first[0].device
        for sums in self._sums:
            self._note_gradients(slice(None), sums[0].held)
            for node, held in sums[0].held:
                total.give(node, [None if grad is None else grad.to(device) for grad in held])
        self._sums = []
        for others in self._replicas[1:]:
            clear(others)
        summed = total.total()
        if present := [gradient for gradient in summed if gradient is not None]:
            torch._foreach_add_(present, 0.0)  # as without_negative_zeros()
        for parameter, gradient in zip(first, summed, strict=True):
            if gradient is None:  # no microbatch used the parameter
                parameter.grad = torch.zeros_like(parameter)
            elif gradient.stride() == parameter.stride():
                parameter.grad = gradient
            else:  # with the parameter's strides, as TreeExchange leaves it
                parameter.grad = torch.empty_like(parameter).copy_(gradient)

    def close(self) -> None:
        for queue in self._queues:
            queue.close()


class TreeOverRanks(Tree):
    """Adds along the tree over ranks, each of which has one device. Gradients are exchanged bucket
    by bucket, while the last backward pass still runs.
    """

    def _make_queues(self) -> list[GradientQueue]:
        (self._parameters,) = self._replicas
        self._buckets = cut_into_buckets(self._parameters)
        buckets = [self._parameters[cut] for cut in self._buckets]
        batch, backend = self._plan.batch, self._plan.layout.backend
        self._exchange = TreeExchange(buckets, self._comm, backend, batch.microbatches_of)
        return [GradientQueue(buckets, self._send, in_tree=True)]

    def begin_step(self, num_microbatches: int) -> None:
        super().begin_step(num_microbatches)
        self._queues[0].begin_step()

    def end_microbatch(self, device_index: int) -> None:
        if self._queues[0].sends:
            self._queues[0].end_pass()
        else:
            super().end_microbatch(device_index)

    def _send(self, number: int) -> None:
        """Send a bucket, and free the gradients that it was made of."""
        bucket, sums = self._buckets[number], self._sums[0][number]
        if self._queues[0].sends:  # else this rank has no microbatch in this step
            self._add(0, number)
        self._note_gradients(bucket, sums.held)
        self._exchange.send(number, sums.held, self._num_microbatches)
        sums.held.clear()
        clear(self._parameters[bucket])

    def reduce(self) -> None:
        self._queues[0].send_rest()
        self._exchange.finish()


def add_gradients(left: Gradients, right: Gradients) -> Gradients:
    """The sum of two nodes of a step's tree, in the memory of the left one where it has some."""
    both = [(a, b) for a, b in zip(left, right, strict=True) if a is not None and b is not None]
    if both:
        torch._foreach_add_([a for a, _ in both], [b for _, b in both])
    return [b if a is None else a for a, b in zip(left, right, strict=True)]


class TreeExchange:
    """Adds up gradients over all ranks, along the tree.

    buckets: lists of parameters; the gradients of a bucket lie in one piece of memory
    microbatches_of: (microbatches of a step, rank) -> the neighbouring ones that the rank adds up
    """

    def __init__(
        self,
        buckets: Sequence[Sequence[nn.Parameter]],
        comm: Comm,
        backend: str,
        microbatches_of: Callable[[int, int], range],
    ) -> None:
        self._comm, self._microbatches_of = comm, microbatches_of
        self._buckets = [_Bucket(parameters, comm.world_size, backend) for parameters in buckets]
        self._nodes: dict[int, NodesByRank] = {}
        # buckets whose shards are on their way, each with the work that is left then
        self._scattered: list[tuple[_Bucket, Callable[[], None]]] = []
        self._gathered: list[tuple[_Bucket, Work]] = []

    def send(self, number: int, held: Held, num_microbatches: int) -> None:
        """Start to sum one bucket. Called by all ranks in the same order.

        held: the nodes of the step's tree that this rank has
        num_microbatches: of the whole step
        """
        bucket = self._buckets[number]
        received = bucket.scatter(held, self._nodes_by_rank(num_microbatches), self._comm)
        self._scattered.append((bucket, partial(bucket.add, received, num_microbatches)))
        if len(self._scattered) > _AHEAD:
            self._add_and_gather()  # it had time to arrive, while later buckets were computed

    def finish(self) -> None:
        """Leave the sums in the parameters' gradients."""
        while self._scattered:
            self._add_and_gather()
        for bucket, work in self._gathered:
            work.wait()
            bucket.set_gradients()
        self._gathered.clear()

    def _nodes_by_rank(self, num_microbatches: int) -> NodesByRank:
        if num_microbatches not in self._nodes:
            self._nodes[num_microbatches] = [
                subtrees(self._microbatches_of(num_microbatches, rank), num_microbatches)
                for rank in range(self._comm.world_size)
            ]
        return self._nodes[num_microbatches]

    def _add_and_gather(self) -> None:
        """Add up the bucket that was sent first, and start sending its sum to all ranks."""
        bucket, add = self._scattered.pop(0)
        add()
        self._gathered.append((bucket, bucket.gather(self._comm)))


class _Bucket(Bucket):
    """A bucket with a shard for each rank, and a piece of memory for each node that this rank has;
    the first holds the sum in the end.

    The exchanged memory is on the host where the backend is Gloo.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], world_size: int, backend: str) -> None:
        super().__init__(parameters, num_shards=world_size)
        self._is_gloo = backend == "gloo"
        self._staged = self._is_gloo and self.device.type != "cpu"
        # where the collectives run
        comm_device = torch.device("cpu") if self._staged else self.device
        self._comm_zeros = partial(torch.zeros, self.size, dtype=self.dtype, device=comm_device)
        self._received: list[torch.Tensor] = []
        self._shard_sum = self._sum = self.piece()[0]

    def scatter(self, held: Held, nodes: NodesByRank, comm: Comm) -> Received:
        """Start sending each rank its shard of every node of this rank. nodes: of each rank"""
        while len(self._received) < max(map(len, nodes)):
            self._received.append(self._comm_zeros().view(comm.world_size, self.shard_size))
        like = self._received[0]
        sent = (
            self.filled(gradients, number).to(like.device).view_as(like)
            for number, (_, gradients) in enumerate(held)
        )
        return send_nodes(sent, nodes, comm, like[:0], self._received)

    def add(self, received: Received, num_microbatches: int) -> None:
        """Sum this rank's shard along the tree, from the nodes that all ranks have sent."""
        tree: TreeSum[torch.Tensor] = TreeSum(num_microbatches, torch.Tensor.add_)
        for node, shard in received():
            tree.give(node, shard)
        self._shard_sum = without_negative_zeros(tree.total())

    def gather(self, comm: Comm) -> Work:
        """Start sending every rank the whole sum."""
        self._sum = self._comm_zeros() if self._staged else self.piece()[0]
        work: Work
        if not self._is_gloo:
            work = _all_gather(self._sum, self._shard_sum, group=comm.group, async_op=True)
            return work
        # all_to_all in place of all_gather, which took twice as long with Gloo
        rows = self._received[0]
        rows[1:] = self._shard_sum  # the shard's sum lies in the first row already
        work = dist.all_to_all_single(self._sum, rows.view(-1), group=comm.group, async_op=True)
        return work

    def set_gradients(self) -> None:
        if self._staged:
            self.piece()[0].copy_(self._sum)
        super().set_gradients()


def send_nodes(
    held: Iterable[torch.Tensor],
    nodes: NodesByRank,
    comm: Comm,
    like: torch.Tensor,
    memory: Sequence[torch.Tensor] = (),
) -> Received:
    """Start to send each rank its piece of the nodes that this rank holds.

    held: the nodes of this rank, each [ranks, size]; the next is made when the one before is sent
    nodes: those that each rank holds
    like: a tensor [0, size] of a node's form
    memory: for what is received, each [ranks, size]; none: it is allocated

    Returns what waits for the pieces of all ranks, and gives them from left to right.
    """
    size, rest = like.shape[1], iter(held)
    sendings: list[tuple[Work, torch.Tensor, torch.Tensor]] = []  # sent, and received
    for number in range(max(map(len, nodes))):
        has_node = [number < len(of_rank) for of_rank in nodes]
        sent, count = next(rest, like), sum(has_node)
        received = memory[number][:count] if memory else like.new_empty(count, size)
        work = dist.all_to_all_single(
            received.view(-1),
            sent.view(-1),
            [size * has for has in has_node],
            [sent.shape[0] and size] * comm.world_size,
            group=comm.group,
            async_op=True,
        )
        sendings.append((work, sent, received))
    return lambda: _in_order(sendings, nodes)


def _in_order(
    sendings: Sequence[tuple[Work, torch.Tensor, torch.Tensor]], nodes: NodesByRank
) -> Iterator[tuple[Node, torch.Tensor]]:
    for work, _, _ in sendings:
        work.wait()
    rows = [iter(received) for _, _, received in sendings]
    for of_rank in nodes:
        for number, node in enumerate(of_rank):
            yield node, next(rows[number])


def without_negative_zeros(total: torch.Tensor) -> torch.Tensor:
    """A whole sum with 0.0 in the place of -0.0. Whether a sum of zeros is the one or the other may
    depend on the device: a gradient that a rank does not have is a zero here, and nothing there.
    """
    return total.add_(0.0)
