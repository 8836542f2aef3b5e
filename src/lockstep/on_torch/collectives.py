"""What passes between ranks, always over an explicit group: sums only, never averages."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import GradBucket  # public as dist.GradBucket, where type checkers don't see it


class Ranks:
    """The processes that train together. group None: this one alone."""

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self.group = group
        self.index = dist.get_rank(group) if group is not None else 0
        self.world = dist.get_world_size(group) if group is not None else 1

    def sum(self, values: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Start adding up `values` over all ranks, in place; call the result to have it."""
        if self.group is None:
            return lambda: values
        work = dist.all_reduce(values, group=self.group, async_op=True)

        def wait() -> torch.Tensor:
            work.wait()
            return values

        return wait


class BucketSum:
    """A DDP communication hook that adds gradients, where DDP's own would average. `real` False drops this rank's: they came from a dummy."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.real = True

    @staticmethod
    def hook(state: "BucketSum", bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        buffer = bucket.buffer()
        if not state.real:
            buffer.zero_()  # not multiplied by 0: a dummy's inf must not become nan
        future: Any = dist.all_reduce(buffer, group=state.group, async_op=True).get_future()
        result: torch.futures.Future[torch.Tensor] = future.then(lambda done: done.value()[0])
        return result
