"""The base class of what a feature does in the steps of engine jax (core/feature.py)."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from samecurve.core.events import Event
from samecurve.core.protocols import Batch
from samecurve.jax_engine.checkpoint import State
from samecurve.jax_engine.step_program import Rows, Setup


@dataclass(frozen=True, kw_only=True)
class HookContext:
    """The parts of an engine that hooks work with.

    means: the names of the means beside the loss
    first_step: of this process
    inputs_of: (state, batch, device, microbatch) -> the state as programs take it, and rows of the
        step in which the device has the microbatch, with the accumulation step in which it has it
    notes: for the user; the loop records and empties it
    """

    setup: Setup
    means: Sequence[str]
    first_step: int
    inputs_of: Callable[[Any, Batch, int, int], tuple[State, Rows, int]]
    notes: list[str | Event]


class JaxHooks:
    """A feature in one process of a run. Each method does nothing where it is not overridden.

    value: what the plan has of the feature
    """

    def __init__(self, context: HookContext, value: Any) -> None:
        self.context, self.value = context, value

    def before_step(self, state: Any, batch: Batch) -> None:
        """Before the program of a step is called."""
