"""The time that a collective takes, called several times in a row as training calls it. The device
is drained before and after each row. `samecurve check` and `samecurve bench --collectives` time
collectives here.
"""

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

_SMALL = 1 << 20  # bytes; below, one call is too short for the clock, so _ROW calls are timed
_ROW = 10
_WARM_UP = 3  # calls in which buffers and connections are made
# the name from torch 2.13 on, which warns of the old one
_gather: Any = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)


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
        dist.barrier(group)  # else a rank that is late would count as slow
        _drain(device)
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

    Its result is checked once, with small whole numbers, whose sums are not rounded. Afterwards the
    arrays are zeros, whose sums are zeros again.
    """
    ranks, world_size = range(1, dist.get_world_size(group) + 1), dist.get_world_size(group)
    pattern = torch.arange(size // 4 // world_size, device=device, dtype=torch.float32) % 251
    shard = pattern * (dist.get_rank(group) + 1)
    whole = shard.repeat(world_size)
    added = pattern * sum(ranks)
    call: Callable[[], object]
    if name == "all-reduce":
        call = partial(dist.all_reduce, whole, group=group)
        result, expected = whole, added.repeat(world_size)
    elif name == "broadcast":
        call = partial(dist.broadcast, whole, group=group, group_src=0)
        result, expected = whole, pattern.repeat(world_size)
    elif name == "all-gather":
        call = partial(_gather, whole, shard, group=group)
        result, expected = whole, torch.cat([pattern * rank for rank in ranks])
    else:
        call = partial(dist.reduce_scatter_tensor, shard, whole, group=group)
        result, expected = shard, added
    call()
    if wrong := int((result != expected).sum()):
        raise RuntimeError(f"{name} of {size} bytes: {wrong} of {result.numel()} values are wrong")
    whole.zero_()
    shard.zero_()
    return call


def _drain(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
