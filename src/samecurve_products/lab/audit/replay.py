"""Train some steps of a past run anew, in a directory that is thrown away, on any devices."""

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from samecurve.checkpoint.store import hold
from samecurve.core.config.loading import load_of_run
from samecurve.core.determinism.data_order import Anchor
from samecurve.core.planning.fixed import Fixed
from samecurve.core.planning.planner import plan
from samecurve.experiments.scratch import for_steps_alone
from samecurve.launch.throwaway_run import launch_throwaway
from samecurve.run.changes import refuse_other_model
from samecurve.run.directory.attempt import Attempt, new_attempt_name
from samecurve.seam import (
    LoadedConfig,
    Plan,
    Run,
    RunError,
    Tasks,
    describe,
    probe,
    verify_checkpoint,
)


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
            refuse_other_model(self._run, start.checkpoint, self._facts)
        whole = plan(self._loaded.config, self._machine, self._facts, start.fixed)
        alone = for_steps_alone(whole)
        return replace(alone, every=replace(alone.every, hash=whole.every.hash))

    def replay(self, start: Start, until: int, home: Path) -> Run:
        """Train from a start to the end of step `until`. Returns the run that did so.

        home: an empty directory.

        RunError: the replay failed, or was stopped.
        """
        attempt = Attempt(
            new_attempt_name(),
            str(home),
            resume=str(start.checkpoint.resolve()) if start.checkpoint else None,
            stop_at=until,
            weights=self._initial_weights(start),
        )
        # a live run could remove the checkpoint meanwhile
        with hold(start.checkpoint) if start.checkpoint else nullcontext():
            was_run = launch_throwaway(
                self._run,
                self._loaded,
                self.plan(start),
                attempt,
                step=start.step,
                say=self._say,
            )
        if not was_run:
            raise RunError("the replay was stopped")
        return Run(home)

    def _initial_weights(self, start: Start) -> str | None:
        has_copy = start.checkpoint is None and self._run.initial.is_dir()
        return str(self._run.initial.resolve()) if has_copy else None


def start_at(checkpoint: Path) -> Start:
    """The start at a checkpoint. CorruptCheckpointError: it is damaged, or gone."""
    manifest = verify_checkpoint(checkpoint)
    return Start(int(manifest["step"]), checkpoint, Fixed.from_manifest(manifest))


def start_of_run(first_plan: Plan) -> Start:
    """The run's own beginning. first_plan: by which its first step was trained"""
    return Start(0, None, replace(first_plan.fixed, anchor=Anchor()))


def _loaded(run: Run, settings: Mapping[str, tuple[Any, str]]) -> LoadedConfig:
    document = run.document_for_use()
    for key, (value, flag) in settings.items():
        document.set(key, value, flag)
    document.set("devices.balance", "even", "audit")  # how fast its devices were does not matter
    return load_of_run(document, Tasks(), run.home.name)
