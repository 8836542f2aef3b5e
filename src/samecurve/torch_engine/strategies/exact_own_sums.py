"""Whole gradients of one rank's microbatches, added along the step's tree until the ranks exchange
them, once a step.
"""

from collections.abc import Callable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import nn

# public in torch.distributed, where type checkers don't see it
from torch._C._distributed_c10d import Work

from samecurve.core.determinism.microbatches import Node, TreeSum
from samecurve.torch_engine.process_group import Comm, real_pairs
from samecurve.torch_engine.strategies.exact_sums import RoundSums, ShardSums
from samecurve.torch_engine.strategies.group_gradients import is_trained
from samecurve.torch_engine.strategies.reducers.buckets import Gradients
from samecurve.torch_engine.strategies.reducers.tree import add_gradients
from samecurve.torch_engine.strategies.reducers.tree_exchange import Held

# nodes on their way: the work to wait for, what this rank sends, what it is sent, [ranks, size]
_Sending = tuple[Work, torch.Tensor, torch.Tensor]


class OwnSums:
    """The sums of one piece of the gradient over this rank's microbatches, which are neighbours.

    As on one device, autograd itself adds the gradient of an odd microbatch to that of the even one
    before it.

    weights: gives the piece's whole weights; None: not gathered yet
    packed: (gradients, ranks) -> what each rank is to be sent of them, [ranks, size]
    sums: of what all ranks send to this one
    """

    def __init__(
        self,
        weights: Callable[[], Sequence[nn.Parameter | None]],
        packed: Callable[[Gradients, int], torch.Tensor],
        sums: RoundSums,
    ) -> None:
        self._weights, self._packed, self._sums = weights, packed, sums
        self._tree: TreeSum[Gradients] = TreeSum(0, add_gradients)

    def begin_step(self, num_microbatches: int) -> None:
        self._tree = TreeSum(num_microbatches, add_gradients)
        self._clear()

    def begin_microbatch(self, number: int | None) -> Node | None:
        """Before a microbatch. number: None: it is a dummy, whose gradient is dropped

        Returns the node of the tree that the microbatch is, or completes.
        """
        if number is not None and number % 2 and self._tree.take((0, number - 1)) is not None:
            return 1, number // 2
        self._clear()
        return None if number is None else (0, number)

    def end_microbatch(self, node: Node | None) -> None:
        if node is None:
            self._clear()
            return
        weights = self._weights()
        self._tree.give(node, [None if weight is None else weight.grad for weight in weights])

    def take(self) -> Held:
        """The sums of the tree's nodes that there are, which are kept here no longer."""
        held, self._tree.held = self._tree.held, []
        self._clear()
        return held

    def _clear(self) -> None:
        for weight in self._weights():
            if weight is not None:
                weight.grad = None

    def send(self, nodes: Sequence[Sequence[Node]], comm: Comm) -> Callable[[], None]:
        """Start to send every rank its part of this rank's sums, whose memory is let go of.

        nodes: those that each rank has

        Returns what waits for the parts of all ranks and adds them up.
        """
        self._sums.announce()
        held = [gradients for _, gradients in self.take()]
        sendings = []
        for number in range(max(map(len, nodes))):
            gradients = held[number] if number < len(held) else None
            sendings.append(self._send(gradients, [number < len(one) for one in nodes], comm))
            if gradients is not None:
                gradients.clear()
        return lambda: self._sums.give_nodes([*_in_order(sendings, nodes)])

    def _send(self, gradients: Gradients | None, has_node: Sequence[bool], comm: Comm) -> _Sending:
        """Send one node. gradients: None: this rank has fewer nodes; has_node: by rank"""
        num_ranks = len(has_node)
        sent = self._packed(gradients or [None] * len(self._weights()), num_ranks)
        received = sent.new_empty(sum(has_node), sent.shape[1])
        size = real_pairs(sent).numel() // num_ranks
        if gradients is None:
            sent = sent[:0]
        work = dist.all_to_all_single(
            real_pairs(received).view(-1),
            real_pairs(sent).view(-1),
            [size * has for has in has_node],
            [size * (gradients is not None)] * num_ranks,
            group=comm.group,
            async_op=True,
        )
        return work, sent, received


def _in_order(
    sendings: Sequence[_Sending], nodes: Sequence[Sequence[Node]]
) -> Iterator[tuple[Node, torch.Tensor]]:
    """What the ranks have sent, from left to right, once it is there."""
    for work, _, _ in sendings:
        work.wait()
    rows = [iter(received) for _, _, received in sendings]
    for nodes_of_rank in nodes:
        for number, node in enumerate(nodes_of_rank):
            yield node, next(rows[number])


class GroupShards(ShardSums):
    """The sums of this rank's shard of one group, from whole gradients of all ranks."""

    def weights(self) -> list[nn.Parameter | None]:
        return [getattr(param, "_unsharded_param", None) for param in self._group.fsdp_params]

    def announce(self) -> None:
        super().announce()
        self._params = [param for param in self._group.fsdp_params if is_trained(param)]

    def packed(self, gradients: Gradients, num_ranks: int) -> torch.Tensor:
        """The shard of each rank, padded as FSDP2 pads it; zeros where a weight has no gradient."""
        whole = [
            torch.zeros_like(param.unsharded_param) if gradient is None else gradient
            for param, gradient in zip(self._group.fsdp_params, gradients, strict=True)
            if is_trained(param)
        ]
        shards: torch.Tensor = torch._chunk_cat(whole, 0, num_ranks)  # noqa: SLF001
        return shards
