"""The watch in engine torch: weights have the same versions after the last backward pass of a step
as before its first forward pass; in the first step of a start, and in steps 2, 4, 8 and so on, the
same bits.
"""

from collections.abc import Sequence

from samecurve.core.protocols import Batch, Round
from samecurve.torch_engine.split_check.written_weights import (
    VERSION,
    FrozenWeights,
    WeightBits,
    WeightVersions,
    thaw_error,
    write_error,
)
from samecurve.torch_engine.step.feature_hooks import TorchHooks
from samecurve.torch_engine.step.training_step import TrainingStep


class Hooks(TorchHooks):
    """Watches each update of a step."""

    def add_to(self, steps: Sequence[TrainingStep]) -> None:
        for step in steps:
            watch = WriteWatch(step)
            step.before_step.append(watch.before_step)
            step.after_reduction.append(watch.after_reduction)


class WriteWatch:
    """The hooks of a training step that watch its weights."""

    def __init__(self, step: TrainingStep) -> None:
        self._step = step
        self._frozen = FrozenWeights(step.strategy)
        self._versions: WeightVersions | None = None
        self._bits: WeightBits | None = None
        self._batch: Batch[list[Round]] | None = None  # of the step in work

    def before_step(self, batch: Batch[list[Round]]) -> None:
        self._batch = batch
        if self._versions is None or not batch.step & (batch.step + 1):
            self._versions = WeightVersions(self._step.strategy)
            self._bits = WeightBits(self._step.strategy)
        versions = self._versions  # what follows is versions.note(): each step comes here
        versions.before = list(map(VERSION, versions.tensors))

    def after_reduction(self) -> bool:
        """Returns True: the hook comes again.

        UserError: the loss of this step has written into a weight, or has thawed one.
        """
        versions = self._versions
        assert versions is not None
        if self._bits is None and versions.before == list(map(VERSION, versions.tensors)):
            return True
        written = versions.written() or (self._bits and self._bits.written())
        if written:
            raise write_error(self._step.setup, written, self._again)
        if thawed := self._frozen.thawed():
            raise thaw_error(self._step.setup, thawed)
        self._batch = self._bits = None
        return True

    def _again(self) -> None:
        """Compute the loss of this process's first microbatch once more."""
        step, batch = self._step, self._batch
        assert batch is not None
        microbatch = next(filter(None, (of_round[0] for of_round in batch.rounds)))
        with step.setup.contexts[0].within(step.keys_of(microbatch), number=microbatch.number):
            step.forward(0, microbatch, batch.progress)
