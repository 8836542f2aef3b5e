"""The metrics of a checkpoint, on any devices: the run's own plan and engine, restored and
evaluated once, in a directory that is thrown away.
"""

import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from samecurve.core.config.document import Document, read_file
from samecurve.core.config.sections import LoadedConfig, Track, load
from samecurve.core.events import Event
from samecurve.core.planning.facts import Fixed
from samecurve.core.planning.plan import Plan, plan
from samecurve.errors import RunError, UserError
from samecurve.launch.local import launch
from samecurve.observe.console import console_lines
from samecurve.observe.journal import append_event, read_events
from samecurve.probe import probe
from samecurve.run.attempt import Attempt, new_attempt_name
from samecurve.run.describe import describe
from samecurve.run.directory import Run
from samecurve.run.load import find
from samecurve.run.lock import Lock
from samecurve.run.prepare import PreparedRun
from samecurve.tasks import Tasks, other_data

Which = Literal["held-out", "train"]


@dataclass(frozen=True)
class Evaluated:
    """metrics: of the checkpoint at `step`.

    samples: how many were read. plan: on what. seconds: of the evaluation itself.
    """

    step: int
    samples: int
    metrics: Mapping[str, Any]
    plan: Plan
    seconds: float


class _Said:
    """Of what happens, what a person wants to know beside the result."""

    def __init__(self, made: Plan, run: Run, say: Any) -> None:
        self._plan, self._run, self._say = made, run, say

    def show(self, event: Event) -> None:
        if event.kind == "warned":
            for line in console_lines(event, self._plan, self._run.home):
                self._say(line)

    def close(self) -> None:
        pass


def evaluate(
    path: Path, settings: Mapping[str, tuple[Any, str]], data: str | None, which: Which, say: Any
) -> Evaluated:
    """path: a run, or one of its checkpoints.

    settings: config key -> (value, the flag that gave it). data: read instead of the run's own, all
    of it. say: takes a line.

    UserError: nothing saved, or nothing to evaluate. RunError: it failed.
    """
    found = find(path)
    run, checkpoint = found.run, found.path
    for note in found.notes:
        say(f"warn   {note}")
    loaded = _loaded(run, settings, data)
    facts = describe(loaded.config)
    changed = data is not None or any(key.startswith("data.") for key in settings)
    made = plan(
        loaded.config, probe(), facts, None if changed else Fixed.from_json(found.manifest["fixed"])
    )
    if data is not None or which == "train":
        made = replace(made, eval_samples=made.samples)
    if not made.eval_samples:
        raise UserError(
            f"{run.home} holds no data back to evaluate on",
            "--on train evaluates on what it was trained on; -d names other data",
            "RUN",
        )
    scratch = Path(tempfile.mkdtemp(prefix="samecurve-eval-"))
    try:
        return _run(
            Run(scratch),
            loaded,
            made,
            checkpoint.resolve(),
            "train" if data is not None else which,
            found.step,
            say,
        )
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _loaded(run: Run, settings: Mapping[str, tuple[Any, str]], data: str | None) -> LoadedConfig:
    document = read_file(run.config)
    if data is not None:
        reference = run.read_plan().reference
        for key, value in other_data(
            str(document.value["task"]), data, run.assets, reference
        ).items():
            document.set(key, value, "-d")
    for key, (value, flag) in settings.items():
        document.set(key, value, flag)
    _alone(document)
    return load(document, Tasks(), run.home.name)


def _alone(document: Document) -> None:
    """Nothing of how long the run was, of what it wrote when, or of the speed of its devices
    matters here.
    """
    for key in ("eval_every", "save_every", "sample_every"):
        document.set(f"train.{key}", 0, "eval")
    document.set("devices.balance", "even", "eval")


def _run(
    scratch: Run,
    loaded: LoadedConfig,
    made: Plan,
    checkpoint: Path,
    which: Which,
    step: int,
    say: Any,
) -> Evaluated:
    for directory in (scratch.checkpoints, scratch.logs):
        directory.mkdir()
    scratch.write(loaded.config, made, loaded.origins, {})
    attempt = Attempt(new_attempt_name(), str(scratch.home), str(checkpoint), evaluate=which)
    append_event(
        scratch.journal,
        Event(
            "planned",
            step,
            {"attempt": attempt.name, "run": str(scratch.home), "plan": made.to_json()},
        ),
    )
    code = launch(
        PreparedRun(scratch, made, attempt, Lock(scratch), 0, False, Track(sensors_every=0)),
        loaded.config.devices,
        headless=False,
        screen=_Said(made, scratch, say),
    )
    found = [event for event in read_events(scratch.journal) if event.kind == "evaluated"]
    if code or not found:
        raise RunError("the evaluation was stopped", "", str(checkpoint))
    values = dict(found[-1].values)
    seconds = values.pop("seconds")
    return Evaluated(step, made.eval_samples, values, made, seconds)
