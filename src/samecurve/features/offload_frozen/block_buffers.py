"""Buffers on a device that blocks in host memory share: a block is copied into one of them while
the block before it computes.

Invariant: a buffer is overwritten only when everything that was queued before, and may read it, is
queued ahead of the copy; and what reads a block is queued behind the copy of that block.

The order in which blocks are asked for is learned as it comes: what was asked for after the same
two blocks, in the same stage of a step, is copied ahead the next time. A wrong guess costs a copy,
and changes no result.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.utils._python_dispatch import _disable_current_modes

from samecurve.features.offload_frozen.host_blocks import BUFFERS

# whether a backward pass is under way (a block that runs again is in it), and whether operations
# are recorded for one
_Stage = tuple[bool, bool]
_Moment = tuple[_Stage, int | None, int]  # the stage, the block before, the block asked for
_PLAIN = {torch.Tensor, torch.nn.Parameter}  # other kinds of tensors may have no address


@dataclass(eq=False)
class Buffer:
    """Memory of the device that holds one block at a time."""

    bytes: torch.Tensor  # uint8
    block: int | None = None  # its number
    ready: torch.cuda.Event | None = None  # the end of the block's copy
    calls: int = 0  # of the block, that are under way

    def __post_init__(self) -> None:
        self._first = self.bytes.data_ptr()
        self._end = self._first + len(self.bytes)

    def offset_of(self, tensor: torch.Tensor) -> int | None:
        """How many bytes into the buffer a tensor begins; None: it lies elsewhere."""
        if tensor.layout is not torch.strided or type(tensor) not in _PLAIN:
            return None
        place = tensor.data_ptr()
        return place - self._first if self._first <= place < self._end else None


class BlockBuffers:
    """The buffers of one device.

    sources: the bytes of each block in host memory, uint8; pinned for a GPU
    """

    def __init__(self, sources: Sequence[torch.Tensor], device: torch.device) -> None:
        self.sources, self._device = sources, device
        size = max(map(len, sources))
        count = min(BUFFERS, len(sources))
        self.all = [
            Buffer(torch.empty(size, dtype=torch.uint8, device=device)) for _ in range(count)
        ]
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            for buffer in self.all:  # it isn't freed while a copy into it is under way
                buffer.bytes.record_stream(self._stream)
        self.copied = 0  # bytes so far
        self.waited = 0  # copies that nothing had been computed ahead of
        self._next: dict[_Moment, int] = {}  # by moment, the block that was asked for next
        self._moment: _Moment | None = None  # the last one
        self._moments: set[_Moment] = set()  # those since this block was first asked for

    def forget(self) -> None:
        """Copy every block anew: values in host memory may change from here on. So a copy ahead,
        for which nobody waits, must have read them.
        """
        if self._stream is not None:
            self._stream.synchronize()
        for buffer in self.all:
            assert not buffer.calls
            buffer.block = None
        self._moment = None
        self._moments.clear()

    def need(self, block: int) -> Buffer:
        """The buffer with this block. What is queued on the device from here on finds it there,
        until another block is asked for.
        """
        stage, last = _stage(), self._moment
        if last is not None and last[0] == stage and last[2] == block:
            return self._holder(block)
        self._moment = moment = self._note(stage, block)
        buffer = self._find(block)
        if buffer is None:
            self.waited += 1
            buffer = self._copy(block, self._free(moment[1]))
        if buffer.ready is not None:
            self._await(buffer.ready)
        self._copy_ahead(moment)
        return buffer

    def _note(self, stage: _Stage, block: int) -> _Moment:
        """Learn that this block followed. Returns the moment in which it is asked for."""
        before = None
        if self._moment is not None:
            _, before, current = self._moment
            if block != current:
                self._next.update(dict.fromkeys(self._moments, block))
                self._moments.clear()
                before = current
        moment = (stage, before, block)
        self._moments.add(moment)
        return moment

    def _copy_ahead(self, moment: _Moment) -> None:
        """Copy the block that will be asked for next, while this one computes."""
        following = self._next.get(moment)
        if following is None or self._find(following) is not None:
            return
        unused = [one for one in self.all if one.block != moment[2] and not one.calls]
        if unused:
            self._copy(following, unused[0])

    def _find(self, block: int) -> Buffer | None:
        return next((one for one in self.all if one.block == block), None)

    def _holder(self, block: int) -> Buffer:
        buffer = self._find(block)
        assert buffer is not None
        return buffer

    def _free(self, last: int | None) -> Buffer:
        """A buffer that no call uses; rather not that of the last block.

        RuntimeError: each has a call under way.
        """
        unused = [one for one in self.all if not one.calls]
        if not unused:
            raise RuntimeError(
                f"devices.offload_frozen: {len(self.all)} blocks are being called, one inside the"
                " other, and a further one has no buffer; leave devices.offload_frozen out"
            )
        return min(unused, key=lambda one: last is not None and one.block == last)

    def _copy(self, block: int, buffer: Buffer) -> Buffer:
        source = self.sources[block]
        # a checkpoint that keeps some results would count the copies among the block's operations
        with _disable_current_modes():
            buffer.ready = self._start(source, buffer.bytes[: len(source)])
        buffer.block = block
        self.copied += len(source)
        return buffer

    def _start(self, source: torch.Tensor, target: torch.Tensor) -> torch.cuda.Event | None:
        """Start a copy. Returns its end; None: it is done."""
        if self._stream is None:
            target.copy_(source)
            return None
        # what reads the target's old values is queued by now
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)
        end: torch.cuda.Event = self._stream.record_event()
        return end

    def _await(self, copied: torch.cuda.Event) -> None:
        """Let all that is queued from here on wait for the end of a copy."""
        torch.cuda.current_stream(self._device).wait_event(copied)


def _stage() -> _Stage:
    in_backward = torch._C._current_graph_task_id() != -1  # noqa: SLF001 - public nowhere
    return in_backward, torch.is_grad_enabled()
