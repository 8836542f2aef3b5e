"""Sums over ranks whose bits depend on no rank: each sends every other one its part of the nodes
that it has of a step's tree (all_to_all), adds up its own part along the tree, and all get the
parts of all (all_gather). No collective adds anything.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from samecurve.core.determinism.microbatches import Node, TreeSum, subtrees
from samecurve.torch_engine.optimizer_params import local_view
from samecurve.torch_engine.process_group import Comm

_all_gather: Any = getattr(
    dist, "all_gather_single", dist.all_gather_into_tensor
)  # renamed in torch 2.13
_AHEAD = 2  # buckets on their way before the first of them is waited for
_ALIGN = 16  # elements: every parameter begins where vectors do, on any number of ranks
Gradients = list[torch.Tensor | None]  # by parameter of a bucket


class ExactAllReduce:
    """Sums over all ranks, along the tree.

    buckets: of parameters; their gradients come to lie in one piece of memory each. share: which of
    so many slots are a rank's.
    """

    def __init__(
        self,
        buckets: Sequence[Sequence[nn.Parameter]],
        comm: Comm,
        backend: str,
        share: Callable[[int, int], range],
    ) -> None:
        self._comm, self._share = comm, share
        self._buckets = [_Bucket(parameters, comm.world_size, backend) for parameters in buckets]
        self._shares: dict[int, list[list[Node]]] = {}
        self._going: list[
            tuple[_Bucket, Callable[[], None]]
        ] = []  # buckets whose parts are on their way; the rest of their work
        self._ending: list[tuple[_Bucket, Any]] = []

    def send(self, number: int, held: Sequence[tuple[Node, Gradients]], count: int) -> None:
        """Called by all ranks in the same order.

        held: what this rank has of a step of `count` slots.
        """
        if count not in self._shares:
            self._shares[count] = [
                subtrees(self._share(count, rank), count) for rank in range(self._comm.world_size)
            ]
        shares = self._shares[count]
        bucket = self._buckets[number]
        works = bucket.scatter(held, shares, self._comm)
        self._going.append((bucket, partial(bucket.add, works, shares, count)))
        if len(self._going) > _AHEAD:
            self._next()  # has had the backward passes of those after it to arrive

    def _next(self) -> None:
        """Let the bucket that was sent first be added up, and its sum be sent round."""
        if self._going:
            bucket, add = self._going.pop(0)
            add()
            self._ending.append((bucket, bucket.gather(self._comm)))

    def finish(self) -> None:
        while self._going:
            self._next()
        for bucket, work in self._ending:
            work.wait()
            bucket.hand_out()
        self._ending.clear()


class _Bucket:
    """One flat piece of memory: parameters side by side, cut into a part for each rank.

    On the host where that is where ranks meet.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], world: int, backend: str) -> None:
        self._parameters = parameters
        first = local_view(parameters[0].detach())
        sizes = [local_view(parameter.detach()).numel() for parameter in parameters]
        begins = [0]
        for size in sizes:
            begins.append(begins[-1] + -(-size // _ALIGN) * _ALIGN)
        self._part = -(-begins[-1] // (world * _ALIGN)) * _ALIGN
        self._whole = self._part * world
        self._places = list(zip(begins, sizes, strict=False))
        self._on_host = backend == "gloo"
        self._staged = backend == "gloo" and first.device.type != "cpu"
        self._make = partial(torch.zeros, dtype=first.dtype, device=first.device)
        self._host = (
            partial(torch.zeros, dtype=first.dtype, device="cpu") if self._staged else self._make
        )
        self._flat = [
            self._make(self._whole)
        ]  # one for each node that a rank has; the first holds the sum in the end
        self._views = [self._viewed(self._flat[0])]
        self._received: list[torch.Tensor] = []
        self._sum: torch.Tensor = self._flat[0]

    def _viewed(self, flat: torch.Tensor) -> list[torch.Tensor]:
        return [
            _shaped(flat[begin : begin + size], parameter)
            for (begin, size), parameter in zip(self._places, self._parameters, strict=True)
        ]

    def scatter(
        self, held: Sequence[tuple[Node, Gradients]], shares: Sequence[Sequence[Node]], comm: Comm
    ) -> list[Any]:
        """Start sending each rank its part of every node here."""
        works = []
        for number in range(max(map(len, shares))):
            mine = self._filled(number, held[number][1]) if number < len(held) else None
            given = [self._part if mine is not None else 0] * comm.world_size
            taken = [self._part if number < len(other) else 0 for other in shares]
            if number == len(self._received):
                self._received.append(self._host(self._whole))
            sent = (
                self._received[number][:0]
                if mine is None
                else mine.to(self._received[number].device)
            )
            works.append(
                (
                    dist.all_to_all_single(
                        self._received[number][: sum(taken)],
                        sent,
                        taken,
                        given,
                        group=comm.group,
                        async_op=True,
                    ),
                    sent,
                )
            )
        return works

    @torch.no_grad()
    def _filled(self, number: int, gradients: Gradients) -> torch.Tensor:
        if number == len(self._flat):
            self._flat.append(self._make(self._whole))
            self._views.append(self._viewed(self._flat[number]))
        there = [
            (view, gradient)
            for view, gradient in zip(self._views[number], gradients, strict=True)
            if gradient is not None
        ]
        torch._foreach_copy_([view for view, _ in there], [gradient for _, gradient in there])
        for view, gradient in zip(self._views[number], gradients, strict=True):
            if gradient is None:
                view.zero_()
        return self._flat[number]

    def add(self, works: Sequence[Any], shares: Sequence[Sequence[Node]], count: int) -> None:
        """This rank's part of the sum."""
        for work, _ in works:
            work.wait()
        sums: TreeSum[torch.Tensor] = TreeSum(count, lambda left, right: left.add_(right))
        places = [0] * len(works)
        for mine in shares:
            for number, node in enumerate(mine):
                sums.give(
                    node, self._received[number][places[number] : places[number] + self._part]
                )
                places[number] += self._part
        self._sum = sums.total()

    def gather(self, comm: Comm) -> Any:
        """Start giving every rank the whole sum."""
        self._whole_sum = self._host(self._whole) if self._staged else self._flat[0]
        if not self._on_host:
            return _all_gather(self._whole_sum, self._sum, group=comm.group, async_op=True)
        rows = self._received[0].view(comm.world_size, self._part)  # the sum is the first of them
        rows[1:] = self._sum
        return dist.all_to_all_single(
            self._whole_sum, self._received[0], group=comm.group, async_op=True
        )  # Gloo's all_gather took twice as long

    def hand_out(self) -> None:
        if self._staged:
            self._flat[0].copy_(self._whole_sum)
        for parameter, view in zip(self._parameters, self._views[0], strict=True):
            parameter.grad = view


def _shaped(flat: torch.Tensor, parameter: nn.Parameter) -> torch.Tensor:
    """A piece of memory as a gradient of this parameter, in its order where that fills it."""
    if parameter.is_complex():
        flat = torch.view_as_complex(flat.view(-1, 2))
    return flat.as_strided(parameter.shape, torch.empty_like(parameter, device="meta").stride())
