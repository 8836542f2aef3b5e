"""A moving average of the weights, which stands in for them wherever the model is looked at.

Each number is averaged by itself, by the process that holds it, so that the average is the same on
any number of devices and under any strategy.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from samecurve.torch_engine.optimizers.optimizer_params import OptimizerParam, local_view
from samecurve.torch_engine.strategies.base import Strategy


class WeightAverage:
    """The moving average of what is trained. It has no values until begin(), or until they are
    filled in.
    """

    def __init__(self, decay: float, trained: Sequence[OptimizerParam], strategy: Strategy) -> None:
        self._decay, self._trained, self._strategy = decay, trained, strategy
        self.values = [torch.empty_like(local) for local in self._weights()]

    @torch.no_grad()
    def begin(self) -> None:
        """With the weights as they are."""
        for value, local in zip(self.values, self._weights(), strict=True):
            value.copy_(local)

    @torch.no_grad()
    def add(self, *, finite: torch.Tensor | bool) -> None:
        """After an update; not after one that was left out, which only the device may know."""
        if finite is False:
            return
        share = torch.as_tensor(finite, dtype=torch.float64) * (1 - self._decay)
        for value, local in zip(self.values, self._weights(), strict=True):
            value.lerp_(local, share.to(value.device, value.dtype, non_blocking=True))

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """In the weights' place, on every replica."""
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    @torch.no_grad()
    def _exchange(self) -> None:
        """Exchange weights and average. What fsdp has gathered of the ones is dropped before a step
        trains the others.
        """
        for value, local in zip(self.values, self._weights(), strict=True):
            weights = local.clone()
            local.copy_(value)
            value.copy_(weights)
        self._strategy.sync_replicas()

    def _weights(self) -> Iterator[torch.Tensor]:
        """This process's parts of them."""
        return (local_view(param.parameter.detach()) for param in self._trained)
