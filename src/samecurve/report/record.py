"""A run as its files tell it: plan, config, and the journal as columns of numbers."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from samecurve.core.events import Event
from samecurve.core.planning.plan import Plan

Column = NDArray[np.float64]
MEANS = "metrics/"  # prefix of columns of the means that the loss returns beside the loss value


@dataclass(kw_only=True)
class Start:
    """A start of a run, from its `planned` line to its last line."""

    time: float  # seconds since 1970
    step: int
    plan: Mapping[str, object]
    environment: Mapping[str, object]
    last_time: float
    last_step: int
    training_since: float | None = None
    end: str = ""  # finished, stopped, failed; '': no line says it
    end_values: Mapping[str, object] = field(default_factory=dict)


@dataclass
class Totals:
    """Seconds over all starts that are not in the columns of steps."""

    evaluating: float = 0.0
    saving: float = 0.0
    voided: float = 0.0  # of steps that a resume made void
    voided_steps: int = 0


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint as its manifest describes it; its arrays are not checked."""

    step: int
    path: str
    bytes: int
    loss: float  # of the evaluation at the checkpoint's step; nan: none
    versions: Mapping[str, str]


@dataclass(kw_only=True)
class RunRecord:
    """A run as its files tell it."""

    directory: Path
    live: bool  # a process holds the run's lock
    plan_json: Mapping[str, object] = field(default_factory=dict)  # the content of plan.json
    plan: Plan | None = None  # the plan as an object; None: it was written by another version
    origins: Mapping[str, str] = field(default_factory=dict)  # where a config value came from
    formulas: Mapping[str, str] = field(default_factory=dict)  # how the plan's estimates came about
    began_from: str | None = None  # another run's checkpoint, with the first weights
    config: Mapping[str, object] = field(default_factory=dict)  # dotted keys
    steps: Mapping[str, Column] = field(default_factory=dict)  # a number for each step, or nan
    evaluated: list[Event] = field(default_factory=list)
    tested: list[Event] = field(default_factory=list)
    sampled: list[Event] = field(default_factory=list)
    sensors: list[Event] = field(default_factory=list)
    saved: list[Event] = field(default_factory=list)
    notable: list[Event] = field(default_factory=list)  # resumes, warnings, ends
    starts: list[Start] = field(default_factory=list)
    checkpoints: list[Checkpoint] = field(default_factory=list)  # newest first
    totals: Totals = field(default_factory=Totals)
    faults: list[str] = field(default_factory=list)  # a line for each thing that could not be read

    def column(self, name: str) -> Column:
        """The column of this name: `step`, `time`, or a metric of steps."""
        if name.startswith(MEANS) and name not in self.steps:
            return np.full(self.num_steps, math.nan)
        return self.steps[name]

    @property
    def means(self) -> list[str]:
        """The names of the means that the loss returns beside the loss value."""
        return [name.removeprefix(MEANS) for name in self.steps if name.startswith(MEANS)]

    @property
    def num_steps(self) -> int:
        """The number of steps, without those that a resume made void."""
        return len(self.steps["step"])

    def has_values(self, name: str) -> bool:
        return bool(np.isfinite(self.steps[name]).any())


def as_mapping(value: object) -> Mapping[str, object]:
    """The value if it is a mapping, else {}."""
    return value if isinstance(value, dict) else {}


def number(value: object, otherwise: float = math.nan) -> float:
    """The value as a finite number; `otherwise`, if it is none."""
    if not isinstance(value, int | float):
        return otherwise
    try:
        as_float = float(value)
    except OverflowError:
        return otherwise
    if not math.isfinite(as_float):
        return otherwise
    return as_float
