"""Read the files of a run into a RunRecord, for its report.

Files are read, none is written. Live runs, failed runs and runs with damaged files have a record,
too: each thing that can't be read is a line of `faults`. Steps that a resume made void are counted,
but are not in the columns.
"""

import json
import math
from array import array
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np

from samecurve.core.config.document import read_file
from samecurve.core.events import Event
from samecurve.core.planning.plan import Plan
from samecurve.core.system.files import read_file_bytes, regular_only
from samecurve.errors import RunError, SamecurveError, UserError
from samecurve.observe.journal import VOIDED, event_of, read_lines
from samecurve.report.record import (
    MEANS,
    Checkpoint,
    Column,
    RunRecord,
    Start,
    as_mapping,
    number,
)
from samecurve.units import counted

_STEP_METRICS = (
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
_MOST_COLUMNS = 200  # steps: a journal with a higher step is damaged
_MOST_JSON = 1 << 30  # bytes
_MOST_STEPS = 1 << 53  # a float can't hold larger integers exactly
_NOTABLE = ("resumed", "restarted", "warned", "slow", *_ENDS)


def read_runs(directories: Sequence[Path], live: Callable[[Path], bool]) -> list[RunRecord]:
    """Read several runs, after all of them have been checked.

    live: tells whether a process holds a run's lock

    UserError: a directory is no run, or is named twice.
    """
    for directory in directories:
        check_is_run(directory)
    for index, directory in enumerate(directories):
        if directory.resolve() in {other.resolve() for other in directories[:index]}:
            raise UserError(f"{directory} is named twice", "name each run once", str(directory))
    return [read_run(directory, live=live(directory)) for directory in directories]


def read_run(directory: Path, *, live: bool) -> RunRecord:
    """Read one run. RunError: neither plan.json nor the journal has the run's plan."""
    record = RunRecord(directory=directory, live=live)
    _read_journal(record)
    _read_plan(record)
    _read_config(record)
    record.checkpoints = _read_checkpoints(directory, record.faults)
    return record


def check_is_run(directory: Path) -> None:
    """Refuse a path that is no run directory.

    The UserError names the runs inside the directory, or the run that the path belongs to.
    """
    if (directory / "plan.json").is_file():
        return
    if not directory.exists():
        raise UserError(
            f"{directory} does not exist",
            "a run directory: what train printed after `run`",
            str(directory),
        )
    for above in (*directory.parents, *directory.absolute().parents):
        if (above / "plan.json").is_file():
            raise UserError(
                f"{directory} is no run directory", f"it lies in the run {above}", str(directory)
            )
    remedy = "a directory with plan.json and journal.jsonl in it"
    names = sorted(path.parent.name for path in directory.glob("*/plan.json"))
    if names:
        remedy = f"runs lie in it: {directory / names[0]}"
        if len(names) > 1:
            remedy += f", and {len(names) - 1} more"
    raise UserError(f"{directory} is no run directory", remedy, str(directory))


class JournalReader:
    """Add a journal's events one by one to a record.

    Only the numbers of a step are kept, since there may be millions of steps.
    """

    def __init__(self, record: RunRecord) -> None:
        self._record = record
        self._columns = {name: array("d") for name in ("step", "time", *_STEP_METRICS)}
        self._highest = 0  # step of an event that a later `resumed` may make void

    def add(self, event: Event) -> None:
        record = self._record
        self._begin_start_with(event)
        start = record.starts[-1]
        start.last_time = max(start.last_time, event.time)
        start.last_step = event.step
        self._highest = max(self._highest, event.step if event.kind in VOIDED else 0)
        if event.kind in _NOTABLE:
            record.notable.append(event)
        kept = {
            "evaluated": record.evaluated,
            "tested": record.tested,
            "saved": record.saved,
            "sampled": record.sampled,
            "sensors": record.sensors,
        }
        if event.kind in kept:
            kept[event.kind].append(event)
        match event.kind:
            case "step":
                self._add_step(event)
            case "started":
                start.training_since = event.time
            case "resumed":
                self._void_beyond(event.step)
            case "finished" | "stopped" | "failed":
                start.end, start.end_values = event.kind, event.values
            case "evaluated":
                record.totals.evaluating += number(event.values.get("seconds"), 0.0)
            case "saved":
                record.totals.saving += number(event.values.get("blocked_seconds"), 0.0)

    def _begin_start_with(self, event: Event) -> None:
        """Add a start if the event begins one. A restart has the plan of the start before it."""
        starts = self._record.starts
        if event.kind == "planned" or not starts:
            plan = as_mapping(event.values.get("plan"))
            environment = as_mapping(event.values.get("environment"))
        elif event.kind == "restarted":
            plan, environment = starts[-1].plan, starts[-1].environment
        else:
            return
        starts.append(
            Start(
                time=event.time,
                step=event.step,
                plan=plan,
                environment=environment,
                last_time=event.time,
                last_step=event.step,
            )
        )

    def _add_step(self, event: Event) -> None:
        self._columns["step"].append(float(event.step))
        self._columns["time"].append(event.time)
        for name in _STEP_METRICS:
            self._columns[name].append(number(event.values.get(name)))
        self._add_means(as_mapping(event.values.get("metrics")))

    def _add_means(self, means: Mapping[str, object]) -> None:
        """Add the means that the loss returned beside the loss value in the last step."""
        before = len(self._columns["step"]) - 1
        for name in means:
            if MEANS + name not in self._columns and len(self._columns) < _MOST_COLUMNS:
                self._columns[MEANS + name] = array("d", [math.nan] * before)
        for column in self._columns:
            if column.startswith(MEANS):
                value = means.get(column.removeprefix(MEANS))
                self._columns[column].append(number(value))

    def _void_beyond(self, step: int) -> None:
        """Remove the steps after `step`: a resume repeated them or gave them up."""
        record = self._record
        if self._highest <= step:
            return
        self._highest = step
        for events in (record.evaluated, record.saved, record.sampled):
            events[:] = [event for event in events if event.step <= step]
        counts = np.array(self._columns["step"]) <= step
        if counts.all():
            return
        record.totals.voided_steps += int((~counts).sum())
        record.totals.voided += float(np.nansum(np.array(self._columns["seconds"])[~counts]))
        self._columns = {
            name: array("d", np.array(column)[counts].tobytes())
            for name, column in self._columns.items()
        }

    def columns(self) -> dict[str, Column]:
        return {name: np.array(column, np.float64) for name, column in self._columns.items()}


def _read_journal(record: RunRecord) -> None:
    reader = JournalReader(record)
    num_strange = 0
    try:
        with open(record.directory / "journal.jsonl", "rb", opener=regular_only) as file:
            for line in read_lines(file):
                is_whole = line.endswith(b"\n")
                if not is_whole and record.live:
                    continue  # the last line is being written
                event = event_of(line) if is_whole else None
                if event and math.isfinite(event.time) and abs(event.step) < _MOST_STEPS:
                    reader.add(event)
                else:
                    num_strange += 1
    except OSError as error:
        record.faults.append(f"journal.jsonl can't be read: {error.strerror}; there are no curves")
    if num_strange:
        are = "is" if num_strange == 1 else "are"
        record.faults.append(
            f"journal.jsonl: {counted(num_strange, 'line')} passed over that {are} no event"
            " (damaged, or cut off by a kill)"
        )
    record.steps = reader.columns()


def _read_plan(record: RunRecord) -> None:
    """Read the plan from plan.json or, if that is damaged, from the journal's last start."""
    path = record.directory / "plan.json"
    try:
        content = json.loads(read_file_bytes(path, _MOST_JSON))
        if not isinstance(content, dict) or not isinstance(content.get("plan"), dict):
            raise ValueError("no plan in it")
    except (OSError, ValueError, RecursionError) as error:
        plans = [start.plan for start in record.starts if start.plan]
        if not plans:
            raise RunError(
                f"{path} can't be read: {error}",
                "restore plan.json from a copy; journal.jsonl has no `planned` line to replace it",
                str(path),
            ) from None
        content = {"plan": plans[-1]}
        record.faults.append(
            f"plan.json can't be read ({error}); the plan is the one in journal.jsonl"
        )
    record.plan_json = content["plan"]
    if isinstance(content.get("began"), str):
        record.began_from = content["began"]
    record.origins = _texts(content.get("origins"))
    record.formulas = _texts(content.get("formulas"))
    try:
        record.plan = Plan.from_json(record.plan_json)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        record.faults.append(
            f"the plan is of another version of samecurve, or damaged ({type(error).__name__}:"
            f" {error}): what follows from it is left out"
        )


def _texts(value: object) -> dict[str, str]:
    return {str(key): str(text) for key, text in as_mapping(value).items()}


def _read_config(record: RunRecord) -> None:
    path = record.directory / "config.yaml"
    try:
        record.config = flat(read_file(path, regular=True).value)
    except SamecurveError as error:
        record.faults.append(f"config.yaml can't be read: {error.cause}")


def flat(value: Mapping[str, object], prefix: str = "") -> dict[str, object]:
    """Nested mappings as one mapping with dotted keys; lists stay whole."""
    dotted: dict[str, object] = {}
    for key, item in value.items():
        if isinstance(item, Mapping) and item:
            dotted |= flat(item, f"{prefix}{key}.")
        else:
            dotted[f"{prefix}{key}"] = item
    return dotted


_DAMAGED = (
    OSError,
    ValueError,
    KeyError,
    TypeError,
    AttributeError,
    OverflowError,
    RecursionError,
)


def _read_checkpoints(directory: Path, faults: list[str]) -> list[Checkpoint]:
    """The checkpoints of the run, newest first."""
    checkpoints = []
    for path in sorted((directory / "checkpoints").glob("step-[0-9]*"), reverse=True):
        try:
            manifest = json.loads(read_file_bytes(path / "manifest.json", _MOST_JSON))
            loop, step = manifest["loop"], int(manifest["step"])
            loss = math.nan
            if loop.get("metrics_step") == step:
                loss = number(loop.get("metrics", {}).get("loss"))
            checkpoint = Checkpoint(
                step=step,
                path=f"checkpoints/{path.name}",
                bytes=sum(int(file["bytes"]) for file in manifest["files"].values()),
                loss=loss,
                versions=_texts(manifest.get("versions")),
            )
        except _DAMAGED:
            faults.append(f"checkpoints/{path.name} has no manifest that can be read")
        else:
            checkpoints.append(checkpoint)
    return checkpoints
