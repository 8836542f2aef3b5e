"""The metrics of a step; the loop reads them one step late."""

import math
import time
from dataclasses import dataclass

import jax
import numpy as np
from numpy.typing import NDArray

from samecurve.core.events import REQUESTS
from samecurve.core.protocols import StepMetrics


@dataclass(frozen=True)
class QueuedMetrics:
    """A step's metrics on their way to the host; read() waits for them."""

    values: jax.Array
    local: NDArray[np.float64]  # the requests, waits and memory that this process reports
    world_size: int
    names: tuple[str, ...]  # the means beside the loss

    @property
    def on_host(self) -> bool:
        return False  # a step is only queued when it returns, on a CPU too

    def read(self) -> StepMetrics:
        # numbers of Python: arrays of a few take longer, while the devices wait for the interpreter
        values: list[float] = np.asarray(self.values, np.float64).tolist()
        done_at = time.perf_counter()
        begin = 2 + 2 * len(self.names)
        sums, weights = values[:begin:2], values[1:begin:2]
        means = [a / b if b else math.nan for a, b in zip(sums, weights, strict=True)]
        norm, finite, scale = values[-3:]
        shared = values[begin:-3] or self.local.tolist()  # one process adds nothing up
        waits, memory = len(REQUESTS), len(REQUESTS) + self.world_size
        return StepMetrics(
            loss=means[0],
            weight=weights[0],
            grad_norm=norm,
            finite=bool(finite),
            requests=tuple(map(int, shared[:waits])),
            wait_seconds=tuple(shared[waits:memory]),
            memory_bytes=tuple(shared[memory:]),
            done_at=done_at,
            scale=scale,
            means=dict(zip(self.names, means[1:], strict=True)),
        )
