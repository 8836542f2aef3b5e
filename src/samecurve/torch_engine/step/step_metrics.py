"""A step's metrics on their way from the device to the loop, and how they lie in one row of
numbers.

The row: loss sum, weight, the same of each other mean, the report that ranks make to each other (a
count for each request, seconds waited for data by rank, seconds of a forward pass by rank, peak
bytes by device), gradient norm, whether the step was finite, loss scale.
"""

import math
import resource
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch

from samecurve.core.determinism.mean import Mean
from samecurve.core.events import REQUESTS
from samecurve.core.planning.plan import Plan
from samecurve.core.protocols import StepMetrics


@dataclass(frozen=True)
class MetricsLayout:
    """How long the parts of a row are."""

    world_size: int
    names: tuple[str, ...] = ()  # of the means beside the loss, as they follow it


def rank_report(
    plan: Plan,
    rank: int,
    *,
    requests: Sequence[int],
    wait_seconds: float,
    forward_seconds: float,
    memory_bytes: Iterable[int],
) -> list[float]:
    """What one rank reports, each number in a place of its own: the sum over ranks holds all.

    memory_bytes: by device of this process
    """
    world_size = plan.world_size
    values = [0.0] * (2 * world_size + plan.num_devices)
    values[rank] = wait_seconds
    values[world_size + rank] = forward_seconds
    for device, peak in zip(plan.devices_of(rank), memory_bytes, strict=True):
        values[2 * world_size + device] = peak
    return [*requests, *values]


@dataclass(frozen=True)
class QueuedMetrics:
    """A step's metrics on their way to the host, or there already; read() waits for them."""

    values: torch.Tensor | list[float]  # the row
    layout: MetricsLayout
    ready: torch.cuda.Event | float  # what tells when the step is done, or when it was

    @property
    def on_host(self) -> bool:
        return isinstance(self.ready, float)

    def read(self) -> StepMetrics:
        if isinstance(self.ready, float):
            done_at = self.ready
        else:
            self.ready.synchronize()
            done_at = time.perf_counter()
        values: list[float] = self.values if isinstance(self.values, list) else self.values.tolist()
        summed, (norm, finite, scale) = values[:-3], values[-3:]
        names, ranks = self.layout.names, self.layout.world_size
        begin = 2 + 2 * len(names)
        means = [Mean(*summed[at : at + 2]) for at in range(0, begin, 2)]
        counts = summed[begin : begin + len(REQUESTS)]
        by_rank = summed[begin + len(REQUESTS) :]
        return StepMetrics(
            loss=_quotient(means[0]),
            weight=means[0].weight,
            grad_norm=norm,
            finite=bool(finite),
            requests={request: int(n) for request, n in zip(REQUESTS, counts, strict=True)},
            wait_seconds=tuple(by_rank[:ranks]),
            memory_bytes=tuple(by_rank[2 * ranks :]),
            done_at=done_at,
            scale=scale,
            forward_seconds=tuple(by_rank[ranks : 2 * ranks]),
            means=dict(zip(names, map(_quotient, means[1:]), strict=True)),
        )


def _quotient(mean: Mean) -> float:
    return mean.sum / mean.weight if mean.weight else math.nan


def queue_metrics(values: torch.Tensor | list[float], layout: MetricsLayout) -> QueuedMetrics:
    """Send the row on its way from where it is; nobody waits."""
    if isinstance(values, list):
        return QueuedMetrics(values, layout, time.perf_counter())
    host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
    host.copy_(values, non_blocking=True)
    ready = torch.cuda.Event()  # type: ignore[no-untyped-call]
    ready.record()
    return QueuedMetrics(host, layout, ready)


class PeakMemory:
    """Peak bytes of each device, for the report of every step.

    A GPU's allocator is asked in the first steps, whose peak grows, then in every 16th: torch
    copies all its statistics for one of them, which takes some 80 us a device. A peak never falls,
    so what a step in between reports is at most 15 steps old.
    """

    _FIRST, _EVERY = 4, 16

    def __init__(
        self, devices: Sequence[torch.device], read: Callable[[torch.device], int] | None = None
    ) -> None:
        """read: what one device has held; None: peak_memory_bytes."""
        self._devices, self._read = devices, read or peak_memory_bytes
        self._reports = 0
        self._peaks: list[int] = []

    def report(self) -> list[int]:
        """By device, as it was last read."""
        if self._reports < self._FIRST or self._reports % self._EVERY == 0:
            self._peaks = [self._read(device) for device in self._devices]
        self._reports += 1
        return self._peaks


def peak_memory_bytes(device: torch.device) -> int:
    """Peak bytes: allocated on the GPU, or resident in this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
