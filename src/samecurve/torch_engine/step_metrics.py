"""A step's figures on their way from the device to the loop."""

import math
import resource
import sys
import time
from dataclasses import dataclass
from typing import Any

import torch

from samecurve.core.events import REQUESTS
from samecurve.core.protocols import StepMetrics

_HEAD = 2 + len(
    REQUESTS
)  # loss sum, weight, requests; then waits and forward passes by rank, and memory by device


@dataclass(frozen=True)
class QueuedMetrics:
    """A step's figures on their way to the host, or there already; read() waits for them."""

    values: torch.Tensor | list[float]
    ranks: int
    ready: torch.cuda.Event | float  # what tells when the step is done, or when it was

    def read(self) -> StepMetrics:
        if isinstance(self.ready, float):
            at = self.ready
        else:
            self.ready.synchronize()
            at = time.perf_counter()
        values: list[float] = self.values if isinstance(self.values, list) else self.values.tolist()
        summed, (norm, finite, scale) = values[:-3], values[-3:]
        loss_sum, weight = summed[:2]
        asked = {
            request: int(count) for request, count in zip(REQUESTS, summed[2:_HEAD], strict=True)
        }
        own = summed[_HEAD:]
        waits, forwards, memory = (
            own[: self.ranks],
            own[self.ranks : 2 * self.ranks],
            own[2 * self.ranks :],
        )
        return StepMetrics(
            loss_sum / weight if weight else math.nan,
            weight,
            norm,
            bool(finite),
            asked,
            tuple(waits),
            tuple(memory),
            at,
            scale,
            tuple(forwards),
        )


def peak_memory_bytes(device: torch.device) -> int:
    """Peak bytes: allocated on the GPU, or resident in this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (
        1 if sys.platform == "darwin" else 1024
    )


def fetch(figures: torch.Tensor | list[float], ranks: int) -> QueuedMetrics:
    """On their way from where they are; nobody waits."""
    if isinstance(figures, list):
        return QueuedMetrics(figures, ranks, time.perf_counter())
    host = torch.empty(figures.shape, dtype=figures.dtype, pin_memory=True)
    host.copy_(figures, non_blocking=True)
    ready = torch.cuda.Event()  # type: ignore[no-untyped-call]
    ready.record()
    return QueuedMetrics(host, ranks, ready)


def scalar(value: Any, device: torch.device) -> torch.Tensor:
    """float64 on the device, without the host's waiting for it as it does for torch.tensor(value,
    device=device).
    """
    return (
        value.to(device, torch.float64)
        if isinstance(value, torch.Tensor)
        else torch.full((), value, dtype=torch.float64, device=device)
    )
