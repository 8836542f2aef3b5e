"""The results of calls from Python: a run directory as an object, and the verdict of verify()."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from samecurve.core.events import BESIDE_METRICS, Event
from samecurve.core.planning.plan import Plan
from samecurve.errors import UserError
from samecurve.observe import read_events
from samecurve.run.directory import Run as Files

_ENDS = {"started", "finished", "stopped", "failed"}


class Run:
    """A run directory, whose files are read when they are asked for.

    The run may be live, finished, stopped or failed.
    """

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        """UserError: the path is no run directory."""
        self.directory = Path(directory)
        if not Files(self.directory).exists():
            raise UserError(
                f"{self.directory} is no run directory",
                "one that training made: it has plan.json in it",
                "directory",
            )

    @property
    def events(self) -> list[Event]:
        """The lines of the journal, without those that a resume made void."""
        return read_events(Files(self.directory).journal)

    @property
    def losses(self) -> list[float | None]:
        """The training loss of each step, from the first step; None where it is not finite."""
        return [event.values.get("loss") for event in self.events if event.kind == "step"]

    @property
    def evaluations(self) -> list[dict[str, Any]]:
        """The metrics of each evaluation: {"step", "loss", ...the task's own}."""
        evaluations = []
        for event in self.events:
            if event.kind == "evaluated":
                metrics = {k: value for k, value in event.values.items() if k not in BESIDE_METRICS}
                evaluations.append({"step": event.step, **metrics})
        return evaluations

    @property
    def metrics(self) -> dict[str, Any]:
        """The metrics of the last evaluation; empty if there was none."""
        evaluations = self.evaluations
        return evaluations[-1] if evaluations else {}

    @property
    def outcome(self) -> str:
        """How the run ended: finished, stopped or failed; live if its journal has no end."""
        ends = [event.kind for event in self.events if event.kind in _ENDS]
        if not ends or ends[-1] == "started":
            return "live"
        return ends[-1]

    @property
    def plan(self) -> Plan:
        return Files(self.directory).read_plan()

    def __repr__(self) -> str:
        losses = self.losses
        text = f"{self.directory}: {self.outcome}, {len(losses)} of {self.plan.steps} steps"
        if losses and losses[-1] is not None:
            text += f", loss {losses[-1]:.4f}"
        return f"<Run {text}>"


class Verified:
    """The verdict of verify(), true if every layout of devices gives one device's result."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        """values: the answer of `samecurve verify --json`."""
        self.passed: bool = values["passed"]
        self.layouts: list[dict[str, Any]] = values["layouts"]
        self.left_out: list[str] = values["left_out"]
        self.values = values

    def __bool__(self) -> bool:
        return self.passed

    def __repr__(self) -> str:
        verdicts = ", ".join(f"{layout['layout']} {layout['verdict']}" for layout in self.layouts)
        return f"<Verified {'PASS' if self.passed else 'FAIL'}: {verdicts}>"
