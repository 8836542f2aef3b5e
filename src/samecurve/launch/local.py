"""Trains what was prepared: starts the ranks of a plan on this machine, waits for them, and, where
that is wanted and may help, starts them again.

The launcher owns signals: the first asks the run to stop (it saves at the step's end, all ranks
leave together), the second kills.
"""

import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from samecurve.core.config.sections import Devices
from samecurve.core.planning.plan import Plan
from samecurve.core.system.disk_errors import explain_os_error
from samecurve.errors import SamecurveError, UserError
from samecurve.launch.gpu_settings import gpu_settings, without_user_settings
from samecurve.launch.launchers import LAUNCHERS, in_place
from samecurve.launch.monitors import tracked, watched
from samecurve.launch.restarts import RestartBudget, prepare_restart
from samecurve.launch.signals import STOPPING, Signals, kill_children
from samecurve.observe.console import View, make_view, show_journal
from samecurve.observe.failed_event import record_failure
from samecurve.probe.gpus import find_gpus
from samecurve.run.directory.control import ask
from samecurve.run.fork_server import ForkServer
from samecurve.run.preconditions import remove_refused
from samecurve.run.prepare import PreparedRun
from samecurve.worker.closing import not_hiding
from samecurve.worker.cluster_env import LAUNCHER
from samecurve.worker.rank_requests import STOP_SIGNAL


def launch(
    prepared: PreparedRun,
    devices: Devices,
    *,
    headless: bool,
    screen: View | None = None,
    server: ForkServer | None = None,
) -> int:
    """Train what was prepared.

    screen: shows what happens; None: as a terminal wants it.
    server: forks the ranks; None: they are started.

    Returns the exit code: 0, or 128 + the signal that stopped it. SamecurveError: why it failed,
    once.
    """
    run, plan = prepared.run, prepared.plan
    launcher = _Launcher(prepared, devices, server, headless=headless)
    try:
        with (
            show_journal(
                screen or make_view(plan, run.home, headless=headless),
                run.journal,
                prepared.journal_start,
            ),
            tracked(run, prepared.track),
            Signals(launcher.stop, launcher.leave) as signals,
            _environment(plan),
        ):
            with watched(run, plan, prepared.track.sensors_every):
                failure = launcher.train(signals)
            if failure:
                record_failure(run.journal, run.logs, failure)
    finally:
        prepared.lock.release()
    if failure:
        if is_refusal(prepared, failure):
            with not_hiding(failure):
                remove_refused(run)
        raise failure
    return 128 + signals.received if signals.received else 0


def is_refusal(prepared: PreparedRun, failure: SamecurveError) -> bool:
    """Whether a run that this command began has failed before its first step, for a reason that
    only its user can mend.
    """
    return isinstance(failure, UserError) and prepared.journal_start == 0


class _Launcher:
    """The starts of one command."""

    def __init__(
        self, prepared: PreparedRun, devices: Devices, server: ForkServer | None, *, headless: bool
    ) -> None:
        self._prepared, self._devices, self._headless = prepared, devices, headless
        self._server = server
        self._max_restarts = 0 if prepared.attempt.evaluate else devices.max_restarts
        # a lone rank that may be started again is a process of its own, too
        is_alone = prepared.plan.is_one_process and not self._max_restarts
        self._start = in_place if is_alone else LAUNCHERS[devices.launcher]

    def train(self, signals: Signals) -> SamecurveError | None:
        """To the end. Why it failed in the end, if it did."""
        began, budget = time.time(), RestartBudget(self._max_restarts)
        while True:
            failure = self._start(self._prepared, self._devices, self._server)
            if failure is None or signals.received:
                return failure
            following = self._prepare_restart(failure, began, budget)
            if isinstance(following, str):
                if following:
                    failure.remedy = f"{failure.remedy}; {following}"
                return failure
            self._continue_with(following, signals)

    def _prepare_restart(
        self, failure: SamecurveError, began: float, budget: RestartBudget
    ) -> PreparedRun | str:
        try:
            return prepare_restart(self._prepared, failure, began, budget)
        except OSError as error:  # what has failed may be the disk
            cause, _ = explain_os_error(error, Path(error.filename or self._prepared.run.home))
            return f"not started again: {cause}"

    def _continue_with(self, following: PreparedRun, signals: Signals) -> None:
        self._prepared = following
        if signals.received:  # while it asked the start that had failed
            self.stop()

    def leave(self) -> None:
        """The second signal."""
        kill_children()
        os.write(
            2, b"\nended at once, without saving: the same command goes on from the last save\n"
        )

    def stop(self) -> None:
        """Asked by the first signal. An evaluation has nothing to save."""
        run, attempt = self._prepared.run, self._prepared.attempt
        if attempt.evaluate:
            kill_children()
            shutil.rmtree(run.home, ignore_errors=True)
            os.write(2, b"\nstopped: nothing was evaluated\n")
            os._exit(130)
        try:
            ask(run, attempt.name, "stop")
        except OSError:  # a full disk: signalled instead
            for pid in run.processes().values():
                with suppress(OSError):  # it has ended
                    os.kill(pid, STOP_SIGNAL)
        if not self._headless:
            os.write(2, STOPPING)


@contextmanager
def _environment(plan: Plan) -> Iterator[None]:
    """What ranks inherit; what the user set stays."""
    defaults = {
        "OMP_NUM_THREADS": str(plan.threads),
        "PYTHONUNBUFFERED": "1",
        "PYTHONHASHSEED": "0",
    }
    if plan.devices[0].kind == "cuda":
        defaults |= gpu_settings(find_gpus(os.environ).vendor)
    added = without_user_settings(defaults, os.environ)
    added[LAUNCHER] = str(os.getpid())
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            os.environ.pop(name, None)
