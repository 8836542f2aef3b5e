"""What a run left behind, read for its report: plan, config, and the journal as columns of numbers.

Only files are read, and none is written. A live run, a failed one and a damaged file are all told:
what can't be read is a line of `faults`, never a silent gap. Steps that a resume voided are not
among the columns; they are counted.
"""

import json
import math
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from samecurve.core.config.document import read_file
from samecurve.core.events import Event
from samecurve.core.planning.plan import Plan
from samecurve.errors import RunError, SamecurveError, UserError
from samecurve.observe.journal import VOIDED

Column = NDArray[np.float64]

_FIGURES = (
    "loss",
    "grad_norm",
    "lr",
    "samples_per_second",
    "tokens_per_second",
    "seconds",
    "wait_seconds",
    "memory_bytes",
    "mfu",
    "scale",
    "skipped",
)
_ENDS = ("finished", "stopped", "failed")
_MOST_STEPS = 1 << 53  # beyond it a float is no longer exact
_TOLD = ("resumed", "restarted", "warned", "slow", *_ENDS)


@dataclass
class Start:
    """One go at a run, from its `planned` line to its last one.

    end: finished, stopped, failed; '' if no line says.
    """

    time: float
    step: int
    plan: Mapping[str, Any]
    environment: Mapping[str, Any]
    last_time: float
    last_step: int
    training_since: float | None = None
    end: str = ""
    end_values: Mapping[str, Any] = field(default_factory=dict)


@dataclass
class Totals:
    """Seconds over all starts, beside those of the steps that count; voided: of steps that a resume
    took back.
    """

    evaluating: float = 0.0
    saving: float = 0.0
    voided: float = 0.0
    voided_steps: int = 0


@dataclass(frozen=True)
class Checkpoint:
    """What a manifest says of it; whether the arrays are whole is not looked at.

    loss: of the evaluation at its step.
    """

    step: int
    path: str
    bytes: int
    loss: float
    versions: Mapping[str, str]


@dataclass
class RunRecord:
    """A run as its files tell it.

    plan: as plan.json has it; made: the same as our own type, None where it is of another version.

    steps: by name, one number a step, nan where there is none; `step` and `time` among them. live:
    somebody holds its lock.
    """

    directory: Path
    live: bool
    plan_json: Mapping[str, Any] = field(default_factory=dict)
    plan: Plan | None = None
    origins: Mapping[str, str] = field(default_factory=dict)
    formulas: Mapping[str, str] = field(default_factory=dict)
    began_from: str | None = None
    config: Mapping[str, Any] = field(default_factory=dict)
    steps: Mapping[str, Column] = field(default_factory=dict)
    evaluated: list[Event] = field(default_factory=list)
    sampled: list[Event] = field(default_factory=list)
    sensors: list[Event] = field(default_factory=list)
    notable: list[Event] = field(default_factory=list)
    starts: list[Start] = field(default_factory=list)
    saved: list[Event] = field(default_factory=list)
    checkpoints: list[Checkpoint] = field(default_factory=list)
    totals: Totals = field(default_factory=Totals)
    faults: list[str] = field(default_factory=list)

    def column(self, name: str) -> Column:
        return self.steps[name]

    @property
    def num_steps(self) -> int:
        """Steps that count."""
        return len(self.steps["step"])

    def has_values(self, name: str) -> bool:
        return bool(np.isfinite(self.steps[name]).any())


def read_runs(homes: Sequence[Path], live: Callable[[Path], bool]) -> list[RunRecord]:
    """All of them are looked at before the first is read.

    UserError: one is no run, or is named twice.
    """
    for home in homes:
        check_is_run(home)
    for index, home in enumerate(homes):
        if home.resolve() in {other.resolve() for other in homes[:index]}:
            raise UserError(f"{home} is named twice", "each run once", str(home))
    return [read_run(home, live(home)) for home in homes]


