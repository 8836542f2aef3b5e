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
MEANS = "metrics/"  # before the names of columns of what the loss gives beside it


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
    end: str = ""  # finished, stopped, failed; '' if no line says
    end_values: Mapping[str, object] = field(default_factory=dict)


@dataclass
class Totals:
    """Seconds over all starts, beside those of the steps that count."""

    evaluating: float = 0.0
    saving: float = 0.0
    voided: float = 0.0  # of steps that a resume took back
    voided_steps: int = 0


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint as its manifest describes it; its arrays are not checked."""

    step: int
    path: str
    bytes: int
    loss: float  # of the evaluation at its step, else nan
    versions: Mapping[str, str]


@dataclass(kw_only=True)
class RunRecord:
    """A run as its files tell it."""

    directory: Path
    live: bool  # somebody holds its lock
    plan_json: Mapping[str, object] = field(default_factory=dict)  # as plan.json has it
    plan: Plan | None = None  # the same; None where it is of another version
    origins: Mapping[str, str] = field(default_factory=dict)  # where a config value came from
    formulas: Mapping[str, str] = field(default_factory=dict)  # of the plan's estimates
    began_from: str | None = None  # another run's checkpoint
    config: Mapping[str, object] = field(default_factory=dict)  # dotted keys
    steps: Mapping[str, Column] = field(default_factory=dict)  # one number a step, nan for none
    evaluated: list[Event] = field(default_factory=list)
    tested: list[Event] = field(default_factory=list)
    sampled: list[Event] = field(default_factory=list)
    sensors: list[Event] = field(default_factory=list)
    saved: list[Event] = field(default_factory=list)
    notable: list[Event] = field(default_factory=list)  # resumes, warnings, ends
    starts: list[Start] = field(default_factory=list)
    checkpoints: list[Checkpoint] = field(default_factory=list)  # newest first
    totals: Totals = field(default_factory=Totals)
    faults: list[str] = field(default_factory=list)  # what could not be read

    def column(self, name: str) -> Column:
        """name: `step`, `time`, or a metric of steps."""
        if name.startswith(MEANS) and name not in self.steps:
            return np.full(self.num_steps, math.nan)
        return self.steps[name]

    @property
    def means(self) -> list[str]:
        """Names of the means that the loss gives beside itself."""
        return [name.removeprefix(MEANS) for name in self.steps if name.startswith(MEANS)]

    @property
    def num_steps(self) -> int:
        """Steps that count."""
        return len(self.steps["step"])

    def has_values(self, name: str) -> bool:
        return bool(np.isfinite(self.steps[name]).any())


def as_mapping(value: object) -> Mapping[str, object]:
    """A section of what a file said, {} if it is none."""
    return value if isinstance(value, dict) else {}


def number(value: object, otherwise: float = math.nan) -> float:
    """A number of the journal; what is none, or not finite, is `otherwise`."""
    if not isinstance(value, int | float):
        return otherwise
    try:
        as_float = float(value)
    except OverflowError:
        return otherwise
    if not math.isfinite(as_float):
        return otherwise
    return as_float
