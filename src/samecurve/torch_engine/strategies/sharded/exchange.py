"""The nodes of a step's tree that ranks have, exchanged between them and added up.

Each rank answers for one piece of the numbers: it is sent that piece of every node of every rank.
"""

from collections.abc import Callable, Iterator, Sequence

import torch
import torch.distributed as dist

# public in torch.distributed, where type checkers don't see it
from torch._C._distributed_c10d import Work

from samecurve.core.determinism.microbatches import Node, TreeSum
from samecurve.torch_engine.process_group import Comm

NodesByRank = Sequence[Sequence[Node]]
_Sending = tuple[Work, torch.Tensor, torch.Tensor]  # what was sent, and what is received


def send_nodes(
    held: Sequence[torch.Tensor], nodes: NodesByRank, comm: Comm, like: torch.Tensor
) -> Callable[[], list[tuple[Node, torch.Tensor]]]:
    """Start to send each rank its piece of the nodes that this rank holds, each [ranks, size].

    nodes: those that each rank holds
    like: a tensor of a node's form

    Returns what waits for the pieces of all ranks, and gives them from left to right.
    """
    sendings: list[_Sending] = []
    for number in range(max(map(len, nodes))):
        has_node = [number < len(of_rank) for of_rank in nodes]
        size = like.shape[1]
        sent = held[number] if number < len(held) else like.new_empty(0, size)
        received = like.new_empty(sum(has_node), size)
        work = dist.all_to_all_single(
            received.view(-1),
            sent.view(-1),
            [size * has for has in has_node],
            [size * (number < len(held))] * comm.world_size,
            group=comm.group,
            async_op=True,
        )
        sendings.append((work, sent, received))
    return lambda: list(_in_order(sendings, nodes))


def _in_order(
    sendings: Sequence[_Sending], nodes: NodesByRank
) -> Iterator[tuple[Node, torch.Tensor]]:
    for work, _, _ in sendings:
        work.wait()
    rows = [iter(received) for _, _, received in sendings]
    for of_rank in nodes:
        for number, node in enumerate(of_rank):
            yield node, next(rows[number])


class FlatTree:
    """The sum of flat pieces of the gradient along a step's tree."""

    def __init__(self, num_microbatches: int) -> None:
        self._tree: TreeSum[torch.Tensor] = TreeSum(num_microbatches, torch.Tensor.add_)

    @property
    def held(self) -> list[tuple[Node, torch.Tensor]]:
        """The sums of the tree's nodes that there are so far."""
        return self._tree.held

    def total(self) -> torch.Tensor:
        return self._tree.total()

    def give(self, nodes: Sequence[tuple[Node, torch.Tensor]]) -> None:
        """Add the values of some nodes, from left to right. They are overwritten, and may be rows
        of larger pieces of memory, which are not kept.
        """
        memory = {_memory(values) for _, values in nodes}
        for node, values in nodes:
            self._tree.give(node, values)
        self._tree.held = [
            (node, values.clone() if _is_part(values, memory) else values)
            for node, values in self._tree.held
        ]


def sum_over_copies(
    held: Sequence[torch.Tensor], nodes: NodesByRank, count: int, comm: Comm, like: torch.Tensor
) -> Callable[[], torch.Tensor]:
    """Start to add up, along the tree, flat sums of which each rank holds some nodes.

    nodes: those of each rank; count: the step's microbatches; like: a tensor of a node's form

    Returns what waits and gives the whole sum, the same on all ranks.
    """
    size, ranks = len(like), comm.world_size
    piece = -(-size // ranks)
    padded = [like.new_zeros(ranks, piece) for _ in held]
    for rows, values in zip(padded, held, strict=True):
        rows.view(-1)[:size] = values
    received = send_nodes(padded, nodes, comm, like.new_empty(0, piece))

    def total() -> torch.Tensor:
        tree = FlatTree(count)
        tree.give(received())
        sums = [like.new_empty(piece) for _ in range(ranks)]
        dist.all_gather(sums, tree.total().contiguous(), group=comm.group)
        return torch.cat(sums)[:size]

    return total


def _memory(values: torch.Tensor) -> int:
    return values.untyped_storage().data_ptr()


def _is_part(values: torch.Tensor, memory: set[int]) -> bool:
    """Whether values are a part of some larger piece of memory."""
    larger = values.untyped_storage().nbytes() > values.nbytes
    return larger and _memory(values) in memory
