"""One rank's training on a torch device: slots, reduction, clipping, scale and update, in one call that never waits for the device."""

import math
import resource
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from lockstep.core.config import Optimizer
from lockstep.core.events import REQUESTS
from lockstep.core.initial import normal
from lockstep.core.plan import Plan
from lockstep.core.protocols import Arrays, Batch, Figures, Piece, Saved, Task
from lockstep.errors import UserError
from lockstep.on_torch import state as states
from lockstep.on_torch.collectives import Ranks
from lockstep.on_torch.precision import Scale, compute, weight_dtype
from lockstep.on_torch.state import State
from lockstep.on_torch.strategies import STRATEGIES

_HEAD = 2 + len(REQUESTS)  # loss sum, weight, requests; then waits and memory by rank


@dataclass(frozen=True)
class Stats:
    """A step's figures on their way to the host; read() waits for them."""

    values: torch.Tensor
    world: int
    ready: torch.cuda.Event | float  # what tells when the step is done, or when it was

    def read(self) -> Figures:
        if isinstance(self.ready, float):
            at = self.ready
        else:
            self.ready.synchronize()
            at = time.perf_counter()
        values = self.values.tolist()
        summed, (norm, finite, scale) = values[:-3], values[-3:]
        loss_sum, weight = summed[:2]
        asked = {request: int(count) for request, count in zip(REQUESTS, summed[2:_HEAD], strict=True)}
        waits, memory = summed[_HEAD : _HEAD + self.world], summed[_HEAD + self.world :]
        return Figures(loss_sum / weight if weight else math.nan, weight, norm, bool(finite), asked, tuple(waits), tuple(memory), at, scale)