def read_run(home: Path, live: bool) -> RunRecord:
    """RunError: neither plan.json nor the journal says what this run is."""
    record = RunRecord(home, live)
    _read_journal(record)
    _read_plan(record)
    _read_config(record)
    record.checkpoints = _checkpoints(home, record.faults)
    return record


def check_is_run(home: Path) -> None:
    """UserError: no run directory; with the runs that lie in it, or the run that it belongs to."""
    if (home / "plan.json").is_file():
        return
    if not home.exists():
        raise UserError(
            f"{home} does not exist", "a run directory: what train printed after `run`", str(home)
        )
    above = next(
        (
            path
            for path in (*home.parents, *home.absolute().parents)
            if (path / "plan.json").is_file()
        ),
        None,
    )
    if above is not None:
        raise UserError(f"{home} is no run directory", f"it lies in the run {above}", str(home))
    within = sorted(path.parent.name for path in home.glob("*/plan.json")) if home.is_dir() else []
    remedy = (
        f"runs lie in it: {home / within[0]}"
        + (f", and {len(within) - 1} more" if len(within) > 1 else "")
        if within
        else "a directory with plan.json and journal.jsonl in it"
    )
    raise UserError(f"{home} is no run directory", remedy, str(home))


class _Reader:
    """Takes a journal's events one by one, as many as there are, and keeps of a step twelve
    numbers.
    """

    def __init__(self, record: RunRecord) -> None:
        self._story = record
        self._columns = {name: array("d") for name in ("step", "time", *_FIGURES)}

    def add(self, event: Event) -> None:
        record = self._story
        if event.kind == "planned" or not record.starts:
            plan, environment = event.values.get("plan"), event.values.get("environment")
            record.starts.append(
                Start(
                    event.time,
                    event.step,
                    plan if isinstance(plan, dict) else {},
                    environment if isinstance(environment, dict) else {},
                    event.time,
                    event.step,
                )
            )
        elif event.kind == "restarted" and record.starts:
            record.starts.append(
                Start(
                    event.time,
                    event.step,
                    record.starts[-1].plan,
                    record.starts[-1].environment,
                    event.time,
                    event.step,
                )
            )
        start = record.starts[-1]
        start.last_time, start.last_step = max(start.last_time, event.time), event.step
        if event.kind == "step":
            self._step(event)
        elif event.kind == "started":
            start.training_since = event.time
        elif event.kind in _TOLD:
            record.notable.append(event)
            if event.kind == "resumed":
                self._void(event.step)
            elif event.kind in _ENDS:
                start.end, start.end_values = event.kind, event.values
        elif event.kind == "evaluated":
            record.evaluated.append(event)
            record.totals.evaluating += number(event.values.get("seconds"), 0.0)
        elif event.kind == "saved":
            record.saved.append(event)
            record.totals.saving += number(event.values.get("blocked_seconds"), 0.0)
        elif event.kind in {"sampled", "sensors"}:
            getattr(record, event.kind).append(event)

    def _step(self, event: Event) -> None:
        self._columns["step"].append(float(event.step))
        self._columns["time"].append(event.time)
        for name in _FIGURES:
            self._columns[name].append(number(event.values.get(name)))

    def _void(self, step: int) -> None:
        """What was done beyond `step` before: done again, or given up."""
        record = self._story
        for kind in VOIDED & {"evaluated", "saved", "sampled"}:
            kept = getattr(record, kind)
            kept[:] = [event for event in kept if event.step <= step]
        keep = np.array(self._columns["step"]) <= step
        if keep.all():
            return
        record.totals.voided_steps += int((~keep).sum())
        record.totals.voided += float(np.nansum(np.array(self._columns["seconds"])[~keep]))
        self._columns = {
            name: array("d", np.array(column)[keep].tobytes())
            for name, column in self._columns.items()
        }

    def columns(self) -> dict[str, Column]:
        return {name: np.array(column, np.float64) for name, column in self._columns.items()}


