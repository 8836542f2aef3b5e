"""Losses over the whole batch: Task.features of each microbatch, Task.batch_loss of all of them.

Every device computes its own microbatches' features; all are put together in the samples' order
(gathered_features.py). Each device takes the loss of the whole batch and its gradient by every row,
the same everywhere, and goes backward with those of its own rows. So the sum over devices is the
gradient of the one loss, however its samples were divided.

A step of one round, with a microbatch on each device, keeps their graphs. A step of several rounds
can't hold the graphs of all: features are computed without, and each microbatch again before its
backward pass, with the same keyed random numbers (gradient caching; Gao et al. 2021,
arXiv:2101.06983).
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

import torch

from samecurve.core.determinism import Mean
from samecurve.core.determinism.microbatches import accumulation_steps
from samecurve.core.determinism.sample_keys import step_key
from samecurve.core.protocols import Batch, MicroBatch, Progress, Round
from samecurve.errors import UserError
from samecurve.features.whole_batch.gathered_features import (
    Features,
    FeatureTable,
    Part,
    check_rows,
)
from samecurve.torch_engine.precision import autocast_for, in_precision, keeps_copies
from samecurve.torch_engine.randomness import outside_of_microbatches, seed_host
from samecurve.torch_engine.step import EngineSetup, State, Update
from samecurve.torch_engine.step.step_metrics import StepTotals
from samecurve.torch_engine.step.training_step import TrainingStep

Gradients = Mapping[str, torch.Tensor | None]  # by feature; None: the loss does not look at it


@dataclass(frozen=True, kw_only=True)
class StepShare:
    """The share of one device of this process in a step."""

    device_index: int
    microbatches: Sequence[MicroBatch]
    num_samples: int  # of the whole step
    progress: Progress


class BatchLossStep(TrainingStep):
    """The training step of a loss over the whole batch."""

    _forwards = 2

    def __init__(self, setup: EngineSetup, state: State, update: Update) -> None:
        super().__init__(setup, state, update)
        self._call_model = in_precision(setup.strategy.call, setup.plan, setup.device)
        self._tables: dict[int, FeatureTable] = {}  # by device of this process
        self._moved: dict[int, frozenset[str]] = {}  # buffers that a forward pass changes

    def compute_share(
        self, device_index: int, batch: Batch[list[Round]], totals: StepTotals
    ) -> None:
        """Forward and backward of one device's microbatches; every device calls it."""
        in_turn = [of_round[device_index] for of_round in batch.rounds]
        microbatches = [microbatch for microbatch in in_turn if microbatch]
        share = StepShare(
            device_index=device_index,
            microbatches=microbatches,
            num_samples=batch.samples,
            progress=batch.progress,
        )
        if self._is_one_round(batch.num_microbatches) and microbatches:
            self._keep_graph(share, totals)
            return
        features = self._first_pass(share)
        gradients = self._gradients(share, features, totals)
        features.clear()
        for microbatch in microbatches:  # the second pass
            with self._round(share, microbatch, is_last=microbatch is microbatches[-1]):
                of_microbatch = self._features(share, microbatch, is_first=False, train=True)
                self._send_back(share, microbatch, of_microbatch, gradients)

    def _is_one_round(self, num_microbatches: int) -> bool:
        """Whether no device has more than one microbatch of such a step; the same on all devices,
        since what strategies send in a forward pass must come in one order.
        """
        plan = self.plan
        return (
            accumulation_steps(
                num_microbatches, plan.layout.num_devices, plan.batch.microbatch_seconds
            )
            == 1
        )

    def _keep_graph(self, share: StepShare, totals: StepTotals) -> None:
        (microbatch,) = share.microbatches
        with self._round(share, microbatch, is_last=True):
            features = self._features(share, microbatch, is_first=True, train=True)
            with outside_of_microbatches():
                gradients = self._gradients(share, [features], totals)
            self._send_back(share, microbatch, features, gradients)

    def _first_pass(self, share: StepShare) -> list[Features]:
        """The features of all microbatches, without graphs; what a forward pass changes in the
        model stays as it was.

        Where kernels must give the same bits, it is computed as for a graph, which is dropped:
        kernels may be others without.
        """
        gradient = nullcontext() if self.plan.compute.deterministic else torch.no_grad()
        context = self.setup.contexts[share.device_index]
        features: list[Features] = []
        with self._buffers_kept(share.device_index), gradient:
            for microbatch in share.microbatches:
                keys, number = self.keys_of(microbatch), microbatch.number
                with context.within(keys, real=microbatch.real, number=number):
                    is_first = not features
                    rows = self._features(share, microbatch, is_first=is_first, train=False)
                features.append({name: feature.detach() for name, feature in rows.items()})
        return features

    @contextmanager
    def _round(self, share: StepShare, microbatch: MicroBatch, *, is_last: bool) -> Iterator[None]:
        """Around forward and backward of a microbatch."""
        context, keys = self.setup.contexts[share.device_index], self.keys_of(microbatch)
        with context.within(keys, real=microbatch.real, number=microbatch.number):
            self.strategy.begin_microbatch(share.device_index, microbatch, is_last=is_last)
            yield
            self.strategy.end_microbatch(share.device_index, microbatch)

    def _features(
        self, share: StepShare, microbatch: MicroBatch, *, is_first: bool, train: bool
    ) -> Features:
        """The features of a microbatch. train: whether backward follows."""
        device_index = share.device_index
        for hook in self.before_forward:
            hook(device_index, is_first)
        features = self.compute_features(device_index, microbatch, share.progress, train=train)
        for hook in self.after_forward:
            hook(device_index, is_first)
        count = 1
        if microbatch.real:
            rest = share.num_samples - self._first_sample(microbatch)
            count = min(self.plan.batch.micro_batch_size, rest)
        check_rows(features, count)
        return features

    def compute_features(
        self, device_index: int, microbatch: MicroBatch, progress: Progress, *, train: bool
    ) -> Features:
        arrays, run = self.arrays_on(device_index, microbatch), self._call_model
        if train:
            run = self.train_model
        phase = self.update.phase
        features: Features = run(device_index, self.task.features, arrays, progress, phase)
        return features

    def _first_sample(self, microbatch: MicroBatch) -> int:
        return microbatch.number * self.plan.batch.micro_batch_size

    def _gradients(
        self, share: StepShare, features: Sequence[Features], totals: StepTotals
    ) -> Gradients:
        """The gradient of the whole batch's loss, times its factor, by every sample's features;
        empty where there is no microbatch. The device that has the first sample counts the loss.

        features: of the microbatches.
        """
        parts = [
            (self._first_sample(microbatch), rows)
            for microbatch, rows in zip(share.microbatches, features, strict=True)
            if microbatch.real
        ]
        whole = self.gather_features(share.device_index, parts, share.num_samples)
        if not share.microbatches:
            return {}
        means, by_feature = self.gradients_of_loss(share.device_index, whole, share.progress)
        if any(first == 0 for first, _ in parts):
            totals.add(share.device_index, 0, means)
        return {**dict.fromkeys(whole), **by_feature}

    def gather_features(
        self, device_index: int, parts: Sequence[Part], num_samples: int
    ) -> dict[str, torch.Tensor]:
        """The features of all samples of the step, on every device."""
        if device_index not in self._tables:
            peers = self.strategy.peers()[device_index]
            self._tables[device_index] = FeatureTable(peers, self.devices[device_index])
        return self._tables[device_index].put_together(parts, num_samples)

    def gradients_of_loss(
        self, device_index: int, whole: Mapping[str, torch.Tensor], progress: Progress
    ) -> tuple[Sequence[Mean], Gradients]:
        """The means of a whole batch's loss, and its gradients by feature."""
        leaves = {
            name: feature.requires_grad_()
            for name, feature in whole.items()
            if feature.is_floating_point() or feature.is_complex()
        }
        if self.setup.draw_sites.seeds_batch_loss:
            seed_host(step_key(self.plan.fixed.seed, progress.epoch, progress.step))
        precision, keeps = self.plan.compute.precision, keeps_copies(self.plan)
        with autocast_for(precision, self.devices[device_index], keeps_copies=keeps):
            losses = self.task.batch_losses(whole, progress, self.update.phase)
        means = self.named_means.in_order(losses)
        total, factor = means[0].sum, self.loss_factors[device_index]
        gradients = torch.autograd.grad(
            total, list(leaves.values()), factor.to(total.dtype), allow_unused=True
        )
        return means, dict(zip(leaves, gradients, strict=True))

    def _send_back(
        self, share: StepShare, microbatch: MicroBatch, features: Features, gradients: Gradients
    ) -> None:
        """Go backward with the rows of a microbatch in the whole gradient; a dummy's are zero.

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
        self.backward_from(share.device_index, outputs, sent)
        for hook in self.after_backward:
            hook(share.device_index, False)

    def backward_from(
        self,
        _device_index: int,
        outputs: Sequence[torch.Tensor],
        gradients: Sequence[torch.Tensor],
    ) -> None:
        torch.autograd.backward(outputs, gradients)

    @contextmanager
    def _buffers_kept(self, device_index: int) -> Iterator[None]:
        """Give buffers that change meanwhile their values back afterwards."""
        model = self.strategy.models[device_index]
        known = self._moved.get(device_index)
        before = {
            name: (buffer, buffer.clone())
            for name, buffer in model.named_buffers()
            if known is None or name in known
        }
        yield
        moved = []
        for name, (buffer, value) in before.items():
            now = model.get_buffer(name)
            # by value, which a change through .data shows too; and only once, since it waits for
            # the device
            if known is None and now is buffer and torch.equal(now, value):
                continue
            moved.append(name)
            path, _, last = name.rpartition(".")
            model.get_submodule(path)._buffers[last] = buffer  # noqa: SLF001 - if compiled, too
            with torch.no_grad():
                buffer.copy_(value)
        if known is None:
            self._moved[device_index] = frozenset(moved)
