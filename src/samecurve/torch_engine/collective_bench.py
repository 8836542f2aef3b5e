"""How long a collective takes, called in a row as training calls it, the device drained around each
row.
"""

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

_SMALL, _ROW = (
    1 << 20,
    10,
)  # below so many bytes a clock is read around a row of calls: one alone is too short
_TRIES = 3  # before those that count: buffers and connections are made then


def time_collective(
    name: str, group: dist.ProcessGroup, device: torch.device, size: int, times: int
) -> list[float]:
    """`times` times the seconds of one call.

    size: bytes of the whole array (of what is gathered, or scattered), a multiple of 4 x ranks.
    RuntimeError: what came of it is wrong.
    """
    call = _call(name, group, device, size)
    calls = _ROW if size < _SMALL else 1
    for _ in range(_TRIES):
        call()
    _drain(device)
    found = []
    for _ in range(times):
        began = time.perf_counter()
        for _ in range(calls):
            call()
        _drain(device)
        found.append((time.perf_counter() - began) / calls)
    return found


def _call(
    name: str, group: dist.ProcessGroup, device: torch.device, size: int
) -> Callable[[], Any]:
    """The collective on arrays of its own, zeros after it was seen to be right with ones: they stay
    zeros however often they are added up.
    """
    world = dist.get_world_size(group)
    whole, part = (
        torch.ones(size // 4, device=device),
        torch.ones(size // 4 // world, device=device),
    )
    calls: dict[str, tuple[Callable[[], Any], torch.Tensor, float]] = {
        "all-reduce": (lambda: dist.all_reduce(whole, group=group), whole, world),
        "all-gather": (lambda: dist.all_gather_into_tensor(whole, part, group=group), whole, 1),
        "reduce-scatter": (
            lambda: dist.reduce_scatter_tensor(part, whole, group=group),
            part,
            world,
        ),
    }
    call, into, right = calls[name]
    call()
    if not bool((into == right).all()):
        raise RuntimeError(
            f"{name} of {size} bytes: {into.min().item():g} to {into.max().item():g} instead of"
            f" {right:g}"
        )
    whole.zero_()
    part.zero_()
    return call


def _drain(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
