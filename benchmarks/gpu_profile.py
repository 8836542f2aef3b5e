"""What the device did in a side's last steps, and the fastest matrix products it reaches."""

import re
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch._C._autograd import (
    DeviceType,  # public in torch.autograd, where type checkers do not see it
)

PROFILED = 3  # steps after the timed ones
_PRODUCTS = ((8192, 8192, 8192), (16384, 8192, 4096), (16384, 8192, 8192))
_ATTENTION = re.compile("scaled_dot_product|flash|fmha|efficient_attention|sdpa", re.IGNORECASE)


class Watch:
    """Reports a side's timed steps to the answer, then profiles the steps after them.

    add: adds to the answer. is_profiled: else the steps after the timed ones are not profiled.
    """

    def __init__(
        self,
        device: torch.device,
        add: Callable[[Mapping[str, Any]], None],
        *,
        is_profiled: bool,
    ) -> None:
        self._is_gpu, self._add = device.type == "cuda", add
        self._profiler: Any = None
        if is_profiled:
            kinds = [torch.profiler.ProfilerActivity.CPU]
            kinds += [torch.profiler.ProfilerActivity.CUDA] if self._is_gpu else []
            self._profiler = torch.profiler.profile(activities=kinds)
        self._began = 0.0

    def timed(self, seconds: float) -> None:
        """The timed steps have ended. seconds: of one step."""
        peak = torch.cuda.max_memory_allocated() if self._is_gpu else None
        self._add({"seconds": seconds, "memory": peak})
        if self._profiler:
            self._began = time.perf_counter()
            self._profiler.__enter__()

    def ended(self) -> None:
        """The profiled steps have ended."""
        if not self._profiler:
            return
        if self._is_gpu:
            torch.cuda.synchronize()
        wall = time.perf_counter() - self._began
        self._profiler.__exit__(None, None, None)
        self._add({"profile": profile_of(self._profiler, wall, is_gpu=self._is_gpu)})


def profile_of(profiler: Any, wall: float, *, is_gpu: bool) -> dict[str, Any]:
    """Operations by the device's own time, the device's idle share, and the kernel of attention.

    wall: seconds that the profiled steps took
    """
    averages = profiler.key_averages()
    entries = [
        entry
        for entry in averages
        if (entry.device_type == DeviceType.CUDA) == is_gpu
        and not (is_gpu and entry.is_user_annotation)
    ]
    own = {
        entry.key: (entry.self_device_time_total if is_gpu else entry.self_cpu_time_total) / 1e6
        for entry in entries
    }
    busy = sum(own.values())
    costliest = sorted(own, key=lambda name: -own[name])
    return {
        "wall_seconds": wall,
        "busy_seconds": busy,
        "idle_share": max(0.0, 1 - busy / wall) if is_gpu else None,
        "attention": attention_of(costliest, {entry.key for entry in averages}),
        "operations": [
            {"name": name, "seconds": own[name], "share": own[name] / busy if busy else 0.0}
            for name in costliest[:20]
        ],
    }


def attention_of(kernels: list[str], operations: set[str]) -> list[str]:
    """Names of the kernels that computed attention, the costliest first.

    kernels: what the device ran, the costliest first. operations: all that was recorded, PyTorch's
    own names among them, which say the kind where no kernel's name does. Without any, attention was
    computed by plain products and a softmax.
    """
    named = [name for name in kernels if _ATTENTION.search(name)]
    named += sorted(name for name in operations - set(named) if _ATTENTION.search(name))
    specific = [name for name in named if name != "aten::scaled_dot_product_attention"]
    return [name[:160] for name in specific][:6]


def ceiling(device: torch.device) -> float | None:
    """FLOP/s of the fastest of several bf16 matrix products. None on a CPU."""
    if device.type != "cuda":
        return None
    best = 0.0
    for m, n, k in _PRODUCTS:
        left, right = (
            torch.randn(shape, device=device, dtype=torch.bfloat16) for shape in ((m, k), (k, n))
        )
        for _ in range(5):
            left @ right
        for _ in range(5):
            torch.cuda.synchronize()
            began = time.perf_counter()
            for _ in range(20):
                left @ right
            torch.cuda.synchronize()
            best = max(best, 20 * 2 * m * n * k / (time.perf_counter() - began))
    return best
