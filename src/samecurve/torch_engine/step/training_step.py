"""One optimizer step: microbatches, reduction, clipping, update; nobody waits for the device."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import TypeVar

import torch
from torch import nn

from samecurve.core.protocols import Arrays, Batch, MicroBatch, PendingMetrics, Progress, Round
from samecurve.torch_engine.checkpoint import State
from samecurve.torch_engine.profiling.forward_timer import ForwardTimer
from samecurve.torch_engine.step.after_step import AfterStep
from samecurve.torch_engine.step.batch_loss import BatchLossPasses, StepShare
from samecurve.torch_engine.step.precision import (
    LossScale,
    autocast_for,
    current_device,
    weight_dtype,
)
from samecurve.torch_engine.step.setup import EngineSetup
from samecurve.torch_engine.step.step_buffers import StepBuffers
from samecurve.torch_engine.step.step_metrics import (
    MetricsLayout,
    PeakMemory,
    QueuedMetrics,
    rank_report,
)
from samecurve.torch_engine.step.step_totals import Clip, GradientScaling, StepTotals, step_totals
from samecurve.torch_engine.step.update_phases import Phase, PhasedMetrics

T = TypeVar("T")


class TrainingStep:
    def __init__(self, setup: EngineSetup) -> None:
        self._setup, self._plan, self._task = setup, setup.plan, setup.task
        self._comm, self._strategy, self._devices = setup.comm, setup.strategy, setup.devices
        self._forward_timer = ForwardTimer(setup.device)
        self._peak_memory = PeakMemory(setup.devices)
        self._loss_factors: list[torch.Tensor] = []
        self.step_buffers = StepBuffers(setup)
        self._batch_loss = BatchLossPasses(setup, self._forward, self._forward_timer)
        self._after_step = AfterStep(setup.task, setup.strategy, setup.device)

    def run(
        self, state: State, batch: Batch[list[Round]], lr: float, requests: Sequence[int]
    ) -> PendingMetrics:
        """Train on one batch, each phase in turn; all ranks call it together.

        requests: what this rank was asked, in the order of events.REQUESTS
        """
        queued = {
            phase.name: self._run_phase(state, phase, batch, lr, requests) for phase in state.phases
        }
        return queued[""] if "" in queued else PhasedMetrics(queued)

    def _run_phase(
        self,
        state: State,
        phase: Phase,
        batch: Batch[list[Round]],
        lr: float,
        requests: Sequence[int],
    ) -> QueuedMetrics:
        totals = self._sum_gradients(state, phase, batch)
        means = phase.named_means.names
        totals.all_reduce(self._comm, self._report(batch, requests), 1 + len(means))
        scaling = self._update(state, phase, totals, lr, batch.step)
        layout = MetricsLayout(self._comm.world_size, means)
        metrics = totals.queue_metrics(scaling, state.scale.value, layout)
        state.scale.update(finite=scaling.finite)
        return metrics

    def _sum_gradients(self, state: State, phase: Phase, batch: Batch[list[Round]]) -> StepTotals:
        """Over all microbatches, and over devices; the totals are still this process's."""
        strategy, timeline = self._strategy, self._comm.timeline
        totals = step_totals(self._setup.num_sum_rows(batch.samples), self._devices)
        for param in state.viewed_apart:
            param.view.grad = None
        strategy.begin_step(state.parameters, self._setup.num_microbatches(batch.samples))
        with timeline.phase("rounds"):
            factors = self._loss_factors_of(state.scale)
            strategy.run_jobs(
                [
                    partial(self._rounds, index, batch, factors[index], totals=totals, phase=phase)
                    for index in range(len(self._devices))
                ]
            )
        self.step_buffers.end_step(self._setup.num_microbatches(batch.samples))
        with timeline.phase("reduce"):
            strategy.reduce(state.parameters)
        if phase.usage.is_first_step:
            phase.named_means.agree(self._comm, self._setup.device)
        if not phase.usage.done:
            names = [param.name for param in phase.trained]
            phase.usage.add(names, strategy.params_with_grad())
        return totals

    def _update(
        self, state: State, phase: Phase, totals: StepTotals, lr: float, step: int
    ) -> GradientScaling:
        """Clip, and move the phase's parameters on every replica."""
        strategy, timeline = self._strategy, self._comm.timeline
        for param in state.viewed_apart:
            param.refresh()
        views = [param.view for param in phase.trained]
        gradients = [view.grad for view in views if view.grad is not None]
        if len(gradients) < len(views):
            gradients = _with_zeros(views)
        with timeline.phase("clip"):
            scaling = totals.gradient_scaling(
                strategy.norm(phase.trained),
                state.scale.value,
                nominal_weight=self._plan.nominal_weight,
                clip=Clip(self._setup.optimizer.clip, self._plan.fixed.clip_epsilon),
            )
            _multiply(gradients, scaling.factor)
        with timeline.phase("optimizer"):
            phase.optimizer.step(lr, finite=scaling.finite)
            if phase is state.phases[-1]:
                self._after_step(step, finite=scaling.finite)
                if state.average is not None:
                    state.average.add(finite=scaling.finite)
        with timeline.phase("replicas"):
            strategy.sync_replicas()
        return scaling

    def _rounds(
        self,
        device_index: int,
        batch: Batch[list[Round]],
        loss_factor: torch.Tensor,
        *,
        totals: StepTotals,
        phase: Phase,
    ) -> None:
        """All that one device computes of the gradient."""
        microbatches = [of_round[device_index] for of_round in batch.rounds]
        progress = self._plan.progress_at(batch.step)
        if not self._plan.whole_batch:
            self._accumulate(
                device_index, microbatches, loss_factor, totals, phase=phase, progress=progress
            )
            return
        share = StepShare(
            device_index=device_index,
            microbatches=[microbatch for microbatch in microbatches if microbatch],
            num_samples=batch.samples,
            progress=progress,
            phase=phase,
            step_buffers=self.step_buffers,
        )
        self._batch_loss.accumulate(share, loss_factor, totals)

    def _accumulate(
        self,
        device_index: int,
        microbatches: Sequence[MicroBatch | None],
        loss_factor: torch.Tensor,
        totals: StepTotals,
        *,
        phase: Phase,
        progress: Progress,
    ) -> None:
        """Forward and backward of one device's microbatches, in their order.

        A dummy's loss is scaled by 0: it is a copy of a real row, so only what spoils the step
        anyway could make that a nan.
        """
        device, timeline = self._devices[device_index], self._comm.timeline
        real_rounds = (number for number, microbatch in enumerate(microbatches) if microbatch)
        first = next(real_rounds, 0)  # ranks may differ in how many they have
        waits_for_nobody = self._plan.shards == 1 and not self._plan.compute.norm_sync
        timed = device_index == 0 and waits_for_nobody
        for number, microbatch in enumerate(microbatches):
            if microbatch is None:
                continue
            is_last = number == len(microbatches) - 1
            with (
                current_device(device),
                self._setup.contexts[device_index].within(
                    phase.keys_of(microbatch), real=microbatch.real, number=microbatch.number
                ),
                self._strategy.accumulation_round(device_index, microbatch, is_last=is_last),
            ):
                self.step_buffers.begin_microbatch(device_index, is_first=number == first)
                timer = self._forward_timer.timed() if timed and number == first else nullcontext()
                with timeline.phase("forward", device_index), timer:
                    losses = self._forward(
                        device_index, microbatch, phase, self._task.losses, progress, train=True
                    )
                means = phase.named_means.in_order(losses)
                with timeline.phase("backward", device_index):
                    factor = loss_factor if microbatch.real else torch.zeros_like(loss_factor)
                    self.step_buffers.after_forward(device_index)
                    # a gradient passed to backward() imports sympy: half a second of a start
                    (means[0].sum * factor.to(means[0].sum.dtype)).backward()
                    self.step_buffers.after_backward(device_index)
            if microbatch.real:
                totals.add(device_index, self._setup.sum_row(microbatch), means)

    def _forward(
        self,
        device_index: int,
        microbatch: MicroBatch,
        phase: Phase,
        function: Callable[..., T],
        progress: Progress,
        *,
        train: bool,
    ) -> T:
        """function(model, arrays, progress, phase). train: whether backward follows."""
        device = self._devices[device_index]
        keeps_copies = self._plan.recompute == "none"
        with autocast_for(self._plan.precision, device, keeps_copies=keeps_copies):
            arrays = to_device(microbatch.arrays, device)
            run = self._strategy.train if train else self._strategy.call
            return run(device_index, function, arrays, progress, phase.name)

    def _loss_factors_of(self, scale: LossScale) -> list[torch.Tensor]:
        """What each device's losses are multiplied by; only f16's changes from step to step."""
        if not self._loss_factors or scale.active:
            factor = scale.value / self._plan.nominal_weight
            dtype = weight_dtype(self._plan.precision)
            self._loss_factors = [factor.to(device, dtype) for device in self._devices]
        return self._loss_factors

    def _report(self, batch: Batch[list[Round]], requests: Sequence[int]) -> list[float]:
        return rank_report(
            self._plan,
            self._comm.rank,
            requests=requests,
            wait_seconds=batch.wait_seconds,
            forward_seconds=self._forward_timer.seconds,
            memory_bytes=self._peak_memory.report(),
        )


def to_device(arrays: Arrays, device: torch.device) -> Arrays:
    return {name: tensor.to(device, non_blocking=True) for name, tensor in arrays.items()}


def _with_zeros(parameters: Sequence[nn.Parameter]) -> list[torch.Tensor]:
    """Their gradients; what this step's loss did not use has a zero one from now on."""
    gradients = []
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        gradients.append(parameter.grad)
    return gradients


def _multiply(gradients: list[torch.Tensor], factor: float | torch.Tensor) -> None:
    """In place. factor: a number, which may lie on the device that clips."""
    if isinstance(factor, torch.Tensor):
        factor = factor.to(gradients[0].device, gradients[0].dtype)
    torch._foreach_mul_(gradients, factor)
