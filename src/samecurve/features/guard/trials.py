"""The losses that the split check compares: of all samples, of parts and of pairs, as numbers.

A loss is computed as in a step, but in wider formats where that is possible, and with BatchNorm by
its running statistics. put_back() restores the model, the task and the random generators.
"""

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch

from samecurve.core.determinism import Mean
from samecurve.core.protocols import Arrays, MicroBatch, TrialRows
from samecurve.errors import RunError, SamecurveError, UserError
from samecurve.features.guard.additivity import Trial, compare_repeats, no_trial, two_parts
from samecurve.features.guard.trial_passes import (
    Digests,
    Float64Inside,
    added_up,
    changes_products,
    format_of,
    full_float32,
    gradients_of,
    model_in_float64,
    norms_frozen,
    widened,
)
from samecurve.features.guard.weights import Versions, read_weights
from samecurve.torch_engine.model.model_setup import run_uncompiled
from samecurve.torch_engine.precision import autocast_for, current_device
from samecurve.torch_engine.randomness import StagedKeys
from samecurve.torch_engine.step import EngineSetup
from samecurve.torch_engine.users_code.side_effects import (
    Attributes,
    Buffers,
    Counter,
    GeneratorStates,
    Noted,
)

_COPIED = 500_000_000  # parameters at most, of a model whose weights are copied for a trial
# what a loss may raise for samples, or a number format, that it does not expect; what a task's code
# raises is a RunError once another trial has worked
RAISED = (
    UserError,
    RunError,
    ArithmeticError,
    AssertionError,
    LookupError,
    RuntimeError,
    TypeError,
    ValueError,
)
Stage = Callable[[MicroBatch], MicroBatch]  # host rows -> tensors, as for a step
Run = Callable[..., Any]  # train() or call() of a strategy
Rows = Sequence[int]  # positions among the rows that the check is given


class Tried(NamedTuple):
    """The losses of some samples.

    losses: the loss, and the means that are logged beside it, by name
    gradients: of the loss; None: they can't be computed
    """

    losses: Mapping[str, Trial]
    gradients: Digests | None = None


class Drawn(NamedTuple):
    """Random generators from which a loss has drawn without a key.

    moved: the names of those that each device and microbatch would draw from by itself
    seeded: whether numpy's or Python's were drawn from, which are seeded for each microbatch
    """

    moved: Sequence[str] = ()
    seeded: bool = False

    def is_shared(self, setup: EngineSetup) -> bool:
        """Whether the devices of one process draw from one generator."""
        return self.seeded and setup.has_several_devices


@dataclass(frozen=True, kw_only=True)
class Observed:
    """Observations of a loss, and of the means that are logged beside it.

    whole, parts: of all samples, and of each part; failed: why it can't be computed for a part
    again, far: the loss of all samples once more; as after many more microbatches, where something
        counts
    changed: attributes that a forward pass changes; counters: those that grow with each pass
    steady, unlike: buffers that change alike, or not, whatever the samples are
    kept: attributes that are others after other samples
    """

    whole: Tried
    parts: Sequence[Tried]
    failed: UserError | None = None
    again: Trial | None = None
    far: Trial | None = None
    drawn: Drawn = Drawn()
    changed: Sequence[str] = ()
    counters: Mapping[str, Counter] = field(default_factory=dict)
    steady: AbstractSet[str] = frozenset()
    unlike: Sequence[str] = ()
    kept: Sequence[str] = ()

    @property
    def have_gradients(self) -> bool:
        """Whether all gradients could be computed."""
        return all(each.gradients is not None for each in (self.whole, *self.parts))

    def is_counting(self, tolerance: float) -> bool:
        """Whether the loss depends on how many microbatches came before."""
        whole = self.whole.losses["loss"]
        return self.far is not None and bool(compare_repeats(whole, self.far, tolerance))

    def trials_of(self, name: str) -> tuple[Trial, list[Trial]]:
        """All samples' loss, or mean of this name, and that of each part."""
        of_parts = [part.losses.get(name, part.losses["loss"]) for part in self.parts]
        return self.whole.losses[name], of_parts


