"""How a model is laid out over devices.

A strategy is one class, one formula in core/planning/memory.py and one entry in STRATEGIES.
"""

import inspect
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import (
    GradBucket,  # public in torch.distributed, where type checkers do not see it
)
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as powersgd
from torch.nn.parallel import DistributedDataParallel

from samecurve.core.planning.plan import Plan
from samecurve.core.protocols import MicroBatch
from samecurve.errors import UserError
from samecurve.torch_engine.model import Materializer
from samecurve.torch_engine.process_group import Comm, sum_bucket, sum_bucket_as
from samecurve.torch_engine.strategies.threads import ThreadTeam
from samecurve.torch_engine.unused_params import check_used, params_reached_by, trainable

# A model's buffers are functions of its fields or of the whole step here, so none is sent along;
# torch 2.13 renamed the argument.
_RENAMED = "forward_sync_buffers" in inspect.signature(DistributedDataParallel.__init__).parameters
_NO_BUFFER_SYNC: dict[str, Any] = {
    "forward_sync_buffers" if _RENAMED else "broadcast_buffers": False
}

Fill = Callable[[nn.Module], None]


class Strategy(Protocol):
    """models: one for each device of this process; the first holds the weights and, after reduce(),
    the gradients. replicas: what a step calls for them.
    """

    models: list[nn.Module]
    replicas: list[nn.Module]

    def peers(self) -> Sequence[Any]:
        """For each device of this process, what adds up values over all devices (norms.Peers)."""
        ...

    def distribute(self, models: list[nn.Module], fill: Fill) -> None:
        """Lay out the first of `models` (made real by fill, part by part); the others are for the
        other devices of this process.
        """
        ...

    def run_jobs(self, jobs: Sequence[Callable[[], Any]]) -> list[Any]:
        """One job for each device of this process."""
        ...

    def begin_step(self, parameters: Sequence[nn.Parameter], count: int) -> None:
        """Before a step of so many slots: no gradient is left."""
        ...

    def accumulation_round(
        self, index: int, slot: MicroBatch, last: bool
    ) -> AbstractContextManager[Any]:
        """Around forward and backward of one slot, on one device of this process."""
        ...

    def check_all_used(self, loss: torch.Tensor) -> None:
        """Before the very first backward.

        UserError, on every rank: it would not give all gradients that the reduction waits for.
        """
        ...

    def params_with_grad(self) -> set[str]:
        """After reduce(): parameters that some slot of this process gave a gradient."""
        ...

    def reduce(self, parameters: Sequence[nn.Parameter]) -> None:
        """After the last round: leave the sum over all devices in the first replica's gradients."""
        ...

    def norm(self, gradients: Iterable[torch.Tensor]) -> torch.Tensor:
        """The norm of the whole gradient from this process's part of it; float64, the same on every
        rank.
        """
        ...

    def sync_replicas(self) -> None:
        """After an update: give the other replicas of this process the new weights."""
        ...

    def local_shard(self, tensor: torch.Tensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """(shape of the whole, where this process's part of it begins)."""
        ...

    def replica_index(self, tensor: torch.Tensor) -> tuple[int, int]:
        """(which, of how many) processes hold the same part of it as this one."""
        ...

    def close(self) -> None: ...


class Single:
    """One device."""

    def __init__(self, plan: Plan, comm: Comm, devices: Sequence[torch.device]) -> None:
        self._plan, self._comm, self._devices = plan, comm, devices
        self.models: list[nn.Module] = []

    def peers(self) -> Sequence[Any]:
        return [self._comm]

    def distribute(self, models: list[nn.Module], fill: Fill) -> None:
        fill(models[0])
        self.models = self.replicas = [models[0].to(self._devices[0])]

    def run_jobs(self, jobs: Sequence[Callable[[], Any]]) -> list[Any]:
        return [job() for job in jobs]

    def begin_step(self, parameters: Sequence[nn.Parameter], count: int) -> None:
        for parameter in parameters:
            parameter.grad = None

    def accumulation_round(
        self, index: int, slot: MicroBatch, last: bool
    ) -> AbstractContextManager[Any]:
        return nullcontext()

    def check_all_used(self, loss: torch.Tensor) -> None: ...

    def params_with_grad(self) -> set[str]:
        return {
            name
            for model in self.models
            for name, parameter in model.named_parameters()
            if parameter.grad is not None
        }

    def reduce(self, parameters: Sequence[nn.Parameter]) -> None: ...

    def norm(self, gradients: Iterable[torch.Tensor]) -> torch.Tensor:
        norms = torch._foreach_norm(list(gradients))
        whole: torch.Tensor = torch.linalg.vector_norm(torch.stack(norms).double())
        return whole

    def sync_replicas(self) -> None: ...

    def local_shard(self, tensor: torch.Tensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
        return tuple(tensor.shape), (0,) * tensor.ndim

    def replica_index(self, tensor: torch.Tensor) -> tuple[int, int]:
        return self._comm.rank, self._comm.world_size

    def close(self) -> None: ...


class DP(Single):
    """One process, a thread and a replica of its own for each device.

    The first device holds the optimizer, and adds up the gradients in the devices' order.
    """

    def __init__(self, plan: Plan, comm: Comm, devices: Sequence[torch.device]) -> None:
        super().__init__(plan, comm, devices)
        self._team = ThreadTeam(len(devices))

    def peers(self) -> Sequence[Any]:
        return self._team.peers

    def distribute(self, models: list[nn.Module], fill: Fill) -> None:
        super().distribute(models, fill)
        for model, device in zip(models[1:], self._devices[1:], strict=True):
            Materializer(model, device, lambda name, tensor: None)(model)
            self.models.append(model.to(device))
        self.sync_replicas()

    def run_jobs(self, jobs: Sequence[Callable[[], Any]]) -> list[Any]:
        return self._team.run(jobs) if len(jobs) > 1 else super().run_jobs(jobs)

    def reduce(self, parameters: Sequence[nn.Parameter]) -> None:
        for model in self.models[1:]:
            for parameter, other in zip(
                parameters, (p for p in model.parameters() if p.requires_grad), strict=True
            ):
                if other.grad is not None:
                    brought = other.grad.to(parameter.device)
                    parameter.grad = (
                        brought if parameter.grad is None else parameter.grad.add_(brought)
                    )
                    other.grad = None

    @torch.no_grad()
    def sync_replicas(self) -> None:
        first, *others = [[*model.parameters(), *model.buffers()] for model in self.models]
        for other in others:
            for mine, tensor in zip(other, first, strict=True):
                mine.copy_(tensor)

    def close(self) -> None:
        self._team.close()


class DDP(Single):
    """Every device holds the whole model; gradients are summed once a step, overlapped with the
    last backward pass.
    """

    def distribute(self, models: list[nn.Module], fill: Fill) -> None:
        super().distribute(models, fill)
        device, group = self._devices[0], self._comm.group
        assert group is not None
        self._placed = DistributedDataParallel(
            models[0],
            device_ids=[device.index] if device.type == "cuda" else None,
            process_group=group,
            gradient_as_bucket_view=True,
            **_NO_BUFFER_SYNC,
        )
        state, hook = _hook(self._plan.compress, group)

        def counted(held: Any, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
            self._reduced += len(bucket.parameters())
            if (
                bucket.is_last()
            ):  # every gradient is there: what is left of backward waits for the other ranks
                self._comm.timeline.mark_rest("sync")
            return hook(held, bucket)  # type: ignore[no-any-return]

        self._reduced = 0
        self._placed.register_comm_hook(state, counted)
        self.replicas = [self._placed]

    def begin_step(self, parameters: Sequence[nn.Parameter], count: int) -> None:
        """Where several rounds add up before a reduction, gradients stay where the buckets are: a
        second copy of them would be a whole model more.
        """
        kept = [parameter.grad for parameter in parameters if parameter.grad is not None]
        if kept and self._plan.accumulation_steps > 1:
            torch._foreach_zero_(kept)
        else:
            super().begin_step(parameters, count)

    def accumulation_round(
        self, index: int, slot: MicroBatch, last: bool
    ) -> AbstractContextManager[Any]:
        return nullcontext() if last else self._placed.no_sync()

    def check_all_used(self, loss: torch.Tensor) -> None:
        """Its buckets wait for every gradient: a missing one would leave ranks waiting for each
        other. Later steps: see reduce().
        """
        used, named = params_reached_by(loss), trainable(self.models[0].named_parameters())
        check_used(
            list(named),
            (id(parameter) in used for parameter in named.values()),
            self._comm,
            self._devices[0],
        )

    def reduce(self, parameters: Sequence[nn.Parameter]) -> None:
        """UserError: a bucket was still waiting for a gradient when backward ended, so its
        parameters were not summed.
        """
        reduced, self._reduced = self._reduced, 0
        if reduced != len(parameters):
            raise UserError(
                "this step's loss did not use all parameters, as the first one did: the gradients"
                f" of {len(parameters) - reduced} were not added up",
                "use them in every step (times 0 where they don't count), or --strategy fsdp",
                "model",
            )


def _hook(compress: str, group: dist.ProcessGroup) -> tuple[Any, Any]:
    """(state, hook) for DDP."""
    if compress == "powersgd":
        return (
            powersgd.PowerSGDState(
                process_group=group,
                matrix_approximation_rank=4,
                start_powerSGD_iter=2,
                use_error_feedback=True,
            ),
            _summed_powersgd,
        )
    narrow = {"bf16": torch.bfloat16, "fp16": torch.float16}
    return group, sum_bucket_as(narrow[compress]) if compress in narrow else sum_bucket


def _summed_powersgd(
    state: powersgd.PowerSGDState, bucket: GradBucket
) -> torch.futures.Future[torch.Tensor]:
    """PowerSGD averages; sums are what a step wants.

    Source of the method: Vogels et al. 2019, arXiv:1905.13727.
    """
    world = dist.get_world_size(state.process_group)
    future: Any = powersgd.powerSGD_hook(state, bucket)
    result: torch.futures.Future[torch.Tensor] = future.then(lambda done: done.value().mul_(world))
    return result


def _sharded(plan: Plan, comm: Comm, devices: Sequence[torch.device]) -> Strategy:
    """Imported late: torch's FSDP takes two seconds."""
    from samecurve.torch_engine.strategies.sharded import FSDP

    return FSDP(plan, comm, devices)


STRATEGIES: dict[str, Callable[[Plan, Comm, Sequence[torch.device]], Strategy]] = {
    "single": Single,
    "dp": DP,
    "ddp": DDP,
    "fsdp": _sharded,
    "hsdp": _sharded,
}
