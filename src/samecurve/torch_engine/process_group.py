"""The sums that pass between ranks, always over an explicit group; never averages."""

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Protocol

import torch
import torch.distributed as dist

# public in torch.distributed, where type checkers don't see it

if TYPE_CHECKING:
    from samecurve.torch_engine.profiling.timeline import Timeline

# integers that the backends don't know
SENT_AS_BYTES = {torch.int16, torch.uint16, torch.uint32, torch.uint64}


class Peers(Protocol):
    """Who trains together, seen from one of them: processes (Comm), or devices of one process.

    Every peer calls all_reduced equally often, in the same order.
    """

    @property
    def rank(self) -> int: ...
    @property
    def world_size(self) -> int: ...

    def all_reduced(self, values: torch.Tensor) -> torch.Tensor:
        """The sum over all peers, the same bits for all of them; `values` stay as they are."""
        ...


def texts_of_all(peers: Peers, own: bytes, device: torch.device) -> list[bytes]:
    """The text of each peer; all peers call it together.

    device: where the peers add up
    """
    sizes = torch.zeros(peers.world_size, dtype=torch.int64, device=device)
    sizes[peers.rank] = len(own)
    lengths = peers.all_reduced(sizes).tolist()
    letters = torch.zeros(peers.world_size, max(lengths), dtype=torch.int64)
    letters[peers.rank, : len(own)] = torch.tensor(list(own), dtype=torch.int64)
    if max(lengths):
        letters = peers.all_reduced(letters.to(device))
    return [bytes(row[:length]) for row, length in zip(letters.tolist(), lengths, strict=True)]


class Comm:
    """The processes that train together.

    group: None for this one alone
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self.group = group
        self.timeline: Timeline | None = None  # takes the time of a step's parts, for a profile
        self.rank = dist.get_rank(group) if group is not None else 0
        self.world_size = dist.get_world_size(group) if group is not None else 1

    def all_reduce(self, values: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Start adding up `values` over all ranks, in place; call the result to have it."""
        if self.group is None:
            return lambda: values
        work = dist.all_reduce(values, group=self.group, async_op=True)

        def wait() -> torch.Tensor:
            work.wait()
            return values

        return wait

    def all_reduced(self, values: torch.Tensor) -> torch.Tensor:
        """The sum over all ranks, `values` left as they are."""
        return self.all_reduce(values.clone())()

    @torch.no_grad()
    def broadcast(
        self, tensors: Iterable[torch.Tensor], device: torch.device, *, root: int = 0
    ) -> None:
        """Give every rank the values of one, the first.

        device: where this group's collectives run
        """
        if self.group is None:
            return
        for tensor in tensors:
            sent = tensor.to(device).contiguous()
            pairs = torch.view_as_real(sent) if sent.is_complex() else sent
            if sent.dtype in SENT_AS_BYTES:
                pairs = sent.view(-1).view(torch.uint8)
            dist.broadcast(pairs, group=self.group, group_src=root)
            tensor.copy_(sent)


def end_group(group: dist.ProcessGroup) -> None:
    """End a group that was made for one engine: in a warm process its threads would stay, and wake
    often. An NCCL group stays: its end could wait for a rank that has failed.
    """
    if dist.get_backend(group) == "gloo":
        dist.destroy_process_group(group)
