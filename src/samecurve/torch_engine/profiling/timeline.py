"""A clock around the parts of a training step, for a profile.

Times are the device's own: on a GPU an event in the stream that computes, so that the host does not
wait; on a CPU the clock.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch

# public in torch.distributed, where type checkers don't see it
from torch._C._distributed_c10d import Work

Moment = float | torch.cuda.Event  # on a device's own clock
# (part, device) -> a context around that part, for a tool that also wants to know of it
Around = Callable[[str, int], AbstractContextManager[object]]

_WAIT = "sync"
# method of a training step -> (the part of a step that it is, whether its first argument is the
# number of one of this process's devices)
_PARTS = {
    "compute_gradients": ("rounds", False),
    "forward": ("forward", True),
    "backward": ("backward", True),
    "reduce_gradients": ("reduce", False),
    "scale_gradients": ("clip", False),
    "move_weights": ("optimizer", False),
    "sync_replicas": ("replicas", False),
    # methods of a step with a loss over the whole batch:
    "compute_features": ("forward", True),
    "gather_features": ("sync", True),
    "gradients_of_loss": ("forward", True),
    "backward_from": ("backward", True),
}
T = TypeVar("T")


@dataclass
class Span:
    """A part of a step that has ended."""

    name: str
    inside: int  # number of the span around this one; -1: the step itself
    begin: Moment
    end: Moment


@dataclass
class DeviceSpans:
    """The spans of a step on one device, and that device's clock."""

    now: Callable[[], Moment]
    spans: list[Span] = field(default_factory=list)
    open: list[int] = field(default_factory=list)

    def enter(self, name: str) -> int:
        now = self.now()
        self.spans.append(Span(name, self.open[-1] if self.open else -1, now, now))
        self.open.append(len(self.spans) - 1)
        return len(self.open)

    def leave(self, depth: int) -> None:
        """End the part entered at this depth, and what was opened inside it since."""
        end = self.now()
        while len(self.open) >= depth:
            self.spans[self.open.pop()].end = end


class Timeline:
    """The spans of a step, by device.

    around: gives one more context around each part; None: there is none.
    """

    def __init__(self, devices: Sequence[torch.device]) -> None:
        self.around: Around | None = None
        self._devices = devices
        self._of_device = [DeviceSpans(_clock(device)) for device in devices]

    @contextmanager
    def part(self, name: str, device_index: int = 0) -> Iterator[None]:
        """Take the time of a part of a step. device_index: which of this process's devices."""
        spans = self._of_device[device_index]
        depth = spans.enter(name)
        try:
            with self.around(name, device_index) if self.around else nullcontext():
                yield
        finally:
            spans.leave(depth)

    def mark_rest(self, name: str) -> None:
        """Count the rest of the first device's open part as this part."""
        self._of_device[0].enter(name)

    def now(self) -> Moment:
        """The time on the first device's clock."""
        return self._of_device[0].now()

    def take_spans(self) -> list[list[Span]]:
        """The spans since the last call, by device."""
        spans = [device.spans for device in self._of_device]
        for device in self._of_device:
            device.spans = []
        return spans

    @contextmanager
    def timing_waits(self) -> Iterator[None]:
        """Count every wait for a collective as the part `sync` while the block runs.

        These are torch's own waits too: under fsdp they pass through no code of ours. On a GPU only
        the waits that hold up the computing stream count; fsdp waits in streams of its own.
        """
        torch_work: Any = Work
        original_wait = torch_work.wait
        stream = self._stream()

        def wait(work: Work, *arguments: object, **options: object) -> object:
            with self.part(_WAIT) if self._stream() == stream else nullcontext():
                return original_wait(work, *arguments, **options)

        torch_work.wait = wait
        try:
            yield
        finally:
            torch_work.wait = original_wait

    def _stream(self) -> torch.cuda.Stream | None:
        device = self._devices[0]
        return torch.cuda.current_stream(device) if device.type == "cuda" else None


def time_parts(step: object, timeline: Timeline) -> None:
    """Put the clock around the parts of a training step."""
    for method, (name, has_device) in _PARTS.items():
        function = getattr(step, method, None)
        if function:
            setattr(step, method, _timed(function, timeline, name, has_device=has_device))


def _timed(
    function: Callable[..., T], timeline: Timeline, name: str, *, has_device: bool
) -> Callable[..., T]:
    def run(*arguments: Any, **options: Any) -> T:
        with timeline.part(name, arguments[0] if has_device else 0):
            return function(*arguments, **options)

    return run


def seconds_between(begin: Moment, end: Moment) -> float:
    """Seconds between two moments of one clock. A GPU must have passed both."""
    if isinstance(begin, torch.cuda.Event):
        assert isinstance(end, torch.cuda.Event)
        return begin.elapsed_time(end) / 1e3  # type: ignore[no-any-return]
    assert isinstance(end, float)
    return end - begin


def seconds_by_part(spans: list[Span]) -> dict[str, float]:
    """Seconds of each part, without the parts inside it."""
    seconds: dict[str, float] = {}
    for span in spans:
        took = seconds_between(span.begin, span.end)
        seconds[span.name] = seconds.get(span.name, 0.0) + took
        if span.inside >= 0:
            seconds[spans[span.inside].name] -= took
    return seconds


def _clock(device: torch.device) -> Callable[[], Moment]:
    if device.type != "cuda":
        return time.perf_counter

    def now() -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(device))
        return event

    return now
