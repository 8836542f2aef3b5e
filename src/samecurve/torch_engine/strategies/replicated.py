"""Strategies that have the whole model on every device.

A strategy is one class, one row in core/planning/strategies.py and one entry in STRATEGIES.
"""

import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn

# public in torch.distributed, where type checkers don't see it
from torch._C._distributed_c10d import GradBucket
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as powersgd
from torch.nn.parallel import DistributedDataParallel

from samecurve.core.planning.plan import Plan
from samecurve.core.protocols import MicroBatch
from samecurve.torch_engine.model.batch_norm import Peers
from samecurve.torch_engine.model.model_call import ModelCall
from samecurve.torch_engine.model.model_setup import Materializer, leave_empty
from samecurve.torch_engine.optimizers.optimizer_params import OptimizerParam
from samecurve.torch_engine.process_group import Comm, sum_bucket, sum_bucket_as
from samecurve.torch_engine.randomness.microbatch_context import outside_of_microbatches
from samecurve.torch_engine.strategies.protocol import Materialize, MatrixFunction, Strategy
from samecurve.torch_engine.strategies.threads import ThreadTeam
from samecurve.torch_engine.strategies.whole_matrices import map_copies, meeting_place

T = TypeVar("T")

# A model's buffers are functions of its fields or of the whole step here, so none is sent along;
# torch 2.13 renamed the argument.
_RENAMED = "forward_sync_buffers" in inspect.signature(DistributedDataParallel.__init__).parameters
_NO_BUFFER_SYNC: dict[str, Any] = {
    "forward_sync_buffers" if _RENAMED else "broadcast_buffers": False
}


