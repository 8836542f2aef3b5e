"""The time that a collective takes, called several times in a row as training calls it. The device
is drained before and after each row.
"""

import time
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist

_SMALL = 1 << 20  # bytes; below, one call is too short for the clock, so _ROW calls are timed
_ROW = 10
_WARM_UP = 3  # calls in which buffers and connections are made


def time_collective(
    name: str, group: dist.ProcessGroup, device: torch.device, size: int, times: int
) -> list[float]:
    """The seconds of one call, measured `times` times.

    size: bytes of the whole array (the gathered one, or the scattered one), a multiple of 4 x ranks

    RuntimeError: the result of the collective is wrong.
    """
    call = _call(name, group, device, size)
    calls = _ROW if size < _SMALL else 1
    for _ in range(_WARM_UP):
        call()
    _drain(device)
    seconds = []
    for _ in range(times):
        began = time.perf_counter()
        for _ in range(calls):
            call()
        _drain(device)
        seconds.append((time.perf_counter() - began) / calls)
    return seconds


def _call(
    name: str, group: dist.ProcessGroup, device: torch.device, size: int
) -> Callable[[], object]:
    """The collective, on arrays of its own.

    Its result is checked once with arrays of ones. Afterwards the arrays are zeros, whose sums are
    zeros again.
    """
    world_size = dist.get_world_size(group)
    whole = torch.ones(size // 4, device=device)
    shard = torch.ones(size // 4 // world_size, device=device)
    call: Callable[[], object]
    if name == "all-reduce":
        call = partial(dist.all_reduce, whole, group=group)
        result, expected = whole, world_size
    elif name == "all-gather":
        call = partial(dist.all_gather_into_tensor, whole, shard, group=group)
        result, expected = whole, 1
    else:
        call = partial(dist.reduce_scatter_tensor, shard, whole, group=group)
        result, expected = shard, world_size
    call()
    if not bool((result == expected).all()):
        low, high = result.min().item(), result.max().item()
        raise RuntimeError(f"{name} of {size} bytes: {low:g} to {high:g} instead of {expected:g}")
    whole.zero_()
    shard.zero_()
    return call


def _drain(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