def number(value: Any, otherwise: float = math.nan) -> float:
    """A figure of the journal; what is none, or not finite, is `otherwise`."""
    if not isinstance(value, int | float):
        return otherwise
    try:
        found = float(value)
    except OverflowError:
        return otherwise
    return found if math.isfinite(found) else otherwise


def _read_journal(record: RunRecord) -> None:
    path = record.directory / "journal.jsonl"
    reader, strange = _Reader(record), 0
    try:
        with open(path, "rb") as file:
            for line in file:
                event = Event.from_line(line) if line.endswith(b"\n") else None
                if (
                    event is not None
                    and math.isfinite(event.time)
                    and abs(event.step) < _MOST_STEPS
                ):
                    reader.add(event)
                elif line.endswith(b"\n") or not record.live:
                    strange += 1
    except OSError as error:
        record.faults.append(f"journal.jsonl can't be read: {error.strerror}; there are no curves")
    if strange:
        record.faults.append(
            f"journal.jsonl: {strange} line{'s' if strange > 1 else ''} passed over that"
            f" {'are' if strange > 1 else 'is'} no event (damaged, or cut off by a kill)"
        )
    record.steps = reader.columns()


def _read_plan(record: RunRecord) -> None:
    """From plan.json; where that is damaged, from the journal's last start."""
    path = record.directory / "plan.json"
    try:
        found = json.loads(path.read_text())
        if not isinstance(found, dict) or not isinstance(found.get("plan"), dict):
            raise ValueError("no plan in it")
    except (OSError, ValueError, RecursionError) as error:
        found = {
            "plan": next((start.plan for start in reversed(record.starts) if start.plan), None)
        }
        if found["plan"] is None:
            raise RunError(
                f"{path} can't be read: {error}",
                "without it and without a `planned` line in journal.jsonl nothing says what this"
                " run is",
                str(path),
            ) from None
        record.faults.append(
            f"plan.json can't be read ({error}); the plan is the one in journal.jsonl"
        )
    record.plan_json, record.began_from = (
        found["plan"],
        found.get("began") if isinstance(found.get("began"), str) else None,
    )
    record.origins, record.formulas = _texts(found.get("origins")), _texts(found.get("formulas"))
    try:
        record.plan = Plan.from_json(record.plan_json)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        record.faults.append(
            f"the plan is of another version of samecurve, or damaged ({type(error).__name__}:"
            f" {error}): the figures that follow from it are left out"
        )


def _texts(value: Any) -> dict[str, str]:
    return {str(key): str(text) for key, text in value.items()} if isinstance(value, dict) else {}


def _read_config(record: RunRecord) -> None:
    path = record.directory / "config.yaml"
    try:
        record.config = flat(read_file(path).value)
    except SamecurveError as error:
        record.faults.append(f"config.yaml can't be read: {error.cause}")


def flat(value: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested mappings as dotted keys; lists stay whole."""
    found: dict[str, Any] = {}
    for key, item in value.items():
        if isinstance(item, Mapping) and item:
            found |= flat(item, f"{prefix}{key}.")
        else:
            found[f"{prefix}{key}"] = item
    return found


def _checkpoints(home: Path, faults: list[str]) -> list[Checkpoint]:
    """What is saved, newest first."""
    found = []
    for path in sorted((home / "checkpoints").glob("step-*"), reverse=True):
        try:
            manifest = json.loads((path / "manifest.json").read_text())
            loop, step = manifest["loop"], int(manifest["step"])
            loss = loop.get("metrics", {}).get("loss") if loop.get("metrics_step") == step else None
            size = sum(int(file["bytes"]) for file in manifest["files"].values())
            found.append(
                Checkpoint(
                    step,
                    f"checkpoints/{path.name}",
                    size,
                    number(loss),
                    _texts(manifest.get("versions")),
                )
            )
        except (
            OSError,
            ValueError,
            KeyError,
            TypeError,
            AttributeError,
            OverflowError,
            RecursionError,
        ):
            faults.append(f"checkpoints/{path.name} has no manifest that can be read")
    return found
