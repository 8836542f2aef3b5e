"""Train some steps of a past run anew, in a directory that is thrown away, on any devices."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from samecurve.checkpoint.manifest import read_manifest
from samecurve.core.config.loading import LoadedConfig, load_of_run
from samecurve.core.config.sections import Track
from samecurve.core.determinism.data_order import Anchor
from samecurve.core.events import Event
from samecurve.core.planning.fixed import Fixed
from samecurve.core.planning.plan import Plan
from samecurve.core.planning.planner import plan
from samecurve.core.system.files import write_json
from samecurve.errors import RunError, UserError
from samecurve.experiments.scratch import for_steps_alone
from samecurve.launch.local import launch
from samecurve.observe.console import WarningsAlone
from samecurve.observe.journal import append_event
from samecurve.probe import probe
from samecurve.run.changes import other_arrays
from samecurve.run.describe import describe
from samecurve.run.directory.attempt import Attempt, new_attempt_name, surroundings
from samecurve.run.directory.lock import Lock
from samecurve.run.directory.run_directory import Run
from samecurve.run.start_files import PreparedRun
from samecurve.run.weights.base_files import Base
from samecurve.tasks import Tasks
from samecurve.units import first_and_count


@dataclass(frozen=True)
class Start:
    """Where a replay begins."""

    step: int  # 0: the run's own beginning
    checkpoint: Path | None  # None: the initial weights
    fixed: Fixed  # as it was when the next step was trained


class Replayer:
    """Trains steps of one run anew.

    settings: config key -> (value, the flag that sets it), in place of the run's own.
    say: shows a line.

    UserError: the run's config can't be planned on these devices.
    """

    def __init__(
        self,
        run: Run,
        settings: Mapping[str, tuple[Any, str]],
        say: Callable[[str], None],
    ) -> None:
        self._run, self._say = run, say
        self._loaded = _loaded(run, settings)
        self._machine = probe()
        self._facts = describe(self._loaded.config, None)

    def plan(self, start: Start) -> Plan:
        """The plan of a replay: the run's own, but that nothing is evaluated, sampled or saved."""
        if start.checkpoint:
            differing = other_arrays(read_manifest(start.checkpoint), self._facts)
            if differing:
                raise UserError(
                    f"the config of {self._run.home} is of another model than"
                    f" {start.checkpoint.name}: {first_and_count(differing)}",
                    "the run's config.yaml and checkpoints as they were written",
                    "RUN",
                )
        whole = plan(self._loaded.config, self._machine, self._facts, start.fixed)
        alone = for_steps_alone(whole)
        return replace(alone, every=replace(alone.every, hash=whole.every.hash))

    def replay(self, start: Start, until: int, home: Path) -> Run:
        """Train from a start to the end of step `until`. Returns the run that did so.

        home: an empty directory.

        RunError: the replay failed, or was stopped.
        """
        scratch, own_plan = Run(home), self.plan(start)
        attempt = Attempt(
            new_attempt_name(),
            str(home),
            resume=str(start.checkpoint.resolve()) if start.checkpoint else None,
            stop_at=until,
            weights=self._initial_weights(start),
        )
        self._write(scratch, own_plan, attempt, start)
        prepared = PreparedRun(
            run=scratch,
            plan=own_plan,
            attempt=attempt,
            lock=Lock(scratch),
            journal_start=0,
            done=False,
            step=start.step,
            track=Track(sensors_every=0),
        )
        screen = WarningsAlone(own_plan, home, self._say)
        code = launch(prepared, self._loaded.config.devices, headless=False, screen=screen)
        if code:
            raise RunError("the replay was stopped")
        return scratch

    def _initial_weights(self, start: Start) -> str | None:
        has_copy = start.checkpoint is None and self._run.initial.is_dir()
        return str(self._run.initial.resolve()) if has_copy else None

    def _write(self, scratch: Run, own_plan: Plan, attempt: Attempt, start: Start) -> None:
        for directory in (scratch.checkpoints, scratch.logs):
            directory.mkdir(parents=True)
        scratch.write(self._loaded.config, own_plan, origins=self._loaded.origins)
        if base := Base.kept_by(self._run):
            base.check_unchanged()
            write_json(scratch.base, base.to_json())
        values = {
            "attempt": attempt.name,
            "run": attempt.run,
            "plan": own_plan.to_json(),
            "environment": surroundings(own_plan.layout.engine, self._machine),
        }
        append_event(scratch.journal, Event("planned", start.step, values))


def start_at(checkpoint: Path) -> Start:
    """The start at a checkpoint."""
    manifest = read_manifest(checkpoint)
    return Start(int(manifest["step"]), checkpoint, Fixed.from_json(manifest["fixed"]))


def start_of_run(first_plan: Plan) -> Start:
    """The run's own beginning. first_plan: by which its first step was trained"""
    return Start(0, None, replace(first_plan.fixed, anchor=Anchor()))


def _loaded(run: Run, settings: Mapping[str, tuple[Any, str]]) -> LoadedConfig:
    document = run.document_for_use()
    for key, (value, flag) in settings.items():
        document.set(key, value, flag)
    document.set("devices.balance", "even", "audit")  # how fast its devices were does not matter
    return load_of_run(document, Tasks(), run.home.name)
