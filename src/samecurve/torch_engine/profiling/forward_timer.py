"""How long a process's own forward pass takes, which waits for no other rank: what tells a slow
rank from those that wait for it.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch


class ForwardTimer:
    """seconds: of the last forward pass that is known to have ended; on a GPU its own time, which
    nobody waits for.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._events: tuple[torch.cuda.Event, torch.cuda.Event] | None = None
        self.seconds = 0.0

    @contextmanager
    def timed(self) -> Iterator[None]:
        if self._device.type != "cuda":
            began = time.perf_counter()
            yield
            self.seconds = time.perf_counter() - began
            return
        begin, end = self._events_to_record()
        begin.record()
        yield
        end.record()

    def _events_to_record(self) -> tuple[torch.cuda.Event, torch.cuda.Event]:
        """Begin and end; those of the last time are read if the device has come past them."""
        if self._events is None:
            self._events = (
                torch.cuda.Event(enable_timing=True),  # type: ignore[no-untyped-call]
                torch.cuda.Event(enable_timing=True),  # type: ignore[no-untyped-call]
            )
        elif self._events[1].query():  # type: ignore[no-untyped-call]
            begin, end = self._events
            self.seconds = begin.elapsed_time(end) / 1e3
        return self._events
