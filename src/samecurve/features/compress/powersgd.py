"""PowerSGD for our buckets: each matrix is sent as two of rank 4 (devices.compress: powersgd).

torch's hook is made for DDP's buckets. Source of the method: Vogels et al. 2019, arXiv:1905.13727.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as powersgd

from samecurve.torch_engine.process_group import Comm
from samecurve.torch_engine.randomness import outside_of_microbatches
from samecurve.torch_engine.strategies.reducers.buckets import Bucket


@dataclass(frozen=True)
class _AsOfDDP:
    """A bucket, as torch's hook asks for it."""

    number: int
    num_buckets: int
    bucket: Bucket

    def index(self) -> int:
        return self.number

    def buffer(self) -> torch.Tensor:
        return self.bucket.piece()[0]

    def gradients(self) -> list[torch.Tensor]:
        return self.bucket.piece()[1]

    def is_last(self) -> bool:
        return self.number == self.num_buckets - 1


class PowerSum:
    """Sums buckets by PowerSGD.

    The hook starts further collectives when earlier ones have ended, at moments that differ from
    rank to rank. So one bucket is summed after the other, after the backward pass.
    """

    def __init__(self, comm: Comm, num_buckets: int) -> None:
        self._state = powersgd.PowerSGDState(
            process_group=comm.group,
            matrix_approximation_rank=4,
            start_powerSGD_iter=2,
            use_error_feedback=True,
        )
        self._num_buckets, self._world_size = num_buckets, comm.world_size

    def start(self, number: int, bucket: Bucket) -> Callable[[], object]:
        return lambda: self._sum(_AsOfDDP(number, self._num_buckets, bucket))

    def _sum(self, bucket: Any) -> None:
        """Leave the sum in the bucket. The hook averages, and a step needs sums."""
        with outside_of_microbatches():  # its random start is the same on all ranks
            averaged = powersgd.powerSGD_hook(self._state, bucket).wait()
        bucket.buffer().copy_(averaged).mul_(self._world_size)
