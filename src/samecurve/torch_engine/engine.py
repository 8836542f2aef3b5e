"""One process's training on torch devices: slots, reduction, clipping, scale and update, in one
call that never waits for the device.
"""

import random
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn

from samecurve.core.config.sections import Optimizer
from samecurve.core.determinism.init_values import values
from samecurve.core.determinism.microbatches import split_batch
from samecurve.core.eval_sums import EvalSums, SumSpecs, check_shape, size, unpack_sums
from samecurve.core.planning.plan import Plan
from samecurve.core.protocols import (
    Arrays,
    ArrayShard,
    Batch,
    Checkpoint,
    MicroBatch,
    Round,
    Sample,
    Task,
)
from samecurve.errors import UserError
from samecurve.torch_engine import checkpoint as states
from samecurve.torch_engine.checkpoint import State
from samecurve.torch_engine.layers.batch_norm import (
    MicroBatchContext,
    coupling_layers,
    synchronise_batch_norms,
)
from samecurve.torch_engine.layers.dropout import key_dropout
from samecurve.torch_engine.model import (
    Materializer,
    apply_speed_options,
    cast_weights,
    freeze,
    run_uncompiled,
    seeded,
)
from samecurve.torch_engine.optimizer_params import optimizer_params
from samecurve.torch_engine.precision import LossScale, autocast_for, current_device, weight_dtype
from samecurve.torch_engine.process_group import Comm
from samecurve.torch_engine.profiling.forward_timer import ForwardTimer
from samecurve.torch_engine.scalars import scalars_on, tree
from samecurve.torch_engine.step_metrics import QueuedMetrics, fetch, peak_memory_bytes
from samecurve.torch_engine.strategies.exact import Exact, SideEffectCheck, set_deterministic
from samecurve.torch_engine.strategies.replicated import STRATEGIES, Strategy
from samecurve.torch_engine.unused_params import check_used
from samecurve.torch_engine.user_optimizer import make_optimizer_update


