"""ddp: one process for each device, each with the whole model; gradients are summed."""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn

# public in torch.distributed, where type checkers don't see it
from torch._C._distributed_c10d import GradBucket
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as powersgd
from torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks import noop_hook
from torch.nn.parallel import DistributedDataParallel

from samecurve.core.planning.plan import Plan
from samecurve.core.protocols import MicroBatch
from samecurve.torch_engine.model.model_call import ModelCall
from samecurve.torch_engine.process_group import (
    SENT_AS_BYTES,
    Comm,
    Peers,
    end_group,
    sum_bucket,
    sum_bucket_as,
)
from samecurve.torch_engine.randomness.microbatch_context import outside_of_microbatches
from samecurve.torch_engine.strategies.base import Materialize, Strategy

T = TypeVar("T")
CommHook = Callable[[Any, GradBucket], torch.futures.Future[torch.Tensor]]

# No buffer is sent: the buffers of a model follow from its fields, or from the whole step. torch
# 2.13 renamed the argument.
_RENAMED = "forward_sync_buffers" in inspect.signature(DistributedDataParallel.__init__).parameters
_NO_BUFFER_SYNC: dict[str, Any] = {
    "forward_sync_buffers" if _RENAMED else "broadcast_buffers": False
}


@dataclass
class _Reduced:
    """How many parameters' gradients have been sent in this step, after the first has begun."""

    has_begun: bool = False
    parameters: int = 0


class DDP(Strategy):
    """Every device holds the whole model; gradients are summed once a step, overlapped with the
    last backward pass.

    A loss need not use every parameter. A second backward pass gives a zero gradient to the
    parameters that the last one left out, so that no bucket waits (see reduce()).
    """

    def __init__(self, plan: Plan, comm: Comm, devices: Sequence[torch.device]) -> None:
        super().__init__(plan, comm, devices)
        self._norms = comm
        if plan.compute.norm_sync and dist.get_world_size() == comm.world_size:
            # Synchronised norms sum in backward too. Where ranks leave different parameters out,
            # the order of these sums and of the buckets differs from rank to rank, so the norms
            # get a group of their own. (Not in a part of a warm pool: torch names a group by the
            # number of groups that a rank knows, and these ranks know different numbers.)
            self._norms = Comm(dist.new_group(backend=dist.get_backend(comm.group)))

    def peers(self) -> Sequence[Peers]:
        return [self._norms]

    def close(self) -> None:
        super().close()
        if self._norms.group is not None and self._norms is not self._comm:
            end_group(self._norms.group)

    def distribute(self, models: list[nn.Module], materialize: Materialize) -> None:
        super().distribute(models, materialize)
        device, group = self._devices[0], self._comm.group
        assert group is not None
        call = ModelCall(models[0])
        # DDP would send them as they are; every rank has the same values already
        unsendable = [name for name, each in call.named_buffers() if each.dtype in SENT_AS_BYTES]
        if unsendable:
            wrapper: Any = DistributedDataParallel
            wrapper._set_params_and_buffers_to_ignore_for_model(call, unsendable)  # noqa: SLF001
        self._ddp = DistributedDataParallel(
            call,
            device_ids=[device.index] if device.type == "cuda" else None,
            process_group=group,
            gradient_as_bucket_view=True,
            **_NO_BUFFER_SYNC,
        )
        state, hook = _comm_hook(self._plan.layout.compress, group)
        timeline, reduced = self._comm.timeline, _Reduced()

        # No hook may hold this object: DDP's own part in C++ holds the hooks, where Python's
        # garbage collector sees no cycle, and the whole model would stay in a warm process.
        def counting_hook(state: Any, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
            if not reduced.has_begun:
                return noop_hook(state, bucket)
            reduced.parameters += len(bucket.parameters())
            if timeline is not None and bucket.is_last():
                # all gradients are there: the rest of backward waits for the other ranks
                timeline.mark_rest("sync")
            return hook(state, bucket)

        self._reduced = reduced
        self._ddp.register_comm_hook(state, counting_hook)
        self._named = {n: p for n, p in models[0].named_parameters() if p.requires_grad}
        # ids of the parameters that got a gradient in this round, and in any round of this step
        self._in_round = in_round = set[int]()
        self._in_step: frozenset[int] = frozenset()
        self._all_ids = frozenset(map(id, self._named.values()))
        if self._plan.batch.accumulation_steps > 1:  # else .grad itself tells: None until backward
            for parameter in self._named.values():
                register: Any = parameter.register_post_accumulate_grad_hook
                register(lambda with_gradient: in_round.add(id(with_gradient)))

    def train(self, _device_index: int, function: Callable[..., T], *arguments: object) -> T:
        result: T = self._ddp(function, *arguments)
        return result

    def begin_step(self, parameters: Sequence[nn.Parameter], num_microbatches: int) -> None:
        """Before a step: no gradient is left.

        With gradient accumulation the gradients are zeroed and stay in DDP's buckets: a second copy
        of them would take the memory of a whole model.
        """
        self._in_step = frozenset()
        if not self._reduced.has_begun:
            self._begin_buckets()
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        if gradients and self._plan.batch.accumulation_steps > 1:
            torch._foreach_zero_(gradients)
        else:
            super().begin_step(parameters, num_microbatches)

    def _begin_buckets(self) -> None:
        """Have DDP keep the gradients in its buckets before the first backward pass of several.

        Without it the gradients of the first step are added up beside the buckets, until the last
        backward pass: a second copy of them. Zeros are given in the order of DDP's first buckets.
        """
        if self._plan.batch.accumulation_steps > 1:
            self._ddp.reducer.prepare_for_backward([])
            for parameter in reversed(self._named.values()):
                torch.autograd.backward(parameter, torch.zeros_like(parameter))
            self._in_round.clear()
        self._reduced.has_begun = True

    def begin_microbatch(self, _index: int, _microbatch: MicroBatch, *, is_last: bool) -> None:
        self._in_step |= self._in_round
        self._in_round.clear()
        self._ddp.require_backward_grad_sync = is_last  # as DDP.no_sync() has it

    def has_gradient(self, parameter: nn.Parameter) -> bool:
        return id(parameter) in self._in_step

    def reduce(self, _parameters: Sequence[nn.Parameter]) -> None:
        """Leave the sum over all devices in the gradients.

        DDP sends a bucket once backward has given all gradients in it. Gradients that did not come
        on this rank are given now, as zeros; other ranks may have them.
        """
        if self._reduced.parameters < len(self._named):
            named = self._named.values()
            if self._plan.batch.accumulation_steps == 1:
                self._in_round = {id(p) for p in named if p.grad is not None}
            self._in_step |= self._in_round
            missing = [p for p in named if id(p) not in self._in_round]
            torch.autograd.backward(missing, [torch.zeros_like(p) for p in missing])
            self._in_round.clear()
        else:
            self._in_step = self._all_ids
        self._reduced.parameters = 0


def _comm_hook(compress: str, group: dist.ProcessGroup) -> tuple[object, CommHook]:
    """The communication hook for DDP, as (state, hook)."""
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
    """The hook of PowerSGD, times the number of ranks: PowerSGD averages, and a step needs sums.

    Source of the method: Vogels et al. 2019, arXiv:1905.13727.
    """
    world = dist.get_world_size(state.process_group)
    with outside_of_microbatches():  # its random start is the same on all ranks
        future: Any = powersgd.powerSGD_hook(state, bucket)
    result: torch.futures.Future[torch.Tensor] = future.then(lambda done: done.value().mul_(world))
    return result