class Single:
    """One device."""

    def __init__(self, plan: Plan, comm: Comm, devices: Sequence[torch.device]) -> None:
        self._plan, self._comm, self._devices = plan, comm, devices
        self.models: list[nn.Module] = []

    def peers(self) -> Sequence[Peers]:
        return [self._comm]

    def distribute(self, models: list[nn.Module], materialize: Materialize) -> None:
        materialize(models[0])
        self.models = [models[0].to(self._devices[0])]

    def train(self, device_index: int, function: Callable[..., T], *arguments: object) -> T:
        return self.call(device_index, function, *arguments)

    def call(self, device_index: int, function: Callable[..., T], *arguments: object) -> T:
        return function(self.models[device_index], *arguments)

    def run_jobs(self, jobs: Sequence[Callable[[], T]]) -> list[T]:
        return [job() for job in jobs]

    def begin_step(self, parameters: Sequence[nn.Parameter], _num_microbatches: int) -> None:
        for parameter in parameters:
            parameter.grad = None

    def accumulation_round(
        self, _device_index: int, _microbatch: MicroBatch, *, is_last: bool
    ) -> AbstractContextManager[object]:
        del is_last
        return nullcontext()

    def params_with_grad(self) -> set[str]:
        return {
            name
            for model in self.models
            for name, parameter in model.named_parameters()
            if parameter.grad is not None
        }

    def reduce(self, parameters: Sequence[nn.Parameter]) -> None: ...

    def norm(self, trained: Iterable[OptimizerParam]) -> torch.Tensor:
        gradients: Any = [param.view.grad for param in trained]
        norms = torch._foreach_norm(gradients)  # noqa: SLF001 - public nowhere
        norm: torch.Tensor = torch.linalg.vector_norm(torch.stack(norms).double())
        return norm

    def sum_over_parts(
        self, _params: Sequence[OptimizerParam], values: Sequence[torch.Tensor]
    ) -> list[torch.Tensor]:
        return list(values)

    def map_whole(
        self,
        _params: Sequence[OptimizerParam],
        matrices: Sequence[torch.Tensor],
        function: MatrixFunction,
    ) -> Iterator[tuple[int, torch.Tensor]]:
        if self._comm.group is None:
            return ((number, function(matrix)) for number, matrix in enumerate(matrices))
        device = matrices[0].device if matrices else self._devices[0]
        return map_copies(self._comm, matrices, function, meet=meeting_place(self._plan, device))

    def change(self, function: Callable[..., None], *arguments: object) -> None:
        function(self.models[0], *arguments)

    def reset(self) -> None: ...

    def sync_replicas(self) -> None: ...

    def local_shard(self, tensor: torch.Tensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
        return tuple(tensor.shape), (0,) * tensor.ndim

    def replica_index(self, _tensor: torch.Tensor) -> tuple[int, int]:
        return self._comm.rank, self._comm.world_size

    def close(self) -> None: ...


class DP(Single):
    """One process, a thread and a replica of its own for each device.

    The first device holds the optimizer, and adds up the gradients in the devices' order.
    """

    def __init__(self, plan: Plan, comm: Comm, devices: Sequence[torch.device]) -> None:
        super().__init__(plan, comm, devices)
        self._team = ThreadTeam(len(devices))

    def peers(self) -> Sequence[Peers]:
        return self._team.peers

    def distribute(self, models: list[nn.Module], materialize: Materialize) -> None:
        super().distribute(models, materialize)
        for model, device in zip(models[1:], self._devices[1:], strict=True):
            Materializer(model, device, leave_empty)(model)
            self.models.append(model.to(device))
        self.sync_replicas()

    def run_jobs(self, jobs: Sequence[Callable[[], T]]) -> list[T]:
        return self._team.run(jobs) if len(jobs) > 1 else super().run_jobs(jobs)

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

    @torch.no_grad()
    def sync_replicas(self) -> None:
        first, *others = [[*model.parameters(), *model.buffers()] for model in self.models]
        for other in others:
            for copy, tensor in zip(other, first, strict=True):
                copy.copy_(tensor)

    def close(self) -> None:
        self._team.close()


class DDP(Single):
    """Every device holds the whole model; gradients are summed once a step, overlapped with the
    last backward pass.

    A loss need not use every parameter: what its last backward pass leaves out is given a zero
    gradient by another one, so that no bucket waits (see reduce()).
    """

    def __init__(self, plan: Plan, comm: Comm, devices: Sequence[torch.device]) -> None:
        super().__init__(plan, comm, devices)
        self._norms = comm
        if plan.compute.norm_sync and dist.get_world_size() == comm.world_size:
            # Their sums come in backward too, before or after a bucket's: where ranks leave
            # different parameters out, the two orders differ. (Some ranks of a warm pool share
            # one group: torch names groups by those that a rank knows, and they know others.)
            self._norms = Comm(dist.new_group(backend=dist.get_backend(comm.group)))

    def peers(self) -> Sequence[Peers]:
        return [self._norms]

    def distribute(self, models: list[nn.Module], materialize: Materialize) -> None:
        super().distribute(models, materialize)
        device, group = self._devices[0], self._comm.group
        assert group is not None
        self._ddp = DistributedDataParallel(
            ModelCall(models[0]),
            device_ids=[device.index] if device.type == "cuda" else None,
            process_group=group,
            gradient_as_bucket_view=True,
            **_NO_BUFFER_SYNC,
        )
        state, hook = _comm_hook(self._plan.layout.compress, group)

        def counting_hook(state: Any, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
            self._num_reduced += len(bucket.parameters())
            if bucket.is_last():
                # Every gradient is there: what is left of backward waits for the other ranks.
                self._comm.timeline.mark_rest("sync")
            return hook(state, bucket)

        self._num_reduced = 0
        self._ddp.register_comm_hook(state, counting_hook)
        self._named = {n: p for n, p in models[0].named_parameters() if p.requires_grad}
        # Ids of those to which this round, and any round of this step, gave a gradient:
        self._in_round: set[int] = set()
        self._in_step: frozenset[int] = frozenset()
        self._all_ids = frozenset(map(id, self._named.values()))
        if self._plan.accumulation_steps > 1:  # else a gradient is None until backward gives it
            for parameter in self._named.values():
                register: Any = parameter.register_post_accumulate_grad_hook
                register(self._note_gradient)

    def _note_gradient(self, parameter: nn.Parameter) -> None:
        self._in_round.add(id(parameter))

    def train(self, _device_index: int, function: Callable[..., T], *arguments: object) -> T:
        result: T = self._ddp(function, *arguments)
        return result

    def begin_step(self, parameters: Sequence[nn.Parameter], num_microbatches: int) -> None:
        """Where several rounds add up before a reduction, gradients stay where the buckets are: a
        second copy of them would be a whole model more.
        """
        self._in_step = frozenset()
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        if gradients and self._plan.accumulation_steps > 1:
            torch._foreach_zero_(gradients)
        else:
            super().begin_step(parameters, num_microbatches)

    def accumulation_round(
        self, _device_index: int, _microbatch: MicroBatch, *, is_last: bool
    ) -> AbstractContextManager[object]:
        self._in_step |= self._in_round
        self._in_round.clear()
        return nullcontext() if is_last else self._ddp.no_sync()

    def params_with_grad(self) -> set[str]:
        return {name for name, p in self._named.items() if id(p) in self._in_step}

    def reduce(self, parameters: Sequence[nn.Parameter]) -> None:
        """DDP sends a bucket once backward has given all gradients in it. Those that never came
        come now, as zeros; other ranks may have had them.
        """
        del parameters
        if self._num_reduced < len(self._named):
            named = self._named.values()
            if self._plan.accumulation_steps == 1:
                self._in_round = {id(p) for p in named if p.grad is not None}
            self._in_step |= self._in_round
            missing = [p for p in named if id(p) not in self._in_round]
            torch.autograd.backward(missing, [torch.zeros_like(p) for p in missing])
            self._in_round.clear()
        else:
            self._in_step = self._all_ids
        self._num_reduced = 0


CommHook = Callable[[Any, GradBucket], torch.futures.Future[torch.Tensor]]


def _comm_hook(compress: str, group: dist.ProcessGroup) -> tuple[object, CommHook]:
    """(state, hook) for DDP."""
    if compress == "powersgd":
        state = powersgd.PowerSGDState(
            process_group=group,
            matrix_approximation_rank=4,
            start_powerSGD_iter=2,
            use_error_feedback=True,
        )
        return state, _summed_powersgd
    narrow = {"bf16": torch.bfloat16, "fp16": torch.float16}
    return group, sum_bucket_as(narrow[compress]) if compress in narrow else sum_bucket


def _summed_powersgd(
    state: powersgd.PowerSGDState, bucket: GradBucket
) -> torch.futures.Future[torch.Tensor]:
    """PowerSGD averages; sums are what a step wants.

    Source of the method: Vogels et al. 2019, arXiv:1905.13727.
    """
    world = dist.get_world_size(state.process_group)
    with outside_of_microbatches():  # it draws where it begins to search, on all ranks alike
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
