"""single, dp and ddp: each device holds the whole model.

One process has one device, or several with a thread for each (dp). A reducer adds up the gradients
of all devices; each process makes the update for its first device and copies the new weights to the
others.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from samecurve.core.planning.plan import Plan
from samecurve.core.protocols import MicroBatch
from samecurve.torch_engine.model.model_setup import Materializer
from samecurve.torch_engine.optimizers import OptimizerParam
from samecurve.torch_engine.process_group import Comm, Peers, end_group
from samecurve.torch_engine.strategies import Materialize, Strategy
from samecurve.torch_engine.strategies.reducers import make_reducer

if TYPE_CHECKING:
    from samecurve.torch_engine.strategies.threads import ThreadTeam

T = TypeVar("T")


class Replicated(Strategy):
    """A replica of the model on each device of this process, the first of which is trained."""

    def __init__(self, plan: Plan, comm: Comm, devices: Sequence[torch.device]) -> None:
        super().__init__(plan, comm, devices)
        self._team = _team_of(len(devices)) if len(devices) > 1 else None
        self._norms = comm
        if plan.syncs_norms and comm.group and dist.get_world_size() == comm.world_size:
            # Synchronised norms sum in backward, as buckets are sent. Where ranks leave different
            # parameters out, the order of these sums and of the buckets differs from rank to rank,
            # so the norms get a group of their own. (Not in a part of a warm pool: torch names a
            # group by the number of groups that a rank knows, and these ranks know different
            # numbers.)
            self._norms = Comm(dist.new_group(backend=dist.get_backend(comm.group)))

    def peers(self) -> Sequence[Peers]:
        return self._team.peers if self._team else [self._norms]

    def distribute(self, models: list[nn.Module], materialize: Materialize) -> None:
        super().distribute(models, materialize)
        pairs = zip(models[1:], self._devices[1:], strict=True)
        for index, (model, device) in enumerate(pairs, start=1):
            Materializer(model, device)(model)
            self.models.append(model.to(device))
            self._sync(index)
        trained = [[p for p in model.parameters() if p.requires_grad] for model in self.models]
        self._reducer = make_reducer(self._plan, self._comm, trained)

    def run_jobs(self, jobs: Sequence[Callable[..., T]], *arguments: object) -> list[T]:
        if self._team is None:
            return super().run_jobs(jobs, *arguments)
        return self._team.run([partial(job, *arguments) for job in jobs])

    def begin_step(self, _parameters: Sequence[nn.Parameter], num_microbatches: int) -> None:
        self._reducer.begin_step(num_microbatches)

    def begin_microbatch(self, device_index: int, microbatch: MicroBatch, *, is_last: bool) -> None:
        self._reducer.begin_microbatch(device_index, microbatch, is_last=is_last)

    def end_microbatch(self, device_index: int, _microbatch: MicroBatch) -> None:
        self._reducer.end_microbatch(device_index)

    def reduce(self, _parameters: Sequence[nn.Parameter]) -> None:
        self._reducer.reduce()

    def has_gradient(self, parameter: nn.Parameter) -> bool:
        return self._reducer.has_gradient(parameter)

    def norm(
        self, _trained: Sequence[OptimizerParam], gradients: list[torch.Tensor]
    ) -> torch.Tensor:
        return self._reducer.norm(gradients)

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
        if self.models:
            self._reducer.close()
        if self._team:
            self._team.close()
        if self._norms.group is not None and self._norms is not self._comm:
            end_group(self._norms.group)


def _team_of(num_devices: int) -> "ThreadTeam":
    from samecurve.torch_engine.strategies.threads import ThreadTeam  # of dp alone

    return ThreadTeam(num_devices)
