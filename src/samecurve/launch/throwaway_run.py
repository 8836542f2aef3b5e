"""A run in a directory that is thrown away: it works on what another run has saved, by a plan and a
config of its own.
"""

from collections.abc import Callable
from pathlib import Path

from samecurve.core.config.loading import LoadedConfig
from samecurve.core.config.sections import Track
from samecurve.core.events import Event
from samecurve.core.planning.plan import Plan
from samecurve.core.system import write_json
from samecurve.launch.local import launch
from samecurve.observe import append_event
from samecurve.observe.console import WarningsAlone
from samecurve.processes import ForkServer
from samecurve.run.directory import Lock, Run
from samecurve.run.directory.attempt import Attempt
from samecurve.run.start_files import PreparedRun
from samecurve.run.weights.base_files import Base


def launch_throwaway(
    original: Run,
    loaded: LoadedConfig,
    own_plan: Plan,
    attempt: Attempt,
    *,
    step: int,
    say: Callable[[str], None],
    server: ForkServer | None = None,
) -> bool:
    """Write the directory that the attempt names, and run in it. False: it was stopped.

    original: whose frozen base is used
    step: of the checkpoint that the attempt goes on from
    say: shows a warning

    SamecurveError: why the run failed.
    """
    scratch = Run(Path(attempt.run))
    for directory in (scratch.checkpoints, scratch.logs):
        directory.mkdir(parents=True)
    scratch.write(loaded.config, own_plan, origins=loaded.origins)
    if base := Base.kept_by(original):
        base.check_unchanged()
        write_json(scratch.base, base.to_json())
    values = {"attempt": attempt.name, "run": attempt.run, "plan": own_plan.to_json()}
    append_event(scratch.journal, Event("planned", step, values))
    prepared = PreparedRun(
        run=scratch,
        plan=own_plan,
        attempt=attempt,
        lock=Lock(scratch),
        journal_start=0,
        done=False,
        step=step,
        track=Track(sensors_every=0),
    )
    screen = WarningsAlone(own_plan, scratch.home, say)
    devices = loaded.config.devices
    return launch(prepared, devices, headless=False, screen=screen, server=server) == 0
