"""The optimizer step: how we train, on one page.

A step's samples are cut into microbatches (core/determinism/microbatches.py); each device has some
of them. Then, in this order:

1. forward and backward of each microbatch, its random numbers drawn from its samples' keys;
2. gradients, loss sums and weights are added over all devices, once;
3. one division by the weight of the whole step, and clipping by the norm of the whole gradient;
4. the update; the metrics are queued for the loop.

The loss is a sum over samples and is divided once, so the curve does not depend on how the samples
were divided over devices. The step never waits for a GPU: losses and norms stay tensors until the
loop reads them, one step late.

What only some runs need (a loss scale, an average of weights, timers) is a hook: a function in one
of the step's lists. step_assembly.py fills the lists.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import ClassVar

import torch

from samecurve.core.determinism import Mean
from samecurve.core.determinism.step_arithmetic import Clip, GradientScaling, loss_factor
from samecurve.core.protocols import Arrays, Batch, MicroBatch, PendingMetrics, Progress, Round
from samecurve.torch_engine.precision import in_precision, on_device, weight_dtype
from samecurve.torch_engine.randomness import StagedKeys
from samecurve.torch_engine.step import EngineSetup, State, Update
from samecurve.torch_engine.step.step_metrics import (
    DeviceTotals,
    HostTotals,
    NamedMeans,
    Number,
    RankReport,
    StepTotals,
)

Finite = torch.Tensor | bool
# The training step of a run: one update, or several in turn. It is given the state, the batch, the
# learning rate and this rank's requests; it changes the state in place, and returns it.
Step = Callable[[State, Batch[list[Round]], float, Sequence[int]], tuple[State, PendingMetrics]]


class TrainingStep:
    """Makes one update on this process's devices.

    Hooks, each called in the order of its list:
    before_step(batch): before the first microbatch.
    before_forward, after_forward, after_backward(device_index, is_first): around each microbatch;
        is_first: whether it is this device's first in this step.
    after_reduction(): a hook that returns True comes again in the next step. Here all ranks may
        call collectives of their own: before, each sends gradients when it has them. They are sums
        here, not yet scaled or clipped, and shards have none yet.
    before_update(gradients): the step's gradients, scaled and clipped, which it may change in
        place: this process's parts of them.
    after_update(step, finite): after the update, which leaves the weights as they are where
        `finite` is false.
    """

    _forwards: ClassVar[int] = 1  # of a microbatch, in one update

    def __init__(self, setup: EngineSetup, state: State, update: Update) -> None:
        plan = setup.plan
        self.setup, self.plan, self.task, self.comm = setup, plan, setup.task, setup.comm
        self.strategy, self.devices = setup.strategy, setup.devices
        self.state, self.update = state, update
        self.named_means = NamedMeans()
        self.report = RankReport(plan, setup.comm.rank, setup.devices)
        self.before_step: list[Callable[[Batch[list[Round]]], None]] = []
        self.before_forward: list[Callable[[int, bool], None]] = []
        self.after_forward: list[Callable[[int, bool], None]] = []
        self.after_backward: list[Callable[[int, bool], None]] = []
        self.after_reduction: list[Callable[[], bool | None]] = []
        self.before_update: list[Callable[[Sequence[torch.Tensor]], None]] = []
        self.after_update: list[Callable[[int, Finite], None]] = []
        self.train_model = in_precision(setup.strategy.train, plan, setup.device)
        self._reads_rows_again = self._forwards * len(state.updates) > 1
        self.set_loss_scale(1.0)
        self._clip = Clip(setup.optimizer.clip, plan.fixed.clip_epsilon)
        self._totals = DeviceTotals if setup.device.type == "cuda" else HostTotals
        self._views = [param.view for param in update.trained]
        # complex or sharded parameters: the optimizer works on another tensor, their view
        self._viewed_apart = [p for p in state.trained if p.view is not p.parameter]
        self._jobs = [
            on_device(partial(self.compute_share, index), device)
            for index, device in enumerate(setup.devices)
        ]

    def run(
        self, state: State, batch: Batch[list[Round]], lr: float, requests: Sequence[int]
    ) -> tuple[State, PendingMetrics]:
        """Train on one batch; all ranks call it together.

        state: the state that this step was made for; its tensors are changed in place.
        requests: how many new requests this rank has seen, for each kind in events.REQUESTS.
        """
        for hook in self.before_step:
            hook(batch)

        # 1. forward and backward
        totals = self._totals(batch.num_microbatches, self.devices)
        self.compute_gradients(batch, totals)

        # 2. sums over all devices
        self.reduce_gradients()
        for hook_after in tuple(self.after_reduction):
            if not hook_after():
                self.after_reduction.remove(hook_after)
        names = self.named_means.names
        report = self.report.values(requests, batch.wait_seconds)
        totals.all_reduce(self.comm, report, 1 + len(names))  # 1: the loss itself

        # 3. one division, and clipping
        scaling = self.scale_gradients(totals)

        # 4. the update
        if self.before_update:
            self.change_gradients()
        self.move_weights(lr, batch.step, scaling.finite)
        if len(self.devices) > 1:
            self.sync_replicas()
        return state, totals.queue_metrics(scaling, names)

    def compute_gradients(self, batch: Batch[list[Round]], totals: StepTotals) -> None:
        """Forward and backward of all microbatches of this process, its devices side by side."""
        for param in self._viewed_apart:
            param.view.grad = None
        self.strategy.begin_step(self.state.parameters, batch.num_microbatches)
        if len(self._jobs) == 1:
            self._jobs[0](batch, totals)
        else:
            self.strategy.run_jobs(self._jobs, batch, totals)

    def compute_share(
        self, device_index: int, batch: Batch[list[Round]], totals: StepTotals
    ) -> None:
        """Forward and backward of one device's microbatches, in their order."""
        strategy, context = self.strategy, self.setup.contexts[device_index]
        is_first, last = True, len(batch.rounds) - 1
        for number, microbatches in enumerate(batch.rounds):
            microbatch = microbatches[device_index]
            if microbatch is None:  # this device has fewer microbatches than others
                continue
            keys, real = microbatch.keys, microbatch.real
            if self.update.number:
                keys = self.keys_of(microbatch)
            with context.within(keys, real=real, number=microbatch.number):
                strategy.begin_microbatch(device_index, microbatch, is_last=number == last)
                for hook in self.before_forward:
                    hook(device_index, is_first)
                losses = self.forward(device_index, microbatch, batch.progress)
                for hook in self.after_forward:
                    hook(device_index, is_first)
                means = self.named_means.in_order(losses)
                self.backward(device_index, means[0].sum, real=real)
                for hook in self.after_backward:
                    hook(device_index, is_first)
                strategy.end_microbatch(device_index, microbatch)
            if real:
                totals.add(device_index, microbatch.number, means)
            is_first = False

    def keys_of(self, microbatch: MicroBatch) -> StagedKeys | None:
        """The keys of a microbatch's random numbers. Each phase draws numbers of its own."""
        keys: StagedKeys | None = microbatch.keys
        if keys is None or not self.update.number:
            return keys
        return StagedKeys(keys.rows.of_phase(self.update.number))

    def forward(
        self, device_index: int, microbatch: MicroBatch, progress: Progress
    ) -> Mapping[str, Mean]:
        """The loss of a microbatch, as "loss", and what is logged beside it."""
        on_cpu = self.devices[device_index].type == "cpu"
        arrays = microbatch.arrays if on_cpu else self.arrays_on(device_index, microbatch)
        phase = self.update.phase
        return self.train_model(device_index, self.task.losses, arrays, progress, phase)

    def arrays_on(self, device_index: int, microbatch: MicroBatch) -> Arrays:
        """The arrays of a microbatch on their device.

        A task's code may write into them. So they are copies where a step reads them again.
        """
        device = self.devices[device_index]
        if device.type == "cpu":
            if not self._reads_rows_again:
                return microbatch.arrays
            return {name: tensor.clone() for name, tensor in microbatch.arrays.items()}
        return to_device(microbatch.arrays, device)

    def backward(self, device_index: int, loss_sum: torch.Tensor, *, real: bool) -> None:
        """Add the gradient of a microbatch's loss to that of the step.

        A dummy's loss is multiplied by 0. That gives a nan only where the loss or its gradient is
        not finite. A dummy is a copy of a real row, which then spoils the step anyway.
        """
        factor = self.loss_factors[device_index]
        if not real:
            factor = torch.zeros_like(factor)
        # a product, because backward(gradient=...) would import sympy: half a second of a start
        torch.autograd.backward(loss_sum * factor.to(loss_sum.dtype))

    def set_loss_scale(self, scale: Number) -> None:
        """Set the factor by which every loss is multiplied before its backward pass. It keeps the
        sums within the range of the number format.
        """
        self.loss_scale = scale
        scale = torch.as_tensor(scale, dtype=torch.float64)
        factor = loss_factor(scale, self.plan.nominal_weight)
        dtype = weight_dtype(self.plan.compute.precision)
        self.loss_factors = [factor.to(device, dtype) for device in self.devices]

    def reduce_gradients(self) -> None:
        """Sum the gradients over all devices of all ranks."""
        self.strategy.reduce(self.state.parameters)

    def scale_gradients(self, totals: StepTotals) -> GradientScaling:
        """Divide the summed gradients by the weight of the whole step, and clip them by the norm
        of the whole gradient.

        A parameter that this step's loss did not use has a zero gradient, under every strategy.
        """
        for param in self._viewed_apart:
            param.refresh()
        gradients: list[torch.Tensor] = []
        for view in self._views:
            if view.grad is None:
                view.grad = torch.zeros_like(view)
            gradients.append(view.grad)
        norm = self.strategy.norm(self.update.trained, gradients)
        scaling = totals.gradient_scaling(
            norm, self.loss_scale, nominal_weight=self.plan.nominal_weight, clip=self._clip
        )
        factor = scaling.factor
        if isinstance(factor, torch.Tensor):
            factor = factor.to(gradients[0].device, gradients[0].dtype)
        torch._foreach_mul_(gradients, factor)
        return scaling

    def change_gradients(self) -> None:
        """Let features change the gradients of the update."""
        gradients = [view.grad for view in self._views if view.grad is not None]
        for hook in self.before_update:
            hook(gradients)

    def move_weights(self, lr: float, step: int, finite: Finite) -> None:
        """Update the weights, unless the step is not finite."""
        self.update.optimizer.step(lr, finite=finite)
        for hook in self.after_update:
            hook(step, finite)

    def sync_replicas(self) -> None:
        """Give the other devices of this process the new weights."""
        self.strategy.sync_replicas()


def to_device(arrays: Arrays, device: torch.device) -> Arrays:
    return {name: tensor.to(device, non_blocking=True) for name, tensor in arrays.items()}
