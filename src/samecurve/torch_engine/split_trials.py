"""The losses that the split check compares: of all samples, of parts, of pairs, as numbers.

They are computed as a step computes them, in wider formats where that can be, with norms over the
batch as they have learnt. Nothing stays of them: put_back() leaves model, task and generators as
they were when the check began.
"""

import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager

import torch

from samecurve.core.determinism.mean import Mean
from samecurve.core.protocols import MicroBatch, TrialRows
from samecurve.core.split_check import Format, Trial
from samecurve.errors import UserError
from samecurve.torch_engine.layers.context import StagedKeys
from samecurve.torch_engine.model import run_uncompiled
from samecurve.torch_engine.precision import autocast_for, current_device
from samecurve.torch_engine.setup import EngineSetup
from samecurve.torch_engine.split_diagnosis import Recorded, Recording
from samecurve.torch_engine.split_formats import (
    added_up,
    full_float32,
    norms_frozen,
    widened,
    widened_buffers,
)
from samecurve.torch_engine.split_state import Attributes, Buffers, GeneratorStates

_WIDENED = 500_000_000  # parameters at most of a model that is tried in float64
_RAISED = (
    UserError,
    ArithmeticError,
    AssertionError,
    LookupError,
    RuntimeError,
    TypeError,
    ValueError,
)  # what a loss says to samples that it does not expect
Stage = Callable[[MicroBatch], MicroBatch]


class Trials:
    """The loss of samples of one check, on this process's first device.

    stage: host rows -> tensors, as for a step
    samples: the numbers of all rows
    format: what losses are computed in
    phase_number: among `phases`, of the one whose loss is taken
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
            yield

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
        loss = self._loss(rows)
        return Trial(len(rows), float(loss.sum), float(loss.weight))

    def loss_of_part(self, rows: Sequence[int]) -> tuple[Trial, UserError | None]:
        """And why the loss can't be taken of these samples, though of all of them it can."""
        try:
            return self.loss_of(rows), None
        except _RAISED as error:
            where = error.where if isinstance(error, UserError) else ""
            cause = error.cause if isinstance(error, UserError) else f"{error}"
            nothing = Trial(len(rows), math.nan, math.nan)
            return nothing, UserError(cause, where=where)

    def loss_if_any(self, rows: Sequence[int]) -> Trial | None:
        """None: the loss can't be taken of these."""
        trial, error = self.loss_of_part(rows)
        return None if error else trial

    def record(self, rows: Sequence[int]) -> Recorded | None:
        recording = Recording()
        try:
            with recording:
                loss = self._loss(rows)
        except _RAISED:
            return None
        finally:
            self.put_back()
        return Recorded(recording, rows, tuple(loss))

    def _loss(self, rows: Sequence[int]) -> Mean:
        setup, device = self._setup, self._setup.device
        microbatch = self._stage(self._rows.pick(rows))
        keys = microbatch.keys
        if keys is not None and self.phase_number:  # each phase draws numbers of its own
            keys = StagedKeys(keys.rows.of_phase(self.phase_number))
        arrays = {name: tensor.to(device) for name, tensor in microbatch.arrays.items()}
        if self._casts_rows:
            arrays = {name: widened(tensor) for name, tensor in arrays.items()}
        precision = self._plan.precision if self.format == "narrow" else "f32"
        progress = self._plan.progress_at(self._rows.step)
        with (
            torch.set_grad_enabled(self._with_grad),
            current_device(device),
            setup.contexts[0].within(keys),
            autocast_for(precision, device),
        ):
            phase = self.phases[self.phase_number]
            if self._plan.whole_batch:
                features = setup.strategy.call(0, setup.task.features, arrays, progress, phase)
                return Mean(added_up(features), len(rows))
            losses = setup.strategy.call(0, setup.task.losses, arrays, progress, phase)
        return losses["loss"]

    def can_widen(self) -> bool:
        sharded = self._plan.shards > 1
        size = sum(parameter.numel() for parameter in self._model.parameters())
        return not sharded and not self._plan.float8 and size <= _WIDENED

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
    return "narrow" if plan.float8 or (is_narrow and plan.shards > 1) else "f32"


def _wants_gradient(error: BaseException) -> bool:
    """Raised because a loss takes gradients itself."""
    causes = [error, error.__cause__, error.__context__]
    return any(
        isinstance(cause, RuntimeError) and "does not require grad" in str(cause)
        for cause in causes
    )
