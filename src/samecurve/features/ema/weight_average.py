"""The moving average of the weights, with which a model is evaluated, sampled and used.

Each process averages the numbers that it holds, one by one. So the average is the same on any
number of devices and under any strategy.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from samecurve.torch_engine.optimizers import OptimizerParam, local_view
from samecurve.torch_engine.strategies import Strategy


class WeightAverage:
    """The moving average of the trained parameters. It has no values until begin() is called or a
    checkpoint fills them in.
    """

    def __init__(self, decay: float, trained: Sequence[OptimizerParam], strategy: Strategy) -> None:
        self._decay, self._trained, self._strategy = decay, trained, strategy
        self.values = [torch.empty_like(local) for local in self._weights()]

    @torch.no_grad()
    def begin(self) -> None:
        """Begin with the weights as they are."""
        for value, local in zip(self.values, self._weights(), strict=True):
            value.copy_(local)

    @torch.no_grad()
    def add(self, *, finite: torch.Tensor | bool) -> None:
        """Add the weights after an update.

        finite: whether the update was made; a tensor where only the device knows
        """
        if finite is False:
            return
        share = torch.as_tensor(finite, dtype=torch.float64) * (1 - self._decay)
        for value, local in zip(self.values, self._weights(), strict=True):
            # devices.offload: a copy to host memory is waited for, as lerp_() reads it at once
            there = share.to(value.device, value.dtype, non_blocking=value.is_cuda)
            value.lerp_(local, there)

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Put the average in the place of the weights, on every replica, while the block runs."""
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    @torch.no_grad()
    def _exchange(self) -> None:
        """Exchange weights and average, on every replica. Copies that fsdp has gathered of the old
        values are dropped before the next step.
        """
        for value, local in zip(self.values, self._weights(), strict=True):
            weights = local.clone()
            local.copy_(value)
            value.copy_(weights)
        self._strategy.sync_replicas()

    def _weights(self) -> Iterator[torch.Tensor]:
        """This process's parts of the trained parameters."""
        return (local_view(param.parameter.detach()) for param in self._trained)