class TorchEngine:
    """task: what is trained. ranks: who trains together. device: this rank's."""

    def __init__(self, task: Task, plan: Plan, optimizer: Optimizer, ranks: Ranks, device: torch.device) -> None:
        self.task, self.plan, self.device, self.ranks = task, plan, device, ranks
        self._fields = optimizer
        self._slots = states.SLOTS[optimizer.name]
        self._strategy = STRATEGIES[plan.strategy](ranks, device)

    def init(self) -> State:
        model = self._empty_model()
        _initialise(model, self.task, self.plan.fixed.seed)
        return self._assemble(model)

    def restore(self, saved: Saved) -> State:
        state = self._assemble(self._empty_model())
        states.restore(state, self._slots, saved)
        return state

    def stage(self, arrays: Mapping[str, Any]) -> Arrays:
        """Host arrays as tensors, in pinned memory where they go to a GPU."""
        tensors = {name: torch.from_numpy(np.ascontiguousarray(array)) for name, array in arrays.items()}  # a strided copy to a GPU would not be pinned
        return {name: tensor.pin_memory() for name, tensor in tensors.items()} if self.device.type == "cuda" else tensors

    def step(self, state: State, batch: Batch, lr: float, asked: Sequence[int]) -> tuple[State, Stats]:
        summed = self._summed(self._accumulate(state, batch), batch, asked)()
        gradients = [p.grad for p in state.trained if p.grad is not None]
        correction = self.plan.nominal / (summed[1] * state.scale.value)
        norm = self._strategy.norm(gradients) * correction
        finite = torch.isfinite(norm * summed[0])
        clip = self._fields.clip
        factor = correction * (clip / norm.clamp(min=clip)) if clip else correction
        torch._foreach_mul_(gradients, factor.to(gradients[0].dtype))
        self._update(state, lr, finite)
        figures = torch.cat([summed, torch.stack([norm, finite.double(), state.scale.value])])
        state.scale.update(finite)
        return state, self._fetch(figures)

    @torch.no_grad()
    def evaluate(self, state: State, batches: Iterable[Arrays]) -> dict[str, float]:
        """Sums of the task's figures over all ranks. The order of the names is the task's, the same on every rank."""
        state.model.eval()
        names = self.task.eval_names()
        total = torch.zeros(len(names), dtype=torch.float64, device=self.device)
        for batch in batches:
            with compute(self.plan.precision, self.device):
                found = self.task.evaluate(state.model, self._move(batch))
            total += torch.stack([torch.as_tensor(found[name], dtype=torch.float64, device=self.device) for name in names])
        state.model.train()
        return dict(zip(names, self.ranks.sum(total)().tolist(), strict=True))

    @torch.no_grad()
    def sample(self, state: State, step: int) -> list[str]:
        state.model.eval()
        with compute(self.plan.precision, self.device):
            texts = self.task.sample(state.model, self.plan.fixed.seed + step)
        state.model.train()
        return texts

    def gather(self, state: State) -> list[Piece]:
        return states.gather(state, self._slots, self.ranks.world, self.ranks.index)

    def _empty_model(self) -> nn.Module:
        with torch.device(self.device):
            model: nn.Module = self.task.model()
        return model.to(weight_dtype(self.plan.precision))

    def _assemble(self, model: nn.Module) -> State:
        model.train()
        placed = self._strategy.place(model)
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        return State(model, placed, trained, states.make_optimizer(self._fields, model), Scale(self.plan.precision, self.device))

    def _move(self, arrays: Arrays) -> Arrays:
        return {name: tensor.to(self.device, non_blocking=True) for name, tensor in arrays.items()}

    def _accumulate(self, state: State, batch: Batch) -> torch.Tensor:
        """Gradients of the step's scaled sum into the model, reduced in the last round. Returns this rank's [loss sum, weight]."""
        self._clear(state)
        total = torch.zeros(2, dtype=torch.float64, device=self.device)
        factor = (state.scale.value / self.plan.nominal).to(weight_dtype(self.plan.precision))
        for index, slot in enumerate(batch.slots):
            with self._strategy.round(index == len(batch.slots) - 1, batch.real):
                with compute(self.plan.precision, self.device):
                    loss = self.task.loss(state.placed, self._move(slot))
                torch.autograd.backward(loss.sum, factor.to(loss.sum.dtype))
            if batch.real:
                total += torch.stack([loss.sum.detach().double(), torch.as_tensor(loss.weight, dtype=torch.float64, device=self.device)])
        return total

    def _clear(self, state: State) -> None:
        """Where several rounds add up before a reduction, gradients stay where DDP's buckets are: a second copy of them would be a whole model more."""
        kept = [p.grad for p in state.trained if p.grad is not None] if self.plan.rounds > 1 and self.ranks.group is not None else []
        if kept:
            torch._foreach_zero_(kept)
            return
        for parameter in state.trained:
            parameter.grad = None

    def _summed(self, total: torch.Tensor, batch: Batch, asked: Sequence[int]) -> Any:
        own = [0.0] * (2 * self.ranks.world)
        own[self.ranks.index] = batch.wait
        own[self.ranks.world + self.ranks.index] = self._memory()
        host = torch.tensor([0.0, 0.0, *asked, *own], dtype=torch.float64)
        values = host.pin_memory().to(self.device, non_blocking=True) if self.device.type == "cuda" else host
        values[:2] = total
        return self.ranks.sum(values)

    def _update(self, state: State, lr: float, finite: torch.Tensor) -> None:
        """One optimizer step, left out on the device itself where the gradient is not finite."""
        for group in state.optimizer.param_groups:
            group["lr"] = lr
        fused: Any = state.optimizer
        fused.grad_scale = None
        fused.found_inf = (~finite).float()
        state.optimizer.step()

    def _fetch(self, figures: torch.Tensor) -> Stats:
        if self.device.type != "cuda":
            return Stats(figures, self.ranks.world, time.perf_counter())
        host = torch.empty(figures.shape, dtype=figures.dtype, pin_memory=True)
        host.copy_(figures, non_blocking=True)
        ready = torch.cuda.Event()  # type: ignore[no-untyped-call]
        ready.record()
        return Stats(host, self.ranks.world, ready)

    def _memory(self) -> int:
        """Peak bytes: allocated on the GPU, or resident in this process."""
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device)
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


@torch.no_grad()
def _initialise(model: nn.Module, task: Task, seed: int) -> None:
    """Every parameter from (seed, name, shape), whatever the device. UserError: the task gives no value for one."""
    for name, parameter in model.named_parameters():
        std = task.initial_std(name, tuple(parameter.shape))
        if std is None:
            continue  # the module's own constant (a norm's ones)
        if std < 0:
            raise UserError(f"initial_std({name}) is {std}", "a standard deviation, or None to keep the module's own values", "task")
        parameter.copy_(torch.from_numpy(normal(seed, name, tuple(parameter.shape), std)))
