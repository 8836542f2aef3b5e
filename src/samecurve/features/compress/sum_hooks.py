"""The sum of a bucket whose numbers are sent in fewer bytes."""

from collections.abc import Callable
from functools import partial

import torch

from samecurve.torch_engine.process_group import Comm
from samecurve.torch_engine.strategies.reducers.buckets import Bucket
from samecurve.torch_engine.strategies.reducers.collective import StartSum

_NARROW = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Hooks:
    """Sums buckets as the config's word says."""

    start: StartSum

    def __init__(self, comm: Comm, num_buckets: int, value: str) -> None:
        if value in _NARROW:
            self.start = partial(_start_narrow, comm, _NARROW[value])
        else:
            from samecurve.features.compress.powersgd import PowerSum

            self.start = PowerSum(comm, num_buckets).start


def _start_narrow(
    comm: Comm, dtype: torch.dtype, _number: int, bucket: Bucket
) -> Callable[[], object]:
    """Start to sum a bucket whose numbers are sent as `dtype`."""
    flat, _ = bucket.piece()
    wait = comm.all_reduce(flat.to(dtype))
    return lambda: flat.copy_(wait())
