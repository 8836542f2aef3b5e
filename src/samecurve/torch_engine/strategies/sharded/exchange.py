"""Flat pieces of the gradient, added along a step's tree: of one rank, and over copies of a model
that have some of its nodes each.
"""

from collections.abc import Callable, Iterable, Sequence

import torch
import torch.distributed as dist

from samecurve.core.determinism.microbatches import Node, TreeSum
from samecurve.torch_engine.process_group import Comm
from samecurve.torch_engine.strategies.reducers.tree import NodesByRank, send_nodes


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

    def give(self, nodes: Iterable[tuple[Node, torch.Tensor]]) -> None:
        """Add the values of some nodes, from left to right. They are overwritten, and may be rows
        of larger pieces of memory, which are not kept.
        """
        nodes = list(nodes)
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
