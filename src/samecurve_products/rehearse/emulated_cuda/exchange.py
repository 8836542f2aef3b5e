"""Collectives on host memory: what ranks send each other, and the sums of what arrives.

Every collective begins with a header from each rank to each peer. Ranks that call different
collectives, or one collective with different sizes, never go on: NCCL's kernels hang there too.
"""

import hashlib
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from samecurve_products.rehearse.emulated_cuda.cpp_process_group import cpp

_FOREVER = timedelta(days=1)  # the watchdog ends what takes too long, not Gloo
_WHOLE = 4096  # elements; fewer are sent to every rank at once, and added there
_HEADERS, _DATA = 0, 1
_TEXT = 400  # bytes of a header that say in words what a rank calls

Messages = Iterable[tuple[int, torch.Tensor]]  # the peer, and what it gets or sends


class MismatchError(Exception):
    """A peer calls another collective, or the same collective with other arguments."""


class Exchange:
    """Messages between the ranks of one communicator."""

    def __init__(self, store: c10d.Store, rank: int, members: Sequence[int]) -> None:
        """Meet the other members. rank: this one's; members: the ranks that take part."""
        self.rank, self.size = rank, len(members)
        self.peers = [member for member in members if member != rank]
        self._place = {member: place for place, member in enumerate(members)}
        self._gloo: Any = c10d.ProcessGroupGloo(
            store, self._place[rank], self.size, timeout=_FOREVER
        )

    def agree(
        self,
        call: str,
        sends: Mapping[int, Sequence[int]],
        receives: Mapping[int, Sequence[int]],
        before: str = "",
    ) -> dict[int, str]:
        """Compare this rank's call with the calls of its peers. Returns when all are the same.

        call: names the collective and what all ranks must agree on.
        sends, receives: the elements of each message for each peer, and from each peer.
        before: a note for the peers, in a few words; theirs are returned.
        Raises MismatchError.
        """
        peers = sorted({*sends, *receives})
        told = {
            peer: _header(call, sends.get(peer, ()), receives.get(peer, ()), before)
            for peer in peers
        }
        heard = {peer: torch.empty_like(header) for peer, header in told.items()}
        self._pass(told.items(), heard.items(), _HEADERS)
        notes = {}
        for peer, header in heard.items():
            sent, received = sends.get(peer, ()), receives.get(peer, ())
            prints, (theirs, notes[peer]) = _read_header(header)
            if prints != _prints(call, received, sent):
                own = _in_words(call, sent, received)
                raise MismatchError(f"rank {peer} calls {theirs}; this rank {own}")
        return notes

    def swap(self, sends: Messages, receives: Messages) -> None:
        """Send tensors to peers and fill tensors from peers. What is empty stays here."""
        self._pass(
            [(peer, as_bytes(tensor)) for peer, tensor in sends if tensor.numel()],
            [(peer, as_bytes(tensor)) for peer, tensor in receives if tensor.numel()],
            _DATA,
        )

    def _pass(self, sends: Messages, receives: Messages, tag: int) -> None:
        place = self._place
        works = [self._gloo.recv([tensor], place[peer], tag) for peer, tensor in receives]
        works += [self._gloo.send([tensor], place[peer], tag) for peer, tensor in sends]
        cpp.wait_all(works)

    # What follows takes contiguous host memory, for all ranks of a group: members 0 to size - 1.

    def all_reduce(self, values: torch.Tensor, reduce: "Reduction") -> None:
        """Reduce `values` over all ranks, in place; the same bits on every rank."""
        values = values.view(-1)
        if values.numel() < _WHOLE:
            values.copy_(reduce(self._everyones(values)))
            return
        bounds = [values.numel() * rank // self.size for rank in range(self.size + 1)]
        parts = [values[bounds[rank] : bounds[rank + 1]] for rank in range(self.size)]
        own = self.reduce_scatter(parts, reduce)
        parts[self.rank].copy_(own)
        self.swap(
            [(peer, parts[self.rank]) for peer in self.peers],
            [(peer, parts[peer]) for peer in self.peers],
        )

    def reduce_scatter(self, parts: Sequence[torch.Tensor], reduce: "Reduction") -> torch.Tensor:
        """This rank's part, reduced over all ranks. parts: one for each rank."""
        arrived = {peer: torch.empty_like(parts[self.rank]) for peer in self.peers}
        self.swap([(peer, parts[peer]) for peer in self.peers], arrived.items())
        return reduce(self._in_order(parts[self.rank], arrived))

    def reduce_to(self, values: torch.Tensor, root: int, reduce: "Reduction") -> None:
        """Reduce `values` over all ranks, in place on rank `root`."""
        if self.rank != root:
            self.swap([(root, values)], [])
            return
        arrived = {peer: torch.empty_like(values) for peer in self.peers}
        self.swap([], arrived.items())
        values.copy_(reduce(self._in_order(values, arrived)))

    def broadcast(self, values: torch.Tensor, root: int) -> None:
        """Give every rank the values of rank `root`."""
        if self.rank == root:
            self.swap([(peer, values) for peer in self.peers], [])
        else:
            self.swap([], [(root, values)])

    def all_to_all(self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> None:
        """Send inputs[peer] to each peer and fill outputs[peer]. Empty tensors are not sent."""
        own = inputs[self.rank].clone()  # the output may be the input
        self.swap(
            [(peer, inputs[peer]) for peer in self.peers],
            [(peer, outputs[peer]) for peer in self.peers],
        )
        if own.numel():
            outputs[self.rank].copy_(own.view(outputs[self.rank].shape))

    def all_gather(self, outputs: Sequence[torch.Tensor], values: torch.Tensor) -> None:
        """Fill outputs[rank] with the values of each rank."""
        self.all_to_all(outputs, [values] * self.size)

    def _everyones(self, values: torch.Tensor) -> list[torch.Tensor]:
        arrived = {peer: torch.empty_like(values) for peer in self.peers}
        self.swap([(peer, values) for peer in self.peers], arrived.items())
        return self._in_order(values, arrived)

    def _in_order(
        self, own: torch.Tensor, arrived: Mapping[int, torch.Tensor]
    ) -> list[torch.Tensor]:
        """What each rank sent, by rank, so that every rank adds in the same order."""
        return [own if rank == self.rank else arrived[rank] for rank in range(self.size)]


def _header(call: str, sends: Sequence[int], receives: Sequence[int], before: str) -> torch.Tensor:
    """What a rank tells a peer of its call: fingerprints, and the same in words."""
    own = _in_words(call, sends, receives).encode()[:_TEXT]
    words = own + f"\n{before}".encode()
    if len(words) > _TEXT:  # a count that was cut would be another count
        words = own
    prints = struct.pack("3q", *_prints(call, sends, receives))
    return torch.frombuffer(bytearray(prints + words.ljust(_TEXT)), dtype=torch.uint8)


def _read_header(header: torch.Tensor) -> tuple[list[int], list[str]]:
    """The fingerprints of a peer's call; the call in words, and the peer's note."""
    data = header.numpy().tobytes()
    text = data[-_TEXT:].decode(errors="replace").rstrip()
    return list(struct.unpack("3q", data[:-_TEXT])), (text + "\n").split("\n")[:2]


def _in_words(call: str, sends: Sequence[int], receives: Sequence[int]) -> str:
    """A call, with its sizes where each peer has its own."""
    sizes = [f"sends {list(sends)}"] if sends else []
    sizes += [f"expects {list(receives)}"] if receives else []
    return " ".join([call, *sizes])


def _prints(*values: object) -> list[int]:
    """A fingerprint of each value, which fits an int64."""
    digests = [hashlib.blake2b(str(value).encode(), digest_size=7).digest() for value in values]
    return [int.from_bytes(digest, "little") for digest in digests]


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of a dense tensor, as a flat tensor of bytes."""
    flat = torch.as_strided(tensor, (tensor.numel(),), (1,))
    return flat.view(torch.uint8)


@dataclass(frozen=True)
class Reduction:
    """How NCCL reduces values of one type; see reduction_of."""

    dtype: torch.dtype
    combine: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    average: bool
    factor: float | torch.Tensor | None  # each rank multiplies by its own before values are sent

    def scaled(self, values: torch.Tensor) -> torch.Tensor:
        """What a rank sends of its values."""
        if self.factor is None:
            return values
        return (values * self.factor).to(self.dtype)

    def __call__(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """The parts of all ranks, reduced in the order of ranks."""
        narrow = self.dtype.is_floating_point and self.dtype.itemsize == 1
        if narrow:  # CPUs do not add float8
            parts = [part.float() for part in parts]
        total = parts[0].clone()
        for part in parts[1:]:
            total = self.combine(total, part)
        if self.average:
            mode = None if total.is_floating_point() else "trunc"
            total = torch.div(total, len(parts), rounding_mode=mode)
        return total.to(self.dtype)


def reduction_of(operation: Any, dtype: torch.dtype) -> Reduction:
    """How NCCL reduces values of this type. operation: a dist.ReduceOp.

    Raises ValueError or TypeError with torch's text where torch refuses.
    """
    kind, factor = operation.__getstate__()  # torch shows the factor of PREMUL_SUM only to pickle
    kinds: Any = dist.ReduceOp.RedOpType
    if kind in (kinds.BAND, kinds.BOR, kinds.BXOR):
        raise ValueError(f"Cannot use ReduceOp.{kind.name} with NCCL")
    if dtype == torch.bool:
        if kind == kinds.AVG:
            raise TypeError("Cannot use ReduceOp.AVG with Boolean inputs")
        if kind == kinds.SUM:
            kind = kinds.MAX
    combines = {kinds.PRODUCT: torch.mul, kinds.MIN: torch.minimum, kinds.MAX: torch.maximum}
    if kind == kinds.PREMUL_SUM and isinstance(factor, torch.Tensor):
        factor = factor.item()
    return Reduction(dtype, combines.get(kind, torch.add), kind == kinds.AVG, factor)
