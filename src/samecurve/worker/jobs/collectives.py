"""A rank that times collectives, in a warm process (launch/pool.py).

What `samecurve bench --collectives` does.
"""

from collections.abc import Sequence
from typing import Any


def time_rank(
    index: int, group: Any, name: str, size: int, times: int, places: Sequence[str], threads: int
) -> list[float]:
    """Seconds of one call, so many times. places: torch's name of each rank's device."""
    import torch

    from samecurve.torch_engine.collective_bench import time_collective

    torch.set_num_threads(threads)
    device = torch.device(places[index])
    if device.type == "cuda":
        torch.cuda.set_device(device)
    return time_collective(name, group, device, size, times)
