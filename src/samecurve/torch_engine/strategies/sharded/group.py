"""Weights that are gathered together into one piece of memory, which comes and goes.

The whole weights are lasting leaves of autograd. Their memory is one storage, whose size is 0 while
the weights are not gathered. The shards of a group lie side by side as they are sent, so that most
gathers copy nothing before they send.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

# public in torch.distributed, where type checkers don't see it
from torch._C._distributed_c10d import Work

from samecurve.torch_engine.model.sharded_parameter import ShardedParameter
from samecurve.torch_engine.strategies.sharded.link import ShardLink
from samecurve.torch_engine.strategies.sharded.weight import Weight, flat, shaped

# bytes at whose multiples weights begin, as torch's allocators do it: kernels may add numbers that
# begin elsewhere in another order
_ALIGNED = 512
_WIDEST = 16  # bytes of a number, at most
Gradients = list[torch.Tensor | None]  # of a group's trained weights


class _Pending(NamedTuple):
    """A gather on its way. gathered: the bytes of all ranks' shards"""

    work: Work
    gathered: torch.Tensor


class WeightGroup:
    """The weights of one block in one number format, or those outside of blocks.

    number, title: the group's place among all, and the name of its block
    is_root: whether the weights lie outside of blocks: they are whole in every pass
    is_whole: whether the weights are gathered
    is_held: whether they stay so until the pass ends, because something may read them at any time
    has_frozen: whether some weights get no gradient, so that none tells when backward is done with
        the group
    is_complete: whether each trained weight has a gradient of this pass
    is_summed: whether the sum of this pass's gradients has begun
    last_gradient: how many gathers of this pass had been begun when the last gradient came
    """

    def __init__(
        self, number: int, title: str, weights: Sequence[Weight], link: ShardLink, *, is_root: bool
    ) -> None:
        self.number, self.title, self.is_root, self._link = number, title, is_root, link
        # those of wide numbers first, so that each begins at a multiple of its numbers' size
        self.weights = sorted(weights, key=lambda w: (-w.sent_as.itemsize, -w.dtype.itemsize))
        self.trained = [weight for weight in self.weights if weight.is_trained]
        self.has_frozen = len(self.trained) < len(self.weights)
        self.is_whole = self.is_held = self.is_summed = self._is_in = False
        self.last_gradient = 0
        self.with_gradient: set[str] = set()  # names of weights that have a gradient of this pass
        self._pending: _Pending | None = None
        self._sizes = [weight.shard_size(link.shards) for weight in self.weights]
        self._sent_sizes = [
            size * weight.sent_as.itemsize
            for size, weight in zip(self._sizes, self.weights, strict=True)
        ]
        self._is_sent_as_it_lies = link.home == link.device and all(
            weight.sent_as == weight.dtype for weight in self.weights
        )
        self._lay_out_own()
        self._lay_out_whole()
        self.sum_dtype = self.weights[0].real_dtype
        self._gradient_sizes = [
            weight.shard_size(link.shards) * (2 if weight.dtype.is_complex else 1)
            for weight in self.trained
        ]
        self.gradient_size = sum(self._gradient_sizes)  # numbers of a shard of all gradients

    def _lay_out_own(self) -> None:
        """Make the memory of this rank's shards, padded, side by side."""
        link = self._link
        sizes = [
            size * weight.dtype.itemsize
            for size, weight in zip(self._sizes, self.weights, strict=True)
        ]
        pinned = link.home.type == "cpu" and link.device.type == "cuda"
        self._own = torch.zeros(sum(sizes), dtype=torch.uint8, device=link.home, pin_memory=pinned)
        self._own_parts = [
            part.view(weight.dtype)
            for part, weight in zip(torch.split(self._own, sizes), self.weights, strict=True)
        ]
        for part, weight in zip(self._own_parts, self.weights, strict=True):
            rows = shaped(part, weight.own_shape(link.place, link.shards), weight.stride)
            weight.own = nn.Parameter(rows, requires_grad=weight.is_trained)

    def _lay_out_whole(self) -> None:
        """Make the whole weights, in memory that is given back at once."""
        link, begins = self._link, [0]
        for size in self._sent_sizes:
            begins.append(begins[-1] + -(-size * link.shards // _ALIGNED) * _ALIGNED)
        self._num_bytes = begins.pop()
        self._regions = list(zip(begins, self._sent_sizes, strict=True))
        for weight in self.weights:
            whole = torch.empty(0, dtype=weight.sent_as, device=link.device)
            weight.whole = nn.Parameter(whole, requires_grad=weight.is_trained)
        self._take_memory()
        self._storage.resize_(0)

    def _take_memory(self) -> None:
        """Let the whole weights lie side by side in new memory. That is no write: their versions
        stay.
        """
        self._bytes = torch.empty(self._num_bytes, dtype=torch.uint8, device=self._link.device)
        self._storage: Any = self._bytes.untyped_storage()
        for (begin, _), weight in zip(self._regions, self.weights, strict=True):
            whole: Any = torch.empty(0, dtype=weight.sent_as, device=self._link.device)
            whole.set_(self._storage, begin // whole.itemsize, weight.shape, weight.stride)
            weight.whole.data = whole

    @torch.no_grad()
    def take_values(self, read: Callable[["WeightGroup", Weight], torch.Tensor | None]) -> None:
        """Take this rank's rows of the parameters, and let others stand in their modules.

        read: gives the whole weight to code that reads it; None: no pass is at work
        """
        link = self._link
        for weight in self.weights:
            rows = range(1)
            if weight.is_cut:
                rows = weight.rows_of(link.place, link.shards)
            numbers = flat(weight.take_values())
            mine = numbers[rows.start * weight.row_size : rows.stop * weight.row_size]
            flat(weight.own.detach()).copy_(mine)
            weight.standing = ShardedParameter.of(
                weight.whole.detach(),
                weight.own,
                partial(read, self, weight),
                first_row=rows.start,
                is_cut=weight.is_cut,
            )
            weight.put(weight.standing)

    @property
    def is_complete(self) -> bool:
        return bool(self.trained) and len(self.with_gradient) == len(self.trained)

    # --- weights come and go

    def start(self) -> None:
        """Begin to gather the weights. All ranks call it in the same order, whatever they have."""
        if self._pending is not None:
            return
        link = self._link
        with link.gathering():
            size = sum(self._sent_sizes)
            gathered = self._own.new_empty((link.shards, size), device=link.device)
            work = link.all_gather(gathered.view(-1), self._sent(gathered[link.place]))
        self._pending = _Pending(work, gathered)

    @torch.no_grad()
    def _sent(self, place: torch.Tensor) -> torch.Tensor:
        """This rank's shard as it is sent. place: where it may be put together"""
        if self._is_sent_as_it_lies:
            return self._own
        if len(place) % _WIDEST:  # the numbers of some rank would begin between two others
            place = torch.empty_like(place)
        parts = torch.split(place, self._sent_sizes)
        for part, own, weight in zip(parts, self._own_parts, self.weights, strict=True):
            part.view(weight.sent_as).copy_(own, non_blocking=True)
        return place

    @torch.no_grad()
    def finish(self, *, keep: bool) -> None:
        """Wait for the gather. keep: the weights are needed; otherwise this rank only took part."""
        assert self._pending is not None
        work, gathered = self._pending
        self._pending = None
        keep = keep and not self.is_whole
        if keep:
            self._storage.resize_(self._num_bytes)
        self._link.wait(work)
        if keep:
            shards = self._link.shards
            regions = [
                self._bytes[begin : begin + size * shards].view(shards, size)
                for begin, size in self._regions
            ]
            torch.split_with_sizes_copy(gathered, self._sent_sizes, dim=1, out=regions)
            self.is_whole = True
            self._link.gathered[self._storage.data_ptr()] = self
        self._link.was_read()

    def free(self) -> None:
        """Give the memory of the whole weights back."""
        if self.is_whole:
            self.is_whole = False
            del self._link.gathered[self._storage.data_ptr()]
            if not self._storage.resizable():  # a numpy array of a weight keeps this memory
                self._take_memory()
            self._storage.resize_(0)

    def swap_in(self) -> None:
        """Let the whole weights stand in the modules.

        What the model has frozen meanwhile stays frozen.
        """
        if self._is_in:
            return
        self._is_in = True
        for weight in self.weights:
            if weight.whole.requires_grad != weight.standing.requires_grad:
                weight.whole.requires_grad_(weight.standing.requires_grad)
            weight.put(weight.whole)

    def replaced(self) -> str:
        """The first weight in whose place another tensor stands, by name; '': none."""
        return next((weight.name for weight in self.weights if weight.is_replaced), "")

    def swap_out(self) -> None:
        if not self._is_in:
            return
        self._is_in = False
        for weight in self.weights:
            if weight.whole.requires_grad != weight.standing.requires_grad:
                weight.standing.requires_grad_(weight.whole.requires_grad)
            weight.put(weight.standing)

    def end_pass(self) -> None:
        """Give back what a pass has left, wherever it has ended."""
        if self._pending is not None:
            self.finish(keep=False)
        self.swap_out()
        self.free()
        self.is_held = self.is_summed = False
        self.last_gradient = 0
        self.with_gradient.clear()

    # --- gradients

    def gradients(self) -> Gradients:
        return [weight.whole.grad for weight in self.trained]

    def names_with_gradient(self) -> set[str]:
        return {weight.name for weight in self.trained if weight.whole.grad is not None}

    def drop_gradients(self) -> None:
        for weight in self.trained:
            weight.whole.grad = None

    def like_packed(self) -> torch.Tensor:
        """An empty tensor of the form of what packed() gives."""
        size = (0, self.gradient_size)
        return torch.empty(size, dtype=self.sum_dtype, device=self._link.device)

    @torch.no_grad()
    def packed(self, gradients: Gradients) -> torch.Tensor:
        """What each rank is to be sent of whole gradients, [ranks, size]; zeros where there is
        none. A weight that is not cut is summed by the first rank.
        """
        shards = self._link.shards
        packed = self.like_packed().new_empty(shards, self.gradient_size)
        if all(gradient is None for gradient in gradients):
            return packed.zero_()
        parts = torch.split(packed, self._gradient_sizes, dim=1)
        filled, numbers = [], []
        for part, gradient, weight in zip(parts, gradients, self.trained, strict=True):
            if gradient is None:
                part.zero_()
                continue
            own = _in_order(gradient, weight)
            if own.numel() < part.numel():
                padded = own.new_zeros(part.numel())
                padded[: len(own)] = own
                own = padded
            filled.append(part)
            numbers.append(own.view(shards, -1))
        torch._foreach_copy_(filled, numbers)
        return packed

    def split(self, sums: torch.Tensor) -> list[torch.Tensor]:
        """The parts of a shard's sums, by trained weight; those of pairs for complex numbers."""
        return list(torch.split(sums, self._gradient_sizes))

    def set_gradients(self, sums: torch.Tensor) -> None:
        """Give this rank's rows their gradients. sums: of all ranks, of this rank's shard"""
        for part, weight in zip(self.split(sums.to(self._link.home)), self.trained, strict=True):
            numbers = part
            if weight.dtype.is_complex:  # they begin at even places, which a part need not
                numbers = torch.view_as_complex(part.reshape(-1, 2).clone())
            weight.own.grad = shaped(numbers, weight.own.shape, weight.stride)


def _in_order(gradient: torch.Tensor, weight: Weight) -> torch.Tensor:
    """A gradient's numbers in the order in which those of the weight lie; pairs of complex ones."""
    numbers = gradient.to_dense() if gradient.is_sparse else gradient
    numbers = numbers.resolve_conj().resolve_neg()
    if numbers.stride() != weight.stride:
        ordered = torch.empty_strided(
            weight.shape, weight.stride, dtype=numbers.dtype, device=numbers.device
        )
        numbers = ordered.copy_(numbers)
    own = flat(numbers)
    return torch.view_as_real(own).view(-1) if own.is_complex() else own
