"""The metrics of a checkpoint, on any devices.

The run's own plan and engine are restored and evaluated once, in a directory that is thrown away.
"""

import shutil
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from samecurve.core.config.loading import LoadedConfig, load_of_run
from samecurve.core.feature_list import listed_and_installed
from samecurve.core.planning.fixed import Fixed
from samecurve.core.planning.plan import Plan
from samecurve.core.planning.planner import plan
from samecurve.errors import RunError, UserError
from samecurve.launch.throwaway_run import launch_throwaway
from samecurve.observe import read_events
from samecurve.probe import probe
from samecurve.processes import ForkServer
from samecurve.run.changes import refuse_other_model
from samecurve.run.describe import describe
from samecurve.run.directory import Run
from samecurve.run.directory.attempt import Attempt, new_attempt_name
from samecurve.run.trust import check_trusted
from samecurve.run.warm_start import WarmStart
from samecurve.run.weights.opened_checkpoint import OpenedCheckpoint, held
from samecurve.tasks import Tasks, entry_of

Which = Literal["held-out", "train", "test"]


@dataclass(frozen=True)
class Evaluated:
    """The metrics of a checkpoint."""

    step: int
    samples: int  # how many were read
    metrics: Mapping[str, Any]
    plan: Plan  # the devices, and how they are used
    seconds: float  # of the evaluation itself


def evaluate(
    path: Path,
    settings: Mapping[str, tuple[Any, str]],
    data: str | None,
    which: Which,
    say: Callable[[str], None],
    *,
    trust: bool = False,
) -> Evaluated:
    """Evaluate a checkpoint once, on any devices.

    path: a run, or one of its checkpoints.
    settings: config key -> (value, the flag that sets it).
    data: read in place of the run's own data, all of it.
    say: shows a line.
    trust: run the code that the run's config names, wherever it lies.

    UserError: nothing is saved, or there is nothing to evaluate. RunError: the evaluation failed.
    """
    scratch = Run(Path(tempfile.mkdtemp(prefix="samecurve-eval-")))
    try:
        # a live run could remove the checkpoint while the ranks start
        with held(path) as saved, WarmStart() as warm_start:
            check_trusted(saved.run, trust=trust, where="RUN")
            loaded = _loaded(saved.run, settings, data, which)
            if loaded.config.engine == "torch":
                warm_start.begin()
            is_other_data = data is not None or any(key.startswith("data.") for key in settings)
            own_plan = _plan(saved, loaded, warm_start, is_other_data=is_other_data)
            if data is not None:
                which = "train"
            return _evaluate(
                saved, scratch, loaded, own_plan, which=which, say=say, server=warm_start.server
            )
    finally:
        shutil.rmtree(scratch.home, ignore_errors=True)


def _plan(
    saved: OpenedCheckpoint, loaded: LoadedConfig, warm_start: WarmStart, *, is_other_data: bool
) -> Plan:
    """Plan for the run's own devices, or for those that the flags name."""
    config = loaded.config
    fixed = None if is_other_data else Fixed.from_manifest(saved.manifest)
    facts = describe(config, warm_start.server)
    refuse_other_model(saved.run, saved.path, facts)
    own_plan = plan(config, probe(), facts, fixed)
    if own_plan.layout.is_one_process:  # this process evaluates
        warm_start.stop()
    else:
        warm_start.expect(own_plan.layout, entry_of(config.task).libraries)
    return own_plan


def _evaluate(
    saved: OpenedCheckpoint,
    scratch: Run,
    loaded: LoadedConfig,
    own_plan: Plan,
    *,
    which: Which,
    say: Callable[[str], None],
    server: ForkServer | None,
) -> Evaluated:
    """Evaluate by the plan. scratch: an empty directory for the run that only evaluates."""
    run = saved.run
    for note in saved.notes:
        say(f"warn   {note}")
    if which == "train":
        own_plan = own_plan.evaluated_on("train")
    if which == "test":
        own_plan = own_plan.evaluated_on("test")
    if which == "test" and not own_plan.data.test_samples:
        raise UserError(
            f"{run.home} has no test data",
            "leave --on out to evaluate on what was held back; -d names other data",
            "--on",
        )
    if not own_plan.eval_samples:
        raise UserError(
            f"{run.home} holds no data back to evaluate on",
            "--on train evaluates on what it was trained on; -d names other data",
            "RUN",
        )
    checkpoint = str(saved.path.resolve())
    attempt = Attempt(new_attempt_name(), str(scratch.home), checkpoint, evaluate=which)
    was_run = launch_throwaway(
        run, loaded, own_plan, attempt, step=saved.step, say=say, server=server
    )
    journal = read_events(scratch.journal)
    evaluated = [event for event in journal if event.kind == "evaluated"]
    if not was_run or not evaluated:
        raise RunError("the evaluation was stopped")
    values = dict(evaluated[-1].values)
    seconds = values.pop("seconds")
    return Evaluated(saved.step, own_plan.eval_samples, values, own_plan, seconds)


def _loaded(
    run: Run, settings: Mapping[str, tuple[Any, str]], data: str | None, which: Which
) -> LoadedConfig:
    document = run.document_for_use()
    if which == "train":
        for key, value in entry_of(str(document.value["task"])).plain_data().items():
            document.set(key, value, "--on")
    if data is not None:
        reference = run.read_plan().data.reference
        entry = entry_of(str(document.value["task"]))
        for key, value in entry.other_data(data, run.assets, reference).items():
            document.set(key, value, "-d")
    for key, (value, flag) in settings.items():
        document.set(key, value, flag)
    # neither when the run wrote, nor how fast its devices were, matters here
    for key in ("eval_every", "save_every", "sample_every"):
        document.set(f"train.{key}", 0, "eval")
    for row in listed_and_installed():
        for key, value in row.off.items() if row.fixes_devices else ():
            document.set(key, value, "eval")
    return load_of_run(document, Tasks(), run.home.name)
