"""The time of a process's own forward pass, which waits for no other rank.

It tells a slow rank from the ranks that wait for it.
"""

import time

import torch

from samecurve.torch_engine.step.step_metrics import RankReport


class ForwardTimer:
    """Two hooks around the first forward pass of a step on the first device.

    The report gets the seconds of the last forward pass that is known to have ended. On a GPU the
    GPU's own clock measures them, and the host never waits for it.
    """

    def __init__(self, device: torch.device, report: RankReport) -> None:
        self._report = report
        self._began = 0.0
        self._events: tuple[torch.cuda.Event, torch.cuda.Event] | None = None
        if device.type == "cuda":
            self._events = (
                torch.cuda.Event(enable_timing=True),  # type: ignore[no-untyped-call]
                torch.cuda.Event(enable_timing=True),  # type: ignore[no-untyped-call]
            )
        self._recorded = False  # whether the events hold a pass that was not read yet

    def begin(self, device_index: int, is_first: bool, /) -> None:  # noqa: FBT001 - a hook
        if device_index or not is_first:
            return
        if self._events is None:
            self._began = time.perf_counter()
            return
        begin, end = self._events
        if self._recorded and end.query():  # type: ignore[no-untyped-call]
            self._report.forward_seconds = begin.elapsed_time(end) / 1e3
        begin.record()

    def end(self, device_index: int, is_first: bool, /) -> None:  # noqa: FBT001 - a hook
        if device_index or not is_first:
            return
        if self._events is None:
            self._report.forward_seconds = time.perf_counter() - self._began
            return
        self._events[1].record()
        self._recorded = True