class Trials:
    """Computes losses of samples on this process's first device.

    rows: all samples that the check is given; stage: makes tensors of them
    samples, parts: the rows that are tried at present, and how they are divided
    step: the step whose loss is tried
    phases, phase_number: the task's update phases, and the one whose loss is tried
    name: the mean that is compared: the loss, or one that is logged beside it
    written: the first weight that a loss wrote into, and the step that was tried
    format: the number format in which losses are computed
    """

    def __init__(self, setup: EngineSetup, rows: TrialRows, stage: Stage) -> None:
        self._setup, self.rows, self.stage = setup, rows, stage
        self._plan, self._model = setup.plan, setup.strategy.models[0]
        self.samples: Rows = range(len(rows.ids))
        self.parts: Sequence[Rows] = two_parts(self.samples)
        self.step, self.name = rows.step, "loss"
        self.phases = list(setup.task.phases) or [""]
        self.phase_number = 0
        self.format = format_of(setup)
        self._with_grad = self._widens_rows = self._widens_inside = False
        self.written: tuple[str, int] | None = None

    # --- conditions

    @contextmanager
    def prepared(self, noted: Noted | None = None) -> Iterator[None]:
        """Losses can be computed inside of it; afterwards everything is as before.

        noted: what was noted of the model in the step in work, in which earlier phases have run;
            None: no step has begun
        """
        task = getattr(self._setup.task, "task", self._setup.task)
        with ExitStack() as stack:
            stack.enter_context(norms_frozen(self._model))
            stack.enter_context(run_uncompiled(self._plan))
            stack.enter_context(full_float32())
            stack.enter_context(warnings.catch_warnings())
            warnings.simplefilter("ignore")  # about fewer samples than a step has
            self.buffers = Buffers(self._model)
            if noted:
                self.attributes, self.generators = noted.attributes, noted.generators
            else:
                self.attributes = Attributes(self._model, task)
                of_task = self.attributes.generators()
                self.generators = GeneratorStates(self._setup.device, of_task)
            self._versions = Versions(read_weights(self._setup.strategy))
            stack.callback(self.buffers.put_back if noted else self.put_back)
            for parameter in self._model.parameters():  # a loss may freeze layers until some step
                stack.callback(parameter.requires_grad_, parameter.requires_grad)
            if self.phase_number and not noted:
                stack.enter_context(self._after_earlier_phases(task))
            yield

    @contextmanager
    def _after_earlier_phases(self, task: object) -> Iterator[None]:
        """The attributes that earlier phases leave are there for a later phase, as in a step."""
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

    def trying(
        self, step: int, samples: Rows, parts: Sequence[Rows]
    ) -> AbstractContextManager[None]:
        """Other samples, in other parts, at another step are tried inside of it."""
        return self._having(step=step, samples=samples, parts=parts)

    def with_gradient(self) -> AbstractContextManager[None]:
        return self._having(_with_grad=True)

    @contextmanager
    def in_float64(self) -> Iterator[None]:
        """Weights, buffers and rows are in float64. put_back() restores the buffers as they are."""
        before, model = self.buffers, self._model
        try:
            with (
                model_in_float64(model),
                self._having(_widens_rows=True, format=self.format, buffers=Buffers(model)),
            ):
                yield
        finally:
            before.put_back()

    def in_float64_inside(self) -> AbstractContextManager[None]:
        """Compute in float64 what an f64 run computes in float32."""
        return self._having(_widens_inside=True)

    @contextmanager
    def _having(self, **values: object) -> Iterator[None]:
        """Attributes have these values inside of it, and their own again afterwards."""
        before = {name: getattr(self, name) for name in values}
        vars(self).update(values)
        try:
            yield
        finally:
            vars(self).update(before)

    def can_widen(self) -> bool:
        """Whether the weights can be replaced by copies in float64."""
        is_whole = self._plan.layout.shards == 1 and not changes_products(self._setup)
        is_moved = any(hooks.moves_weights for hooks in self._setup.features.values())
        return is_whole and not is_moved and self.is_small()

    def is_small(self) -> bool:
        """Whether a second copy of the weights has room."""
        size = sum(parameter.numel() for parameter in self._model.parameters())
        return size // self._plan.layout.shards <= _COPIED

    # --- losses

    def first_loss(self) -> Trial:
        """The loss of all samples, computed for the first time. It settles how losses are computed:
        in a wide format and without a gradient, where that is possible.
        """
        while True:
            try:
                return self.loss_of(self.samples)
            except Exception as error:
                if not self._with_grad and _wants_gradient(error):
                    self._with_grad = True
                elif self.format == "f32" and self._plan.compute.precision in {"bf16", "f16"}:
                    self.format = "narrow"  # a kernel that computes in two bytes only, say
                else:
                    raise
                self.put_back()

    def loss_of(self, rows: Rows) -> Trial:
        return self.tried(rows).losses[self.name]

    def loss_if_any(self, rows: Rows) -> Trial | None:
        """The loss; None: it can't be computed for these samples."""
        part, error = self.tried_part(rows)
        return None if error else part.losses[self.name]

    def tried_part(
        self, rows: Rows, *, with_gradient: bool = False
    ) -> tuple[Tried, UserError | None]:
        """The losses, and why they can't be computed for these samples; None: they can."""
        try:
            return self.tried(rows, with_gradient=with_gradient), None
        except RAISED as error:
            told = error if isinstance(error, SamecurveError) else UserError(f"{error}")
            failed = UserError(told.cause, where=told.where)
            return Tried({"loss": no_trial(rows)}), failed

    def tried_in_parts(self, *, with_gradient: bool) -> Observed:
        """The losses of the samples and of their parts."""
        whole = self.tried(self.samples, with_gradient=with_gradient)
        self.put_back()
        parts, failed = [], None
        for rows in self.parts:
            part, error = self.tried_part(rows, with_gradient=with_gradient)
            self.put_back()
            failed = failed or error
            parts.append(part)
        return Observed(whole=whole, parts=parts, failed=failed)

    def tried(self, rows: Rows, *, with_gradient: bool = False) -> Tried:
        """The losses, with the gradients where they can be computed."""
        if with_gradient:
            try:
                return self._with_gradients(rows)
            except RuntimeError:
                self.put_back()
        return Tried(_as_trials(self.losses_of(rows), len(rows)))

    def losses_of(self, rows: Rows) -> Mapping[str, Mean]:
        """The task's losses as tensors."""
        microbatch = self._microbatch(rows)
        with self._within(microbatch):
            return self._task_losses(microbatch, self._setup.strategy.call)

    def features_of(self, rows: Rows) -> Arrays:
        """The features, for a task that has batch_loss()."""
        microbatch, setup = self._microbatch(rows), self._setup
        with self._within(microbatch):
            features: Arrays = self._run(setup.strategy.call, setup.task.features, microbatch)
        return features

    def _with_gradients(self, rows: Rows) -> Tried:
        losses: Mapping[str, Mean] = {}
        microbatch = self._microbatch(rows)

        def loss_sum(run: Run) -> torch.Tensor:
            nonlocal losses
            losses = self._task_losses(microbatch, run)
            total: torch.Tensor = losses["loss"].sum
            return total

        with self.with_gradient(), self._within(microbatch):
            gradients = gradients_of(self._setup, microbatch, loss_sum)
        return Tried(_as_trials(losses, len(rows)), gradients)

    def _microbatch(self, rows: Rows) -> MicroBatch:
        microbatch = self.stage(self.rows.pick(rows))
        keys = microbatch.keys
        if keys is not None and self.phase_number:  # each phase draws other numbers
            keys = StagedKeys(keys.rows.of_phase(self.phase_number))
        device = self._setup.device
        arrays = {name: tensor.to(device) for name, tensor in microbatch.arrays.items()}
        if self._widens_rows:
            arrays = {name: widened(tensor) for name, tensor in arrays.items()}
        return replace(microbatch, arrays=arrays, keys=keys)

    @contextmanager
    def _within(self, microbatch: MicroBatch) -> Iterator[None]:
        setup = self._setup
        precision = self._plan.compute.precision if self.format == "narrow" else "f32"
        self._versions.note()
        with (
            torch.set_grad_enabled(self._with_grad),
            current_device(setup.device),
            setup.contexts[0].within(microbatch.keys),
            autocast_for(precision, setup.device),
            Float64Inside() if self._widens_inside else nullcontext(),
        ):
            yield
        if self.written is None and (names := self._versions.written()):
            self.written = names[0], self.step

    def _task_losses(self, microbatch: MicroBatch, run: Run) -> Mapping[str, Mean]:
        task = self._setup.task
        if self._plan.sees_whole_batch:
            features = self._run(run, task.features, microbatch)
            count = len(next(iter(microbatch.arrays.values())))
            return {"loss": Mean(added_up(features), count)}
        losses: Mapping[str, Mean] = self._run(run, task.losses, microbatch)
        return losses

    def _run(self, run: Run, method: Callable[..., Any], microbatch: MicroBatch) -> Any:
        phase, progress = self.phases[self.phase_number], self._plan.progress_at(self.step)
        return run(0, method, microbatch.arrays, progress, phase)


def is_on_any_rank(setup: EngineSetup, here: bool) -> bool:  # noqa: FBT001 - one word says it
    """Whether it is true on any rank; all ranks call it together."""
    flag = torch.tensor(float(here), dtype=torch.float64, device=setup.device)
    return bool(setup.comm.all_reduce(flag)() > 0)


def _as_trials(losses: Mapping[str, Mean], samples: int) -> dict[str, Trial]:
    numbers = {name: (float(loss.sum), float(loss.weight)) for name, loss in losses.items()}
    return {name: Trial(samples, *of_loss) for name, of_loss in numbers.items()}


def _wants_gradient(error: BaseException) -> bool:
    """Whether a loss failed because it takes gradients itself."""
    causes = [error, error.__cause__, error.__context__]
    texts = [str(cause) for cause in causes if isinstance(cause, RuntimeError)]
    return any("does not require grad" in text for text in texts)
