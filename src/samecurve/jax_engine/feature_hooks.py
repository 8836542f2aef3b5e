"""The base class of what a feature does in the steps of engine jax (core/feature.py)."""

from collections.abc import Iterator, Sequence
from typing import Any, ClassVar, Protocol

import jax
from flax import nnx

from samecurve.core.events import Event
from samecurve.core.planning.plan import Plan
from samecurve.core.protocols import Batch, TrialRows
from samecurve.jax_engine.array_types import Arrays
from samecurve.jax_engine.checkpoint import State
from samecurve.jax_engine.evaluation import RealAndIdle
from samecurve.jax_engine.step_program import Rows, Setup


class HookedEngine(Protocol):
    """What hooks need of the engine.

    setup: the parts of the compiled programs
    first_step: of this process
    notes: for the user; the loop records and empties it
    in_float32: what of the loss a run in float64 computes in float32, with its line; '': nothing
    inputs_of: the state with arrays over all devices, rows of the step in which a device has a
        microbatch, and the place among them where it has it
    named_arrays: what a checkpoint holds of a state, by name
    takes_whole_rows: whether a task that is not ours computes a microbatch as a whole
    trial_sums: the task's sums of some rows, and those of rows that only fill up a shape
    """

    plan: Plan
    notes: list[str | Event]
    in_float32: str

    @property
    def setup(self) -> Setup: ...
    @property
    def first_step(self) -> int: ...
    def inputs_of(
        self, state: Any, batch: Batch, device: int, number: int
    ) -> tuple[State, Rows, int]: ...
    def named_arrays(self, state: Any) -> Iterator[tuple[str, jax.Array]]: ...
    @property
    def takes_whole_rows(self) -> bool: ...
    def trial_sums(self, state: Any, rows: TrialRows, numbers: Sequence[int]) -> RealAndIdle: ...


class JaxHooks:
    """A feature in one process of a run. Each method does nothing where it is not overridden.

    value: what the plan has of the feature
    keeps_average: whether a state has an average, which evaluations take for the weights
    """

    keeps_average: ClassVar[bool] = False

    def __init__(self, engine: HookedEngine, value: Any) -> None:
        self.engine, self.value = engine, value

    def prepare(self, model: nnx.Module) -> None:
        """Change the layers of the model."""

    def begin_training(self, state: Any, rows: TrialRows, *, is_split: bool) -> None:
        """Before the first step; all processes call it together.

        rows: samples of the first step. is_split: whether a step has several microbatches

        UserError: the run must not be trained.
        """

    def before_step(self, state: Any, batch: Batch) -> None:
        """Before the program of a step is called; the loss was checked."""

    def before_update(self, gradients: Arrays) -> Arrays:
        """A part of the step's program: the gradients, scaled and clipped, as they are to be; of
        shards, a device's own.
        """
        return gradients

    def after_update(self, params: Arrays) -> Arrays:
        """A part of the step's program: the trained parameters after an update, as they are to be.
        An update that is not finite is left out all the same.
        """
        return params

    def average_after(self, average: Arrays, moved: Arrays) -> Arrays:
        """A part of the step's program: the average after an update. It begins as the weights.

        moved: the trained parameters after the update
        """
        del moved
        return average
