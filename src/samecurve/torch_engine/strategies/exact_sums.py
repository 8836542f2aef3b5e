"""Sums of a sharded model's gradients along the step's tree, group by group.

FSDP2 sums a group's gradients after the backward pass of each round, in an order of its own. Here
each rank sends every other rank that rank's shard of its gradients instead (all_to_all), and adds
up its own shard of all ranks' gradients along the tree. In a round the ranks have neighbouring
microbatches, so of a step of n microbatches at most log2(n) + 1 shards are held. (Where weights are
gathered once a step, exact_own_sums.py gives the values.)
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from samecurve.core.determinism.microbatches import Node, TreeSum
from samecurve.errors import UserError
from samecurve.torch_engine.process_group import real_pairs
from samecurve.torch_engine.strategies.fsdp_groups import due_for_sum
from samecurve.torch_engine.strategies.reducers.buckets import Gradients

Numbers = Sequence[int | None]  # by rank: the microbatch that it has in a round; None: it idles


class RoundSums:
    """The sums of a flat piece of the gradient, of which each round gives the ranks' values."""

    def __init__(self) -> None:
        # None: no microbatch of a node had a gradient
        self._tree: TreeSum[torch.Tensor | None] = TreeSum(0, _added)
        self.is_summed = False  # whether a round of this step has given values

    def begin_step(self, num_microbatches: int) -> None:
        self._tree = TreeSum(num_microbatches, _added)
        self.is_summed = False

    def announce(self) -> None:
        """This step sums the piece, though it may have no microbatch for the ranks of this copy of
        the model.
        """
        self.is_summed = True

    @property
    def held(self) -> list[tuple[Node, torch.Tensor | None]]:
        """The sums of the tree's nodes that there are so far."""
        return self._tree.held

    def total(self) -> torch.Tensor | None:
        return self._tree.total()

    def give(self, of_ranks: torch.Tensor | None, numbers: Numbers) -> None:
        """Add the values of one round, [ranks, size], which are overwritten. None: no rank had
        any.
        """
        by_rank = [None] * len(numbers) if of_ranks is None else of_ranks.unbind()
        pairs = zip(numbers, by_rank, strict=True)
        self.give_nodes([((0, number), values) for number, values in pairs if number is not None])
        self.is_summed |= of_ranks is not None

    def give_nodes(self, nodes: Sequence[tuple[Node, torch.Tensor | None]]) -> None:
        """Add the values of some nodes, from left to right. They are overwritten, and may be parts
        of larger pieces of memory, which are not kept.
        """
        self.is_summed |= any(values is not None for _, values in nodes)
        memory = {_memory(values) for _, values in nodes if values is not None}
        for node, values in nodes:
            self._tree.give(node, values)
        self._tree.held = [
            (node, sum_ if sum_ is None or _memory(sum_) not in memory else sum_.clone())
            for node, sum_ in self._tree.held
        ]


class ShardSums(RoundSums):
    """The sums of this rank's shard of one group of FSDP2."""

    def __init__(self, group: Any) -> None:
        super().__init__()
        self._group = group
        self._params: list[Any] = []  # FSDPParam of torch: those with gradients, in their order

    def shards(self) -> list[torch.Tensor]:
        """This rank's part of each weight as FSDP2 keeps it, padded and flat."""
        return [param._sharded_param_data for param in self._params]  # noqa: SLF001

    def split(self, flat: torch.Tensor | None) -> Gradients:
        """The parts of a sum, by weight."""
        if flat is None:
            return [None] * len(self._params)
        sizes = [param.padded_sharded_param_size.numel() for param in self._params]
        return list(torch.split(flat, sizes))

    def set_gradients(self, parts: Gradients) -> None:
        for param, part in zip(self._params, parts, strict=True):
            assert part is not None
            rows = part.view(param.padded_sharded_param_size)[: param.sharded_size[0]]
            shard = param.sharded_param
            shard.grad = param.to_sharded_dtensor(rows.to(shard.device))


class GroupSums(ShardSums):
    """The sums of one group, given by each round; takes the place of the group's reduce-scatter.

    is_repeated: whether the group is called several times in the pass in work. Its gradients are
        then summed several times: their parts are added up before they go into the tree.
    """

    def __init__(self, group: Any, is_repeated: Callable[[Any], bool]) -> None:
        super().__init__(group)
        self._is_repeated = is_repeated
        self._numbers: Numbers = ()
        self._parts: torch.Tensor | None = None  # of this round, [ranks, size]
        self._is_given = False  # whether the tree has this round's values
        group._reduce_scatter_comm = self  # noqa: SLF001 - as set_custom_reduce_scatter() does
        inner = group.post_backward
        group.post_backward = lambda *rest: self._post_backward(inner, *rest)

    def begin_step(self, num_microbatches: int) -> None:
        super().begin_step(num_microbatches)
        self._parts = None

    def begin_round(self, numbers: Numbers) -> None:
        self._numbers, self._is_given = numbers, False

    def end_round(self) -> None:
        if not self._is_given:  # in parts, or not at all: no rank has called the group
            self.give(self._parts, self._numbers)
            self._parts = None

    # What FSDP2 calls:

    def allocate(
        self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        **_options: Any,
    ) -> None:
        """Exchange gradients. The output stays as it is: nobody reads it (see _post_backward).

        input_tensor: this rank's gradients, the shard of each rank side by side
        """
        del output_tensor
        received = torch.empty_like(input_tensor)
        dist.all_to_all_single(real_pairs(received), real_pairs(input_tensor), group=group)
        of_ranks = received.view(len(self._numbers), -1)
        if self._is_repeated(self._group):
            self._parts = of_ranks if self._parts is None else self._parts.add_(of_ranks)
        elif self._is_given:
            raise UserError(
                "train.exact: fsdp sums the gradients of a block several times in one backward"
                " pass, and only other ranks call the block several times",
                "call the block equally often for all samples; devices.reshard=true; or --strategy"
                " ddp",
                "model",
            )
        else:
            self.give(of_ranks, self._numbers)
            self._is_given = True

    def _post_backward(self, inner: Callable[..., None], *rest: Any) -> None:
        """Sum, and drop the gradients that FSDP2 makes of the output and would add up by rounds."""
        due = due_for_sum(self._group)
        self._params = due or self._params
        inner(*rest)
        for param in due:
            param.sharded_param.grad = None


def _added(left: torch.Tensor | None, right: torch.Tensor | None) -> torch.Tensor | None:
    if left is None or right is None:
        return right if left is None else left
    return left.add_(right)


def _memory(values: torch.Tensor) -> int:
    return values.untyped_storage().data_ptr()
