"""Sums over ranks whose bits do not depend on the number of ranks.

Each rank holds some nodes of a step's tree, and is responsible for one shard of all gradients. It
sends every other rank that rank's shard of its nodes (all_to_all), adds up its own shard along the
tree, and gets the sums of all shards (all_gather). No collective adds anything.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

# public in torch.distributed, where type checkers don't see it
from torch._C._distributed_c10d import Work

from samecurve.core.determinism.microbatches import Node, TreeSum, subtrees
from samecurve.torch_engine.process_group import Comm
from samecurve.torch_engine.strategies.reducers.buckets import Bucket, Gradients

# torch 2.13 renamed it
_all_gather: Any = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_AHEAD = 2  # buckets that are on their way before the first of them is waited for
Held = Sequence[tuple[Node, Gradients]]  # the nodes of a step's tree that a rank has


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
        self._nodes: dict[int, list[list[Node]]] = {}
        # buckets whose shards are on their way, each with the work that is left then
        self._scattered: list[tuple[_Bucket, Callable[[], None]]] = []
        self._gathered: list[tuple[_Bucket, Work]] = []

    def send(self, number: int, held: Held, num_microbatches: int) -> None:
        """Start to sum one bucket. Called by all ranks in the same order.

        held: the nodes of the step's tree that this rank has
        num_microbatches: of the whole step
        """
        nodes = self._nodes_by_rank(num_microbatches)
        bucket = self._buckets[number]
        sends = bucket.scatter(held, nodes, self._comm)
        self._scattered.append((bucket, partial(bucket.add, sends, nodes, num_microbatches)))
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

    def _nodes_by_rank(self, num_microbatches: int) -> list[list[Node]]:
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

    def scatter(
        self,
        held: Held,
        nodes: Sequence[Sequence[Node]],
        comm: Comm,
    ) -> list[tuple[Work, torch.Tensor]]:
        """Start sending each rank its shard of every node of this rank.

        nodes: the nodes of each rank

        Returns pairs: the work to wait for, and the tensor that must live until then.
        """
        sends = []
        for number in range(max(map(len, nodes))):
            if number == len(self._received):
                self._received.append(self._comm_zeros())
            received = self._received[number]
            if number < len(held):
                sent = self.filled(held[number][1], number).to(received.device)
                sent_sizes = [self.shard_size] * comm.world_size
            else:
                sent, sent_sizes = received[:0], [0] * comm.world_size
            received_sizes = [self.shard_size if number < len(others) else 0 for others in nodes]
            work = dist.all_to_all_single(
                received[: sum(received_sizes)],
                sent,
                received_sizes,
                sent_sizes,
                group=comm.group,
                async_op=True,
            )
            sends.append((work, sent))
        return sends

    def add(
        self,
        sends: Sequence[tuple[Work, torch.Tensor]],
        nodes: Sequence[Sequence[Node]],
        num_microbatches: int,
    ) -> None:
        """Sum this rank's shard along the tree, from the nodes that all ranks have sent."""
        for work, _ in sends:
            work.wait()
        tree: TreeSum[torch.Tensor] = TreeSum(num_microbatches, torch.Tensor.add_)
        offsets = [0] * len(sends)
        for nodes_of_rank in nodes:
            for number, node in enumerate(nodes_of_rank):
                begin = offsets[number]
                offsets[number] += self.shard_size
                tree.give(node, self._received[number][begin : offsets[number]])
        self._shard_sum = without_negative_zeros(tree.total())

    def gather(self, comm: Comm) -> Work:
        """Start sending every rank the whole sum."""
        self._sum = self._comm_zeros() if self._staged else self.piece()[0]
        work: Work
        if not self._is_gloo:
            work = _all_gather(self._sum, self._shard_sum, group=comm.group, async_op=True)
            return work
        # all_to_all in place of all_gather, which took twice as long with Gloo
        rows = self._received[0].view(comm.world_size, self.shard_size)
        rows[1:] = self._shard_sum  # the shard's sum lies in the first row already
        work = dist.all_to_all_single(self._sum, self._received[0], group=comm.group, async_op=True)
        return work

    def set_gradients(self) -> None:
        if self._staged:
            self.piece()[0].copy_(self._sum)
        super().set_gradients()


def without_negative_zeros(total: torch.Tensor) -> torch.Tensor:
    """A whole sum with 0.0 in the place of -0.0. Whether a sum of zeros is the one or the other may
    depend on the device: a gradient that a rank does not have is a zero here, and nothing there.
    """
    return total.add_(0.0)
