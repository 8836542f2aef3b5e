"""dp: one process, a thread and a replica of the model for each device."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

import torch
from torch import nn

from samecurve.core.planning.plan import Plan
from samecurve.torch_engine.model.model_setup import Materializer
from samecurve.torch_engine.process_group import Comm, Peers
from samecurve.torch_engine.strategies.base import Materialize, Strategy
from samecurve.torch_engine.strategies.threads import ThreadTeam

T = TypeVar("T")


class DP(Strategy):
    """Each device has a replica of the model, and a thread of this process computes on it.

    The first device holds the optimizer, and adds up the gradients in the order of the devices.
    """

    def __init__(self, plan: Plan, comm: Comm, devices: Sequence[torch.device]) -> None:
        super().__init__(plan, comm, devices)
        self._team = ThreadTeam(len(devices))

    def peers(self) -> Sequence[Peers]:
        return self._team.peers

    def distribute(self, models: list[nn.Module], materialize: Materialize) -> None:
        super().distribute(models, materialize)
        pairs = zip(models[1:], self._devices[1:], strict=True)
        for index, (model, device) in enumerate(pairs, start=1):
            Materializer(model, device)(model)
            self.models.append(model.to(device))
            self._sync(index)

    def run_jobs(self, jobs: Sequence[Callable[..., T]], *arguments: object) -> list[T]:
        if len(jobs) == 1:
            return super().run_jobs(jobs, *arguments)
        return self._team.run([partial(job, *arguments) for job in jobs])

    def reduce(self, parameters: Sequence[nn.Parameter]) -> None:
        for model in self.models[1:]:
            trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
            for parameter, other in zip(parameters, trained, strict=True):
                if other.grad is None:
                    continue
                gradient = other.grad.to(parameter.device)
                if parameter.grad is None:
                    parameter.grad = gradient
                else:
                    parameter.grad.add_(gradient)
                other.grad = None

    def sync_replicas(self) -> None:
        for index in range(1, len(self.models)):
            self._sync(index)

    @torch.no_grad()
    def _sync(self, index: int) -> None:
        """Give one replica the values of the first."""
        replica, first = self.models[index], self.models[0]
        for copy, weight in zip(replica.parameters(), first.parameters(), strict=True):
            copy.copy_(weight)
        for own, buffer in zip(replica.buffers(), first.buffers(), strict=True):
            own.copy_(buffer)

    def close(self) -> None:
        self._team.close()
