"""The reducer that adds along the step's tree (core/determinism/microbatches.py), so that the sum
has the same bits on any devices.

autograd itself adds the gradient of every second microbatch to that of its left neighbour, so
gradient accumulation costs what it always does.
"""

from collections.abc import Sequence

import torch
from torch import nn

from samecurve.core.determinism.microbatches import Node, TreeSum
from samecurve.core.planning.plan import Plan
from samecurve.core.protocols import MicroBatch
from samecurve.torch_engine.process_group import Comm
from samecurve.torch_engine.strategies.reducers import Reducer, clear
from samecurve.torch_engine.strategies.reducers.buckets import (
    GradientQueue,
    Gradients,
    cut_into_buckets,
)
from samecurve.torch_engine.strategies.reducers.tree_exchange import Held, TreeExchange
from samecurve.torch_engine.strategies.row_norm import RowSquares, norm_of_rows


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
