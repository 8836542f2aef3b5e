"""Read the files of a run into a RunRecord, for its page.

Files are read, none is written. Live runs, failed runs and runs with damaged files have a record,
too: each thing that can't be read is a line of `faults`.
"""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from samecurve.observe.plan_text import decisions
from samecurve.seam import (
    Plan,
    RunError,
    SamecurveError,
    UserError,
    banner,
    read_document,
    read_file_bytes,
)
from samecurve.units import first_and_count
from samecurve_products.report.journal_reader import JournalReader
from samecurve_products.report.record import Checkpoint, RunRecord, as_mapping
from samecurve_products.report.steps import number

_MOST_JSON = 1 << 30  # bytes
_MOST_MICROBATCHES = 1 << 20  # of a step
_DAMAGED = (
    *(OSError, ValueError, TypeError, AttributeError),
    *(ArithmeticError, LookupError, RecursionError),
)


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


def read_run(directory: Path, *, live: bool, journal: JournalReader | None = None) -> RunRecord:
    """Read one run. RunError: neither plan.json nor the journal has the run's plan.

    journal: a reader that has read the journal; None: the journal is read here, whole
    """
    if journal is None:
        journal = JournalReader(directory)
        journal.read()
    record = replace(journal.content, live=live, faults=journal.faults(live=live))
    _read_plan(record, journal.plan)
    _read_config(record)
    record.checkpoints = _read_checkpoints(directory, record.faults)
    return record


def check_is_run(directory: Path) -> None:
    """Refuse a path that is no run directory.

    The UserError names the runs inside the directory, or the run that the path belongs to.
    """
    if (directory / "plan.json").is_file():
        return
    cause = f"{directory} is no run directory"
    parents = (*directory.parents, *directory.absolute().parents)
    above = next((path for path in parents if (path / "plan.json").is_file()), None)
    if not directory.exists():
        cause = f"{directory} does not exist"
        remedy = "a run directory: what train printed after `run`"
    elif above:
        remedy = f"it lies in the run {above}"
    elif runs := sorted(str(path.parent) for path in directory.glob("*/plan.json")):
        remedy = f"runs lie in it: {first_and_count(runs)}"
    else:
        remedy = "a directory with plan.json and journal.jsonl in it"
    raise UserError(cause, remedy, str(directory))


def _read_plan(record: RunRecord, plan_of_journal: Mapping[str, object]) -> None:
    """Read the plan from plan.json or, if that is damaged, from the journal's last start."""
    path = record.directory / "plan.json"
    try:
        content = json.loads(read_file_bytes(path, _MOST_JSON))
        if not as_mapping(as_mapping(content).get("plan")):
            raise ValueError("no plan in it")
    except (OSError, ValueError, RecursionError) as error:
        if not plan_of_journal:
            raise RunError(
                f"{path} can't be read: {error}",
                "restore plan.json from a copy; journal.jsonl has no `planned` line to replace it",
                str(path),
            ) from None
        content = {"plan": plan_of_journal}
        record.faults.append(
            f"plan.json can't be read ({error}); the plan is the one in journal.jsonl"
        )
    record.plan_json = content["plan"]
    if isinstance(content.get("began"), str):
        record.began_from = content["began"]
    record.origins = _texts(content.get("origins"))
    record.formulas = _texts(content.get("formulas"))
    try:
        record.plan = _checked_plan(record.plan_json)
    except _DAMAGED as error:
        record.faults.append(
            f"the plan is of another version of samecurve, or damaged ({type(error).__name__}:"
            f" {error}): what follows from it is left out"
        )


def _checked_plan(plan_json: Mapping[str, object]) -> Plan:
    """The plan, after it was once put into words. One of _DAMAGED: it can't be."""
    plan = Plan.from_json(plan_json)
    if plan.batch.global_batch_size > _MOST_MICROBATCHES * plan.batch.micro_batch_size:
        raise ValueError(f"a step of {plan.batch.global_batch_size} samples")
    banner(plan)
    decisions(plan)
    return plan


def _texts(value: object) -> dict[str, str]:
    return {str(key): str(text) for key, text in as_mapping(value).items()}


def _read_config(record: RunRecord) -> None:
    path = record.directory / "config.yaml"
    try:
        record.config = flat(read_document(path, regular=True).value)
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
            size = sum(int(file["bytes"]) for file in manifest["files"].values())
            versions = _texts(manifest.get("versions"))
            checkpoints.append(Checkpoint(step, f"checkpoints/{path.name}", size, loss, versions))
        except _DAMAGED:
            faults.append(f"checkpoints/{path.name} has no manifest that can be read")
    return checkpoints
