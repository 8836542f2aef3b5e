"""The ranks that hold the shards of one copy of the model, and the streams on which they gather and
sum.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

# public in torch.distributed, where type checkers don't see it
from torch._C._distributed_c10d import Work

from samecurve.torch_engine.process_group import Comm

# torch 2.13 renamed them
_all_gather: Any = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


class ShardLink:
    """What a group of weights needs to be gathered and summed.

    On a GPU weights are gathered on a stream of their own, beside the computation, and gradients
    summed on another. The memory that
    a gather fills is read by the computation's stream, so the gather stream waits until it was
    read before it is given back.

    comm: this rank, and those with the other shards
    device: where the model computes
    home: where the shards lie: the device, or host memory
    gathered: the groups of weights that are gathered, by where their memory begins
    """

    def __init__(self, comm: Comm, device: torch.device, home: torch.device) -> None:
        self.comm, self.device, self.home = comm, device, home
        self.shards, self.place = comm.world_size, comm.rank
        self._stream: Any = None
        self._sum_stream: Any = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            self._sum_stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self.gathered: dict[int, object] = {}
        self._is_new_pass = True

    def begin_pass(self) -> None:
        """Weights may have been moved since the last pass, by the computation's stream."""
        self._is_new_pass = True

    @contextmanager
    def gathering(self) -> Iterator[None]:
        """Work on the gather stream."""
        if self._stream is None:
            yield
            return
        if self._is_new_pass:
            self._stream.wait_stream(torch.cuda.current_stream(self.device))
            self._is_new_pass = False
        with torch.cuda.stream(self._stream):
            yield

    @property
    def has_streams(self) -> bool:
        return self._stream is not None

    @contextmanager
    def summing(self) -> Iterator[None]:
        """Work on the stream of sums, after what the computation has been told so far."""
        if self._sum_stream is None:
            yield
            return
        self._sum_stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._sum_stream):
            yield

    def copy_home(self, values: torch.Tensor) -> tuple[torch.Tensor, torch.cuda.Event]:
        """Start to copy values of a GPU to the host, and the event at which they are there."""
        copied = torch.empty_like(values, device=self.home, pin_memory=True)
        copied.copy_(values, non_blocking=True)
        return copied, torch.cuda.current_stream(self.device).record_event()

    def wait_for_sums(self) -> None:
        """Let the computation wait for the stream of sums."""
        if self._sum_stream is not None:
            torch.cuda.current_stream(self.device).wait_stream(self._sum_stream)

    def all_gather(self, gathered: torch.Tensor, sent: torch.Tensor) -> Work:
        work: Work = _all_gather(gathered, sent, group=self.comm.group, async_op=True)
        return work

    def all_to_all(self, received: torch.Tensor, sent: torch.Tensor) -> Work:
        work: Work = dist.all_to_all_single(received, sent, group=self.comm.group, async_op=True)
        return work

    def reduce_scatter(self, received: torch.Tensor, sent: torch.Tensor) -> Work:
        work: Work = _reduce_scatter(received, sent, group=self.comm.group, async_op=True)
        return work

    def wait(self, work: Work) -> None:
        """Let the computation wait for a gather."""
        work.wait()
        if self._stream is not None:
            torch.cuda.current_stream(self.device).wait_stream(self._stream)

    def was_read(self) -> None:
        """The computation has been told to read what was gathered. Call it before that memory is
        given back: the gather stream may be given it next.
        """
        if self._stream is not None:
            self._stream.wait_event(torch.cuda.current_stream(self.device).record_event())
