"""How long a process's own forward pass takes, which waits for no other rank: what tells a slow
rank from those that wait for it.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


class ForwardTimer:
    """seconds: of the last one that is known to have ended; on a GPU its own time, which nobody
    waits for.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._events: tuple[Any, Any] | None = None
        self.seconds = 0.0

    @contextmanager
    def timed(self) -> Iterator[None]:
        if self._device.type != "cuda":
            began = time.perf_counter()
            yield
            self.seconds = time.perf_counter() - began
            return
        begin, end = self._taken()
        begin.record()
        yield
        end.record()

    def _taken(self) -> tuple[Any, Any]:
        """Two events to record; those of the last time are read if the device has come past them."""
        if self._events and self._events[1].query():
            self.seconds = self._events[0].elapsed_time(self._events[1]) / 1e3
        if not self._events:
            self._events = (
                torch.cuda.Event(enable_timing=True),  # type: ignore[no-untyped-call]
                torch.cuda.Event(enable_timing=True),  # type: ignore[no-untyped-call]
            )
        return self._events
