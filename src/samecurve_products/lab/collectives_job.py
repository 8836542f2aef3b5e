"""The job of `samecurve bench --collectives`: a rank in a warm process times collectives."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

# how often an element passes a link, approximately
PASSES = {"all-reduce": 2, "all-gather": 1, "reduce-scatter": 1}


def bus_factor(name: str, world: int) -> float:
    """The share of a collective's bytes that each link carries, as nccl-tests counts them."""
    return 1.0 if name == "broadcast" else PASSES[name] * (world - 1) / world


@dataclass(frozen=True, kw_only=True)
class CollectiveJob:
    """The collective to time, and where."""

    name: str  # of the collective
    bytes: int  # of the whole array
    times: int
    places: Sequence[str]  # torch's name of each rank's device
    threads: int


def time_rank(index: int, group: Any, job: CollectiveJob) -> list[float]:
    """Time the collective. Returns the seconds of each call."""
    import torch

    from samecurve.torch_engine.profiling.collective_bench import time_collective

    torch.set_num_threads(job.threads)
    device = torch.device(job.places[index])
    if device.type == "cuda":
        torch.cuda.set_device(device)
    return time_collective(job.name, group, device, job.bytes, job.times)
