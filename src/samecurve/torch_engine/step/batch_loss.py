"""Losses over the whole batch: Task.features of each microbatch, Task.batch_loss of all of them.

Every device computes its own microbatches' features; all are put together in the samples' order
(feature_table.py). Each device takes the loss of the whole batch and its gradient by every row, the
same everywhere, and goes backward with those of its own rows. So the sum over devices is the
gradient of the one loss, however its samples were divided.

A step of one round, with a microbatch on each device, keeps their graphs. One of several rounds
can't hold the graphs of all: features are computed without, and each microbatch again before its
backward pass, with the same keyed random numbers (gradient caching; Gao et al. 2021,
arXiv:2101.06983).
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

from samecurve.core.determinism.microbatches import accumulation_steps
from samecurve.core.protocols import MicroBatch, Progress
from samecurve.errors import UserError
from samecurve.torch_engine.profiling.forward_timer import ForwardTimer
from samecurve.torch_engine.randomness.microbatch_context import outside_of_microbatches
from samecurve.torch_engine.step.gathered_features import Features, FeatureTable, check_rows
from samecurve.torch_engine.step.precision import autocast_for, current_device
from samecurve.torch_engine.step.setup import EngineSetup
from samecurve.torch_engine.step.step_buffers import StepBuffers
from samecurve.torch_engine.step.step_totals import StepTotals
from samecurve.torch_engine.step.update_phases import Phase

Gradients = Mapping[str, torch.Tensor | None]  # by feature; None: the loss does not look at it


class Forward(Protocol):
    """What a task computes of one microbatch, as the step runs it.

    function: of the model, arrays and progress. train: whether backward follows.
    """

    def __call__(
        self,
        device_index: int,
        microbatch: MicroBatch,
        phase: Phase,
        function: Callable[..., Any],
        progress: Progress,
        *,
        train: bool,
    ) -> Any: ...


@dataclass(frozen=True, kw_only=True)
class StepShare:
    """What one device of this process does of a step."""

    device_index: int
    microbatches: Sequence[MicroBatch]
    num_samples: int  # of the whole step
    progress: Progress
    phase: Phase
    step_buffers: StepBuffers


class BatchLossPasses:
    """The rounds of a step whose loss is the whole batch's.

    timer: of the first forward pass of a step, where it waits for no other rank
    """

    def __init__(self, setup: EngineSetup, forward: Forward, timer: ForwardTimer) -> None:
        self._setup, self._plan, self._task = setup, setup.plan, setup.task
        self._strategy, self._forward, self._timer = setup.strategy, forward, timer
        self._tables: dict[int, FeatureTable] = {}  # by device of this process
        self._moved: dict[int, frozenset[str]] = {}  # buffers that a forward pass changes

    def accumulate(self, share: StepShare, loss_factor: torch.Tensor, totals: StepTotals) -> None:
        """Forward and backward of one device's microbatches, in their order; every device calls it.

        loss_factor: of the loss sum
        """
        with current_device(self._setup.devices[share.device_index]):
            if self._is_one_round(share.num_samples) and share.microbatches:
                self._keeping_graph(share, loss_factor, totals)
            else:
                features = self._first_pass(share)
                gradients = self._gradients(share, features, loss_factor, totals)
                features.clear()
                self._second_pass(share, gradients)

    def _is_one_round(self, num_samples: int) -> bool:
        """Whether no device has more than one microbatch of such a step; the same on all of them,
        since what strategies send in a forward pass must come in one order.
        """
        plan, count = self._plan, self._setup.num_microbatches(num_samples)
        return accumulation_steps(count, plan.num_devices, plan.batch.microbatch_seconds) == 1

    def _keeping_graph(
        self, share: StepShare, loss_factor: torch.Tensor, totals: StepTotals
    ) -> None:
        (microbatch,) = share.microbatches
        with self._within(share, microbatch), self._round(share, microbatch, is_last=True):
            share.step_buffers.begin_microbatch(share.device_index, is_first=True)
            with self._timed(share):
                features = self._features(share, microbatch, train=True)
            with outside_of_microbatches():
                gradients = self._gradients(share, [features], loss_factor, totals)
            self._backward(share, microbatch, features, gradients)

    def _first_pass(self, share: StepShare) -> list[Features]:
        """The features of all microbatches, without graphs; what a forward pass changes in the
        model stays as it was.

        train.exact computes as for a graph, which is let go of: kernels may be others without.
        """
        gradient = nullcontext() if self._plan.exact else torch.no_grad()
        features: list[Features] = []
        with self._buffers_kept(share.device_index), gradient:
            for microbatch in share.microbatches:
                timer = nullcontext() if features else self._timed(share)
                with self._within(share, microbatch), timer:
                    share.step_buffers.begin_microbatch(share.device_index, is_first=not features)
                    rows = self._features(share, microbatch, train=False)
                features.append({name: feature.detach() for name, feature in rows.items()})
        return features

    def _second_pass(self, share: StepShare, gradients: Gradients) -> None:
        for microbatch in share.microbatches:
            is_last = microbatch is share.microbatches[-1]
            with self._within(share, microbatch), self._round(share, microbatch, is_last=is_last):
                share.step_buffers.begin_microbatch(share.device_index, is_first=False)
                features = self._features(share, microbatch, train=True)
                self._backward(share, microbatch, features, gradients)

    def _within(self, share: StepShare, microbatch: MicroBatch) -> AbstractContextManager[None]:
        context = self._setup.contexts[share.device_index]
        keys = share.phase.keys_of(microbatch)
        return context.within(keys, real=microbatch.real, number=microbatch.number)

    def _round(
        self, share: StepShare, microbatch: MicroBatch, *, is_last: bool
    ) -> AbstractContextManager[object]:
        return self._strategy.accumulation_round(share.device_index, microbatch, is_last=is_last)

    def _timed(self, share: StepShare) -> AbstractContextManager[object]:
        waits_for_nobody = self._plan.shards == 1 and not self._plan.compute.norm_sync
        if share.device_index == 0 and waits_for_nobody:
            return self._timer.timed()
        return nullcontext()

    def _features(self, share: StepShare, microbatch: MicroBatch, *, train: bool) -> Features:
        with self._setup.comm.timeline.phase("forward", share.device_index):
            features: Features = self._forward(
                share.device_index,
                microbatch,
                share.phase,
                self._task.features,
                share.progress,
                train=train,
            )
        count = 1
        if microbatch.real:
            rest = share.num_samples - self._first_sample(microbatch)
            count = min(self._plan.micro_batch_size, rest)
        check_rows(features, count)
        return features

    def _first_sample(self, microbatch: MicroBatch) -> int:
        return microbatch.number * self._plan.micro_batch_size

    def _table(self, device_index: int) -> FeatureTable:
        if device_index not in self._tables:
            peers = self._strategy.peers()[device_index]
            self._tables[device_index] = FeatureTable(peers, self._setup.devices[device_index])
        return self._tables[device_index]

    def _gradients(
        self,
        share: StepShare,
        features: Sequence[Features],
        loss_factor: torch.Tensor,
        totals: StepTotals,
    ) -> Gradients:
        """Of the loss of the whole batch, times the factor, by every sample's features; who has the
        first sample counts the loss. Empty where there is no microbatch.

        features: of the microbatches
        """
        device, timeline = self._setup.devices[share.device_index], self._setup.comm.timeline
        parts = [
            (self._first_sample(microbatch), rows)
            for microbatch, rows in zip(share.microbatches, features, strict=True)
            if microbatch.real
        ]
        with timeline.phase("sync", share.device_index):
            whole = self._table(share.device_index).put_together(parts, share.num_samples)
        if not share.microbatches:
            return {}
        leaves = {
            name: feature.requires_grad_()
            for name, feature in whole.items()
            if feature.is_floating_point() or feature.is_complex()
        }
        with timeline.phase("forward", share.device_index):
            with autocast_for(self._plan.precision, device):
                losses = self._task.batch_losses(whole, share.progress, share.phase.name)
            means = share.phase.named_means.in_order(losses)
            total = means[0].sum
            leaf_gradients = torch.autograd.grad(
                total, list(leaves.values()), loss_factor.to(total.dtype), allow_unused=True
            )
        if any(first == 0 for first, _ in parts):
            totals.add(share.device_index, 0, means)
        return {**dict.fromkeys(whole), **dict(zip(leaves, leaf_gradients, strict=True))}

    def _backward(
        self, share: StepShare, microbatch: MicroBatch, features: Features, gradients: Gradients
    ) -> None:
        """Its rows' part of the whole gradient; a dummy's is zero.

        UserError: nothing that the loss looks at has a gradient.
        """
        outputs, sent = [], []
        first = self._first_sample(microbatch)
        for name, feature in features.items():
            gradient = gradients[name]
            if gradient is None or not feature.requires_grad:
                continue
            outputs.append(feature)
            rows = gradient[first : first + len(feature)]
            sent.append(rows if microbatch.real else torch.zeros_like(feature))
        if not outputs:
            raise UserError(
                "nothing that batch_loss() looks at has a gradient: features() gives"
                f" {', '.join(features)}",
                "features computed by the model, without .item(), .detach() or torch.no_grad() on"
                " the way, and a loss that uses them",
                "task",
            )
        with self._setup.comm.timeline.phase("backward", share.device_index):
            share.step_buffers.after_forward(share.device_index)
            torch.autograd.backward(outputs, sent)
            share.step_buffers.after_backward(share.device_index)

    @contextmanager
    def _buffers_kept(self, device_index: int) -> Iterator[None]:
        """Buffers that change meanwhile have their values again afterwards."""
        model = self._strategy.models[device_index]
        known = self._moved.get(device_index)
        before = {
            name: (buffer, buffer._version, buffer.clone())  # noqa: SLF001 - public nowhere
            for name, buffer in model.named_buffers()
            if known is None or name in known
        }
        yield
        moved = []
        for name, (buffer, version, value) in before.items():
            now = model.get_buffer(name)
            if now is buffer and now._version == version:  # noqa: SLF001 - public nowhere
                continue
            moved.append(name)
            _set_buffer(model, name, buffer)
            with torch.no_grad():
                buffer.copy_(value)
        if known is None:
            self._moved[device_index] = frozenset(moved)


def _set_buffer(model: nn.Module, name: str, buffer: torch.Tensor) -> None:
    path, _, last = name.rpartition(".")
    model.get_submodule(path)._buffers[last] = buffer  # noqa: SLF001 - a compiled module's too
