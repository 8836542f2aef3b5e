"""The losses that the split check compares: of all samples, of parts, of pairs, as numbers.

They are computed as a step computes them, in wider formats where that can be, with norms over the
batch as they have learnt. Nothing stays of them: put_back() leaves model, task and generators as
they were when the check began.
"""

import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import torch

from samecurve.core.determinism.mean import Mean
from samecurve.core.protocols import Arrays, MicroBatch, TrialRows
from samecurve.core.split_check.split_errors import Backward
from samecurve.core.split_check.split_verdicts import Format, Trial
from samecurve.errors import UserError
from samecurve.torch_engine.model.model_setup import run_uncompiled
from samecurve.torch_engine.randomness.microbatch_context import StagedKeys
from samecurve.torch_engine.split_check.split_diagnosis import Recorded, Recording
from samecurve.torch_engine.split_check.split_formats import (
    added_up,
    full_float32,
    norms_frozen,
    widened,
    widened_buffers,
)
from samecurve.torch_engine.split_check.split_gradients import (
    Gradients,
    gradients_of,
    moved_weights,
    own_backward,
)
from samecurve.torch_engine.split_check.split_state import Attributes, Buffers, GeneratorStates
from samecurve.torch_engine.step.precision import autocast_for, current_device
from samecurve.torch_engine.step.setup import EngineSetup

_WIDENED = 500_000_000  # parameters at most of a model that is tried in float64, or elsewhere
RAISED = (
    UserError,
    ArithmeticError,
    AssertionError,
    LookupError,
    RuntimeError,
    TypeError,
    ValueError,
)  # what a loss says to samples that it does not expect
Stage = Callable[[MicroBatch], MicroBatch]
Run = Callable[..., Any]  # train() or call() of a strategy