class TorchEngine:
    """task: what is trained. comm: who trains together. devices: those of this process."""

    def __init__(
        self,
        task: Task,
        plan: Plan,
        optimizer: Optimizer,
        comm: Comm,
        devices: Sequence[torch.device],
    ) -> None:
        self.task, self.plan, self.devices, self.comm = task, plan, devices, comm
        self.device = devices[0]
        self._fields = optimizer
        if plan.exact:  # else as the user's own file may have set it
            set_deterministic(True)
        self._strategy: Strategy = (
            Exact(plan, comm, devices)
            if plan.exact
            else STRATEGIES[plan.strategy](plan, comm, devices)
        )
        self._rows = [MicroBatchContext() for _ in devices]
        self._own_forward = ForwardTimer(self.device)
        self._numbers = scalars_on(self.device)
        self._seeds: list[torch.Tensor] = []
        self._checked = False  # whether every parameter has been seen to have a gradient

    def init(self, weights: Checkpoint | None = None) -> State:
        if weights is None:
            return self._assemble(self._draw)
        state = self._assemble(lambda name, tensor: None)
        states.load_weights(
            state, self._strategy.local_shard, self._strategy.replica_index, weights
        )
        self._strategy.sync_replicas()
        return state

    def restore(self, saved: Checkpoint) -> State:
        state = self._assemble(lambda name, tensor: None)
        states.restore(state, self._strategy.local_shard, self._strategy.replica_index, saved)
        self._strategy.sync_replicas()
        return state

    def stage(self, rounds: Sequence[Round], of: int) -> list[Round]:
        """Host arrays as tensors, in pinned memory where they go to a GPU."""
        return [tuple(slot and self._staged(slot) for slot in found) for found in rounds]

    def _staged(self, slot: MicroBatch) -> MicroBatch:
        return MicroBatch(
            {name: self._tensor(array) for name, array in slot.arrays.items()},
            slot.real,
            None if slot.keys is None else self._tensor(slot.keys),
            slot.number,
        )

    def _tensor(self, array: Any) -> torch.Tensor:
        tensor = torch.from_numpy(
            np.ascontiguousarray(array)
        )  # a strided copy to a GPU would not be pinned
        if self.device.type == "cuda":
            return tensor.pin_memory()
        return (
            tensor.clone() if self.plan.exact else tensor
        )  # torch aligns its memory, numpy does not, and kernels may add in another order then

    def preflight(self) -> float:
        """Through the collective that steps use, or by copies between this process's devices."""
        ones = torch.stack(
            [torch.ones((), device=device).to(self.device) for device in self.devices]
        )
        return float(self.comm.all_reduce(ones.sum())())

    def step(
        self, state: State, batch: Batch, lr: float, asked: Sequence[int]
    ) -> tuple[State, QueuedMetrics]:
        numbers, marks = self._numbers, self.comm.timeline
        rows, told = numbers.summed(
            self.comm, self._accumulate(state, batch), self._told(batch, asked)
        )
        loss, weight = numbers.whole(rows)
        for shared in state.viewed_apart:
            shared.refresh()
        gradients = [weight.view.grad for weight in state.trained if weight.view.grad is not None]
        scale = numbers.taken(state.scale.value)
        correction = numbers.ratio(self.plan.nominal_weight, weight * scale)
        with marks.phase("clip"):
            norm = numbers.taken(self._strategy.norm(gradients)) * correction
            finite = numbers.finite(norm * loss)
            clip = self._fields.clip
            _scale(
                gradients,
                correction * numbers.ratio(clip, numbers.least(norm, clip)) if clip else correction,
            )
        with marks.phase("optimizer"):
            state.optimizer.step(lr, finite)
        with marks.phase("spread"):
            self._strategy.sync_replicas()
        figures = numbers.packed((loss, weight), told, (norm, finite, scale))
        state.scale.update(finite)
        return state, fetch(figures, self.comm.world_size)

    @torch.no_grad()
    def evaluate(self, state: State, rounds: Iterable[Sequence[Round]]) -> EvalSums:
        """The task's sums over all devices.

        Counts are added as integers, exact in any order; exact runs add the others along the tree,
        with a row for each microbatch.
        """
        specs = self.task.eval_sums()
        self._ready(state)
        self._mode(train=False)
        floats = torch.zeros(
            self._count(self.plan.eval_samples),
            size(specs, integer=False),
            dtype=torch.float64,
            device=self.device,
        )
        counts = torch.zeros(size(specs, integer=True), dtype=torch.int64, device=self.device)
        for microbatches in (microbatches for staged in rounds for microbatches in staged):
            sums = self._strategy.run_jobs(
                [
                    partial(self._evaluated, index, microbatch, specs)
                    for index, microbatch in enumerate(microbatches)
                ]
            )
            for microbatch, added in zip(microbatches, sums, strict=True):
                if added is not None:
                    floats[self._row(microbatch)] += added[0]
                    counts += added[1]
        self._mode(train=True)
        floats = tree(self.comm.all_reduce(floats)())
        if len(counts):
            counts = self.comm.all_reduce(counts)()
        return unpack_sums(specs, floats.cpu().numpy(), counts.cpu().numpy())

    def _count(self, samples: int) -> int:
        """Rows for what is added up over devices: one, or, exact, one for each slot, which only its
        own device fills.
        """
        return len(split_batch(samples, self.plan.micro_batch_size)) if self.plan.exact else 1

    def _row(self, slot: MicroBatch | None) -> int:
        return slot.number if slot and self.plan.exact else 0

    def _evaluated(
        self, index: int, microbatch: MicroBatch | None, specs: SumSpecs
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """A microbatch's sums in a row, and its counts in another; None: nothing is to be added."""
        if microbatch is None:
            return None
        device = self.devices[index]
        with torch.no_grad(), current_device(device), autocast_for(self.plan.precision, device):
            sums = self.task.evaluate(
                self._strategy.models[index], _move(microbatch.arrays, device)
            )
        if not microbatch.real:
            return None
        rows: dict[bool, list[torch.Tensor]] = {False: [], True: []}
        for name, spec in specs.items():
            dtype = torch.int64 if spec.integer else torch.float64
            value = torch.as_tensor(sums[name], dtype=dtype)
            check_shape(name, value.shape, spec)
            rows[spec.integer].append(value.to(self.device).reshape(-1))
        empty = torch.zeros(0, dtype=torch.int64, device=self.device)
        return torch.cat(rows[False] or [empty]), torch.cat(rows[True] or [empty])

    @torch.no_grad()
    def sample(self, state: State, step: int) -> Sequence[Sample]:
        self._ready(state)
        self._mode(train=False)
        with run_uncompiled(self.plan), autocast_for(self.plan.precision, self.device):
            samples = self.task.sample(state.model, self.plan.fixed.seed + step)
        self._mode(train=True)
        return samples

    def gather(self, state: State) -> list[ArrayShard]:
        self._ready(state)
        return states.gather(
            state, self._strategy.local_shard, self._strategy.replica_index, self.comm, self.device
        )

    def digests(self, state: State) -> dict[str, str]:
        self._ready(state)
        return states.digests(
            state, self._strategy.local_shard, self._strategy.replica_index, self.comm, self.device
        )

    def peak_memory(self) -> int:
        """Bytes that the fullest of this process's devices has held at most."""
        return max(map(peak_memory_bytes, self.devices))

    def close(self) -> None:
        self._strategy.close()
        if self.plan.exact:
            set_deterministic(False)

    def _assemble(self, value: Any) -> State:
        """value: fills a parameter made on the meta device."""
        models = [self._build(index) for index in range(len(self.devices))]
        if len({id(model) for model in models}) < len(models):
            raise UserError(
                "model() gave the same object twice; each device needs one of its own",
                "build the module in model(), anew each time",
                "task",
            )
        self._strategy.distribute(models, Materializer(models[0], self.device, value))
        self._drifting = (
            [buffer for buffer in models[0].buffers() if buffer.is_floating_point()]
            if coupling_layers(models[0]) and not self.plan.norm_sync
            else []
        )
        self._mode(train=True)
        trained = optimizer_params(models[0])
        unbounded = frozenset(
            name for name, buffer in models[0].named_buffers() if not buffer.isfinite().all()
        )
        return State(
            models[0],
            trained,
            make_optimizer_update(self.task, self._fields, trained),
            LossScale(self.plan.precision, self.device),
            unbounded,
        )

    def _build(self, index: int) -> nn.Module:
        """The model for one of this process's devices, on the meta device if all its values follow
        from the seed, else with the values it gave itself, as the first rank has them.
        """
        model = _on_meta(self.task)
        if model is None:
            with seeded(self.plan.fixed.seed):
                random.seed(self.plan.fixed.seed)
                np.random.seed(self.plan.fixed.seed % (1 << 32))
                model = self.task.model()
            self._own_values(model)
        model = cast_weights(model, self.plan.precision)
        freeze(model, self._fields.rules)
        if self.plan.norm_sync:
            synchronise_batch_norms(model, self._strategy.peers()[index], self._rows[index])
        if self.plan.keyed_dropout:
            key_dropout(model, self._rows[index], self.plan.fixed.seed)
        apply_speed_options(model, self.plan, self.devices[index])
        return model.train()

    @torch.no_grad()
    def _own_values(self, model: nn.Module) -> None:
        for name, parameter in model.named_parameters():
            if self.task.initial(name, tuple(parameter.shape)) is not None:
                self._draw(name, parameter)
        self.comm.broadcast(
            [*(p.detach() for p in model.parameters()), *model.buffers()], self.device
        )

    def _draw(self, name: str, tensor: torch.Tensor) -> None:
        initial = self.task.initial(name, tuple(tensor.shape))
        assert initial is not None
        if initial.std < 0:
            raise UserError(
                f"initial({name}) has standard deviation {initial.std}",
                "0 or more, or None to keep the model's own values",
                "task",
            )
        tensor.copy_(
            torch.from_numpy(values(self.plan.fixed.seed, name, tuple(tensor.shape), initial))
        )

    def _mode(self, train: bool) -> None:
        for module in (*self._strategy.models, *self._strategy.replicas):
            module.train(train)

    def _ready(self, state: State) -> None:
        """Before what all ranks must see alike: buffers that each kept for itself
        (train.allow_coupled) as the first has them.
        """
        self.comm.broadcast(self._drifting, self.device)

    def _accumulate(self, state: State, batch: Batch) -> Any:
        """Gradients of the step's scaled sum, reduced, into the model.

        Returns this process's [rows, 2]: loss sums and weights.
        """
        for weight in state.viewed_apart:
            weight.view.grad = None
        parameters = state.parameters
        self._strategy.begin_step(
            parameters, len(split_batch(batch.samples, self.plan.micro_batch_size))
        )
        if self.plan.reseeded_dropout:
            torch.manual_seed(hash((self.plan.fixed.seed, batch.step, self.comm.rank)) & 0x7FFFFFFF)
        jobs = [
            partial(
                self._rounds, index, [round[index] for round in batch.rounds], batch.samples, factor
            )
            for index, factor in enumerate(self._factors(state.scale))
        ]
        with self.comm.timeline.phase("rounds"):
            total = self._numbers.merged(self._strategy.run_jobs(jobs))
        with self.comm.timeline.phase("reduce"):
            self._strategy.reduce(parameters)
        if not self._checked:
            self._check_used(state)
        return total

    def _factors(self, scale: LossScale) -> list[torch.Tensor]:
        """What each device's losses are multiplied by. Only f16's changes from step to step."""
        if not self._seeds or scale.active:
            factor = scale.value / self.plan.nominal_weight
            self._seeds = [
                factor.to(device, weight_dtype(self.plan.precision)) for device in self.devices
            ]
        return self._seeds

    def _rounds(
        self, index: int, slots: Sequence[MicroBatch | None], samples: int, factor: torch.Tensor
    ) -> Any:
        """One device's slots.

        A dummy's loss is scaled by 0: it is a copy of a real row, so only what spoils the step
        anyway could make that a nan.
        """
        device, marks = self.devices[index], self.comm.timeline
        total = self._numbers.rows(self._count(samples), device)
        first = next(
            (number for number, slot in enumerate(slots) if slot), 0
        )  # ranks may differ in how many they have
        alone = (
            not index and self.plan.shards == 1 and not self.plan.norm_sync
        )  # its forward pass waits for no other rank
        for number, slot in enumerate(slots):
            if slot is None:
                continue
            with (
                current_device(device),
                self._strategy.accumulation_round(index, slot, number == len(slots) - 1),
            ):
                with (
                    marks.phase("forward", index),
                    self._own_forward.timed() if alone and number == first else nullcontext(),
                ):
                    loss_sum, weight = self._forward(index, slot, device)
                if not self._checked and number == first:
                    self._strategy.check_all_used(loss_sum)
                with marks.phase("backward", index):
                    torch.autograd.backward(
                        loss_sum,
                        (factor if slot.real else torch.zeros_like(factor)).to(loss_sum.dtype),
                    )
            if slot.real:
                self._numbers.add(total, self._row(slot), loss_sum, weight)
        return total

    def _forward(self, index: int, slot: MicroBatch, device: torch.device) -> Any:
        self._rows[index].begin(
            None if slot.keys is None else slot.keys.to(device, non_blocking=True), slot.real
        )
        seen = (
            None
            if self._checked or not self.plan.exact
            else SideEffectCheck(self._strategy.models[index], device)
        )
        with autocast_for(self.plan.precision, device):
            loss = self.task.loss(self._strategy.replicas[index], _move(slot.arrays, device))
        if seen:
            seen.check()
        return loss

    def _check_used(self, state: State) -> None:
        reached = self._strategy.params_with_grad()
        check_used(
            [weight.name for weight in state.trained],
            (weight.name in reached for weight in state.trained),
            self.comm,
            self.device,
            by_one=self.plan.exact,
        )
        self._checked = True

    def _told(self, batch: Batch, asked: Sequence[int]) -> list[float]:
        """What ranks tell each other of a step, each in places of its own: requests, wait and
        forward pass by rank, peak memory by device.
        """
        comm, held = self.comm.world_size, self.plan.devices_of(self.comm.rank)
        own = [0.0] * (2 * comm + self.plan.num_devices)
        own[self.comm.rank], own[comm + self.comm.rank] = (
            batch.wait_seconds,
            self._own_forward.seconds,
        )
        for device, place in zip(self.devices, held, strict=True):
            own[2 * comm + place] = peak_memory_bytes(device)
        return [*asked, *own]


def _scale(gradients: list[torch.Tensor], factor: Any) -> None:
    """In place. factor: a float, or a number on the device that clips."""
    torch._foreach_mul_(
        gradients,
        (
            factor.to(gradients[0].device, gradients[0].dtype)
            if isinstance(factor, torch.Tensor)
            else factor
        ),
    )


def _move(arrays: Arrays, device: torch.device) -> Arrays:
    return {name: tensor.to(device, non_blocking=True) for name, tensor in arrays.items()}


def _on_meta(task: Task) -> nn.Module | None:
    """The model without its values, if the task gives a rule for every one of them."""
    try:
        with torch.device("meta"):
            model: nn.Module = task.model()
    except RuntimeError:
        return None  # it computes with values while it is built
    ruled = all(
        p.is_meta and task.initial(name, tuple(p.shape)) is not None
        for name, p in model.named_parameters()
    )
    return model if ruled and not any(True for _ in model.buffers()) else None
