"""A step's figures on their way from the device to the loop."""

import math
import resource
import sys
import time
from dataclasses import dataclass

import torch

from lockstep.core.events import REQUESTS
from lockstep.core.protocols import Figures

_HEAD = 2 + len(REQUESTS)  # loss sum, weight, requests; then waits and forward passes by rank, and memory by device


@dataclass(frozen=True)
class Stats:
    """A step's figures on their way to the host, or there already; read() waits for them."""

    values: torch.Tensor | list[float]
    ranks: int
    ready: torch.cuda.Event | float  # what tells when the step is done, or when it was

    def read(self) -> Figures:
        if isinstance(self.ready, float):
            at = self.ready
        else:
            self.ready.synchronize()
            at = time.perf_counter()
        values: list[float] = self.values if isinstance(self.values, list) else self.values.tolist()
        summed, (norm, finite, scale) = values[:-3], values[-3:]
        loss_sum, weight = summed[:2]
        asked = {request: int(count) for request, count in zip(REQUESTS, summed[2:_HEAD], strict=True)}
        own = summed[_HEAD:]
        waits, forwards, memory = own[: self.ranks], own[self.ranks : 2 * self.ranks], own[2 * self.ranks :]
        return Figures(loss_sum / weight if weight else math.nan, weight, norm, bool(finite), asked, tuple(waits), tuple(memory), at, scale, tuple(forwards))


def peak(device: torch.device) -> int:
    """Peak bytes: allocated on the GPU, or resident in this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