class Trials:
    """The loss of samples of one check, on this process's first device.

    stage: host rows -> tensors, as for a step
    samples: the numbers of all rows
    format: what losses are computed in
    phase_number: among `phases`, of the one whose loss is taken
    step: that the loss is of
    name: of the mean that is looked at, the loss or one that is logged beside it
    """

    def __init__(self, setup: EngineSetup, rows: TrialRows, stage: Stage) -> None:
        self._setup, self._rows, self._stage = setup, rows, stage
        self._plan, self._model = setup.plan, setup.strategy.models[0]
        self.samples = list(range(len(rows.ids)))
        self.format: Format = _format_of(setup)
        self._with_grad = False
        self._casts_rows = False
        self.phases = list(getattr(setup.task, "phases", {})) or [""]
        self.phase_number = 0
        self.step, self.name = rows.step, "loss"

    @contextmanager
    def prepared(self) -> Iterator[None]:
        """What may stay of the check is noted before; norms over the batch, which the plan knows
        of, use what they have learnt.
        """
        task = getattr(self._setup.task, "task", self._setup.task)
        with ExitStack() as stack:
            stack.enter_context(norms_frozen(self._model))
            stack.enter_context(run_uncompiled(self._plan))
            stack.enter_context(full_float32())
            stack.enter_context(warnings.catch_warnings())
            warnings.simplefilter("ignore")  # of fewer samples than a step has
            self.buffers = Buffers(self._model)
            self.attributes = Attributes(self._model, task)
            self.generators = GeneratorStates(self.attributes, [self._setup.device])
            stack.callback(self.put_back)
            if self.phase_number:
                stack.enter_context(self._after_earlier_phases(task))
            yield

    @contextmanager
    def _after_earlier_phases(self, task: object) -> Iterator[None]:
        """What they keep is there for a later one, as in a step."""
        number, before = self.phase_number, self.attributes
        for self.phase_number in range(number):
            self.loss_if_any(self.samples)
        self.phase_number = number
        self.buffers.put_back()
        self.generators.put_back()
        self.attributes = Attributes(self._model, task)
        yield
        self.attributes = before

    def put_back(self) -> None:
        self.attributes.put_back()
        self.buffers.put_back()
        self.generators.put_back()

    def loss_of_all(self) -> Trial:
        """The first to be called: it settles how losses are computed, wide where that can be,
        without gradient where that can be.
        """
        while True:
            try:
                return self.loss_of(self.samples)
            except Exception as error:
                if not self._with_grad and _wants_gradient(error):
                    self._with_grad = True
                elif self.format == "f32" and self._plan.precision in {"bf16", "f16"}:
                    self.format = "narrow"  # a kernel that knows two bytes only, say
                else:
                    raise
                self.put_back()

    def loss_of(self, rows: Sequence[int]) -> Trial:
        return self.losses_of(rows)[self.name]

    def losses_of(self, rows: Sequence[int]) -> dict[str, Trial]:
        """The loss, and what is logged beside it, by name."""
        return _as_trials(self._losses(rows), len(rows))

    def gradients_of(self, rows: Sequence[int]) -> tuple[dict[str, Trial], Gradients]:
        """The losses, and the gradient of the loss."""
        losses: Mapping[str, Mean] = {}
        microbatch = self._microbatch(rows)

        def loss_sum(run: Run) -> torch.Tensor:
            nonlocal losses
            losses = self._task_losses(microbatch, run)
            total: torch.Tensor = losses["loss"].sum
            return total

        with self.with_gradient(), self._within(microbatch):
            gradients = gradients_of(self._setup, microbatch, loss_sum)
        return _as_trials(losses, len(rows)), gradients

    @contextmanager
    def with_gradient(self) -> Iterator[None]:
        before, self._with_grad = self._with_grad, True
        try:
            yield
        finally:
            self._with_grad = before

    def features_of(self, rows: Sequence[int]) -> Arrays:
        """Of a task that has batch_loss()."""
        microbatch, phase = self._microbatch(rows), self.phases[self.phase_number]
        progress = self._plan.progress_at(self.step)
        setup = self._setup
        with self._within(microbatch):
            features: Arrays = setup.strategy.call(
                0, setup.task.features, microbatch.arrays, progress, phase
            )
        return features

    def own_backward(self, rows: Sequence[int]) -> Backward | None:
        """What of the user's takes part in the backward pass."""
        recording = Recording()
        try:
            with self.with_gradient(), recording:
                total = self._losses(rows)["loss"].sum
        except RAISED:
            return None
        finally:
            self.put_back()
        if recording.hooks:
            return Backward("a hook of a tensor", recording.hooks[0])
        return own_backward(self._model, total)

    @contextmanager
    def moved_weights(self) -> Iterator[None]:
        """All weights and buffers a little elsewhere."""
        buffers = self.buffers
        with moved_weights(self._setup.strategy):
            self.buffers = Buffers(self._model)
            try:
                yield
            finally:
                self.buffers = buffers
                buffers.put_back()

    def loss_of_part(self, rows: Sequence[int]) -> tuple[Trial, UserError | None]:
        """And why the loss can't be taken of these samples, though of all of them it can."""
        try:
            return self.loss_of(rows), None
        except RAISED as error:
            return Trial(len(rows), math.nan, math.nan), as_user_error(error)

    def loss_if_any(self, rows: Sequence[int]) -> Trial | None:
        """None: the loss can't be taken of these."""
        trial, error = self.loss_of_part(rows)
        return None if error else trial

    def record(self, rows: Sequence[int]) -> Recorded | None:
        recording = Recording()
        try:
            with recording:
                loss = self._losses(rows)[self.name]
        except RAISED:
            return None
        finally:
            self.put_back()
        return Recorded(recording, rows, tuple(loss))

    def _losses(self, rows: Sequence[int]) -> Mapping[str, Mean]:
        microbatch = self._microbatch(rows)
        with self._within(microbatch):
            return self._task_losses(microbatch, self._setup.strategy.call)

    def _microbatch(self, rows: Sequence[int]) -> MicroBatch:
        microbatch = self._stage(self._rows.pick(rows))
        keys = microbatch.keys
        if keys is not None and self.phase_number:  # each phase draws numbers of its own
            keys = StagedKeys(keys.rows.of_phase(self.phase_number))
        device = self._setup.device
        arrays = {name: tensor.to(device) for name, tensor in microbatch.arrays.items()}
        if self._casts_rows:
            arrays = {name: widened(tensor) for name, tensor in arrays.items()}
        return replace(microbatch, arrays=arrays, keys=keys)

    @contextmanager
    def _within(self, microbatch: MicroBatch) -> Iterator[None]:
        setup = self._setup
        precision = self._plan.precision if self.format == "narrow" else "f32"
        with (
            torch.set_grad_enabled(self._with_grad),
            current_device(setup.device),
            setup.contexts[0].within(microbatch.keys),
            autocast_for(precision, setup.device),
        ):
            yield

    def _task_losses(self, microbatch: MicroBatch, run: Run) -> Mapping[str, Mean]:
        task, phase = self._setup.task, self.phases[self.phase_number]
        progress = self._plan.progress_at(self.step)
        if self._plan.whole_batch:
            features = run(0, task.features, microbatch.arrays, progress, phase)
            count = len(next(iter(microbatch.arrays.values())))
            return {"loss": Mean(added_up(features), count)}
        losses: Mapping[str, Mean] = run(0, task.losses, microbatch.arrays, progress, phase)
        return losses

    def can_widen(self) -> bool:
        return self._plan.shards == 1 and not self._plan.compute.float8 and self.is_small()

    def is_small(self) -> bool:
        """Whether a second copy of the weights has room."""
        size = sum(parameter.numel() for parameter in self._model.parameters())
        return size // self._plan.shards <= _WIDENED

    @contextmanager
    def in_float64(self) -> Iterator[None]:
        """Weights, buffers and rows widened for a while."""
        saved = [(parameter, parameter.data) for parameter in self._model.parameters()]
        buffers = self.buffers
        with widened_buffers(self._model):
            for parameter, data in saved:
                parameter.data = widened(data)
            self._casts_rows, self.buffers = True, Buffers(self._model)
            try:
                yield
            finally:
                self._casts_rows, self.buffers = False, buffers
                for parameter, data in saved:
                    parameter.data = data


def _format_of(setup: EngineSetup) -> Format:
    """What losses are computed in: wider than a step where the weights are there in it."""
    plan = setup.plan
    if plan.precision == "f64":
        return "f64"
    is_narrow = plan.precision in {"bf16", "f16"}
    return "narrow" if plan.compute.float8 or (is_narrow and plan.shards > 1) else "f32"


def as_user_error(error: BaseException) -> UserError:
    where = error.where if isinstance(error, UserError) else ""
    cause = error.cause if isinstance(error, UserError) else f"{error}"
    return UserError(cause, where=where)


def _as_trials(losses: Mapping[str, Mean], samples: int) -> dict[str, Trial]:
    return {
        name: Trial(samples, float(loss.sum), float(loss.weight)) for name, loss in losses.items()
    }


def _wants_gradient(error: BaseException) -> bool:
    """Raised because a loss takes gradients itself."""
    causes = [error, error.__cause__, error.__context__]
    return any(
        isinstance(cause, RuntimeError) and "does not require grad" in str(cause)
        for cause in causes
    )
