"""The launcher of a run on this machine: starts its ranks, waits for them, and starts them again
after a failure, where the user wants that and it may help.

The launcher owns signals. The first signal asks the run to stop: the run saves at the step's end,
and all ranks leave together. The second signal kills.
"""

import os
import time
import traceback
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from samecurve.core.config.sections import Devices
from samecurve.core.planning.plan import Plan
from samecurve.core.protocols import Rank
from samecurve.errors import SamecurveError, UserError, is_ctrl_c, not_hiding
from samecurve.launch import Signals, children_ended, kill_children, stopping
from samecurve.launch.monitors import Mirrored, mirrored, tracked, watched
from samecurve.observe.console import View, make_view, show_journal
from samecurve.processes import ForkServer
from samecurve.run.directory import Run
from samecurve.run.directory.attempt import STOP_SIGNAL, ask
from samecurve.run.preconditions import remove_refused
from samecurve.run.start_files import PreparedRun
from samecurve.watch import HangLimit, have_met, num_waiting

if TYPE_CHECKING:
    from samecurve.launch.restarts import RestartBudget

# Seconds after a stop in which ranks still meet: once all of them wait for each other, and where
# some are still importing their libraries, which takes long on a busy machine.
_MEETS, _IMPORTS = 10.0, 60.0


def launch(
    prepared: PreparedRun,
    devices: Devices,
    *,
    headless: bool,
    screen: View | None = None,
    server: ForkServer | None = None,
) -> int:
    """Train a prepared run.

    screen: shows what happens; None: stdout does, in the way that fits a terminal or a file.
    server: forks the ranks; None: each is started.

    Returns the exit code: 0, or 128 + the signal that stopped the run. SamecurveError: why the run
    failed.
    """
    run, plan = prepared.run, prepared.plan
    launcher = _Launcher(prepared, devices, server, headless=headless)
    signals = Signals(launcher.stop, launcher.leave)
    # an evaluation has nothing to save: a signal interrupts it as any other verb
    heard: AbstractContextManager[object] = signals
    if prepared.attempt.evaluate:
        heard = nullcontext()
    try:
        with (
            show_journal(
                screen or make_view(plan, run.home, headless=headless),
                run.journal,
                prepared.journal_start,
            ),
            mirrored(prepared, launcher.ask_to_stop) as mirror,
            tracked(run, prepared.track),
            heard,
            _environment(plan),
        ):
            with watched(run, plan, prepared.track.sensors_every):
                failure = launcher.train(signals)
            if failure:
                from samecurve.observe.failed_event import record_failure

                record_failure(run.journal, run.logs, failure)
        failure = with_mirror(failure, mirror, run)
    finally:
        prepared.lock.release()
    if failure:
        if is_refusal(launcher.prepared, failure):
            with not_hiding(failure):
                remove_refused(run)
        raise failure
    return 128 + signals.received if signals.received else 0


def with_mirror(
    failure: SamecurveError | None, mirror: Mirrored, run: Run
) -> SamecurveError | None:
    """Why the command fails: the training, or else the mirror in a store. Both are said."""
    if failure is None and mirror.failure is not None:
        from samecurve.observe.failed_event import record_failure

        record_failure(run.journal, run.logs, mirror.failure)
        return mirror.failure
    if failure is not None and mirror.failure is not None:
        failure.remedy = f"{failure.remedy}; and {mirror.failure.cause}: {mirror.failure.remedy}"
    return failure


def is_refusal(prepared: PreparedRun, failure: SamecurveError) -> bool:
    """Whether the run failed before its first step for a reason that only the user can remove.

    Only a run that this command began is refused so, and only by its first start: what an earlier
    start of it has trained stays.
    """
    is_first_start = prepared.journal_start == 0 and prepared.attempt.earlier is None
    return isinstance(failure, UserError) and is_first_start


class _Launcher:
    """All the starts of one command. prepared: the present one."""

    def __init__(
        self, prepared: PreparedRun, devices: Devices, server: ForkServer | None, *, headless: bool
    ) -> None:
        self.prepared, self._devices, self._headless = prepared, devices, headless
        self._server = server
        self._max_restarts = 0 if prepared.attempt.evaluate else devices.max_restarts
        # an evaluation may take as long as it likes between two heartbeats
        self._limit = HangLimit(0 if prepared.attempt.evaluate else devices.hang_floor)
        self._asked_at: float | None = None  # when the first signal came
        # since when all ranks were seen to wait for each other after that
        self._all_wait_since: float | None = None
        self._gave_up = False

    def train(self, signals: Signals) -> SamecurveError | None:
        """Train to the end, with restarts. Returns why the run failed in the end, if it did."""
        if not self._max_restarts:
            return self._start()
        from samecurve.launch.restarts import RestartBudget

        began, budget = time.time(), RestartBudget(self._max_restarts)
        while True:
            failure = self._start()
            if failure is None or signals.received:
                return failure
            following = self._prepare_restart(failure, began, budget)
            if isinstance(following, str):
                if following:
                    failure.remedy = f"{failure.remedy}; {following}"
                return failure
            self._continue_with(following, signals)

    def _start(self) -> SamecurveError | None:
        """Start the ranks once, and wait for them. Returns why they failed, if they did."""
        # a lone rank that may be started again is a process of its own, too
        if self.prepared.plan.layout.is_one_process and not self._max_restarts:
            return _train_in_place(self.prepared, self._limit)
        from samecurve.launch import ranks

        failure = ranks.train_by_ranks(
            self.prepared,
            self._limit,
            port=self._devices.port,
            server=self._server,
            gives_up=self._gives_up,
        )
        if not self._gave_up:
            return failure
        with suppress(OSError):  # the terminal is closed
            os.write(2, b"stopped before the first step: the ranks did not meet; nothing to save\n")
        return None

    def _gives_up(self) -> bool:
        """Whether ranks that were asked to stop some time ago have not met: they hear nothing.

        The launcher then ends them.
        """
        logs = self.prepared.run.logs
        if self._asked_at is None or have_met(logs):
            return False
        now = time.monotonic()
        if self._all_wait_since is None:
            if num_waiting(logs) == self.prepared.plan.layout.world_size:
                self._all_wait_since = now
            self._gave_up = now - self._asked_at >= _IMPORTS
        else:
            self._gave_up = now - self._all_wait_since >= _MEETS
        return self._gave_up

    def _prepare_restart(
        self, failure: SamecurveError, began: float, budget: "RestartBudget"
    ) -> PreparedRun | str:
        from samecurve.launch.restarts import prepare_restart

        try:
            return prepare_restart(self.prepared, failure, began, budget)
        except OSError as error:  # the disk may have failed
            from samecurve.core.system import explain_os_error

            cause, _ = explain_os_error(error, Path(error.filename or self.prepared.run.home))
            return f"not started again: {cause}"

    def _continue_with(self, following: PreparedRun, signals: Signals) -> None:
        self.prepared = following
        if signals.received:  # meanwhile: stop() has asked the start that failed
            self.stop()

    def leave(self) -> None:
        """Answer the second signal: end the ranks at once."""
        kill_children()
        with suppress(OSError):
            os.write(
                2, b"\nended at once, without saving: the same command goes on from the last save\n"
            )

    def ask_to_stop(self) -> None:
        """Ask the ranks to save and leave."""
        ask(self.prepared.run, self.prepared.attempt.name, "stop")

    def stop(self) -> None:
        """Answer the first signal: ask the ranks to stop."""
        run = self.prepared.run
        self._asked_at = time.monotonic()
        try:
            self.ask_to_stop()
        except OSError:  # a full disk: a signal asks instead
            for pid in run.processes().values():
                with suppress(OSError):  # the rank has ended
                    os.kill(pid, STOP_SIGNAL)
        if not self._headless:
            with suppress(OSError):  # the terminal is closed
                os.write(2, stopping())


def _train_in_place(prepared: PreparedRun, limit: HangLimit) -> SamecurveError | None:
    """Train in this process. Returns why the run failed, if it did.

    limit: how long the run may be silent
    """
    from samecurve.watch import watched_from_outside
    from samecurve.worker.rank_main import run_rank

    run = prepared.run
    try:
        with (
            children_ended(),
            watched_from_outside(run.journal, run.logs, world_size=1, limit=limit),
        ):
            run_rank(prepared.attempt, Rank(0, 0, 1))
        return None
    except BaseException as error:
        if is_ctrl_c(error):
            raise
        from samecurve.diagnose.crash import explain
        from samecurve.diagnose.notes import note_of

        # a full disk may be what has failed; the screen shows the cause all the same
        path = run.logs / "rank-0.log"
        with suppress(OSError), open(path, "a", errors="backslashreplace") as log:
            traceback.print_exc(file=log)
        return explain([note_of(0, error, run.home)], {}, run.logs)


@contextmanager
def _environment(plan: Plan) -> Iterator[None]:
    """Set the variables that ranks inherit. Variables that the user has set stay."""
    defaults = {
        "OMP_NUM_THREADS": str(plan.compute.threads),
        "PYTHONUNBUFFERED": "1",
        "PYTHONHASHSEED": "0",
    }
    added = {name: value for name, value in defaults.items() if name not in os.environ}
    if plan.layout.devices[0].kind == "cuda":
        from samecurve.launch.gpu_settings import gpu_settings, without_user_settings
        from samecurve.probe import find_gpus

        wanted = gpu_settings(find_gpus(os.environ).vendor)
        added |= without_user_settings(wanted, os.environ)
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            os.environ.pop(name, None)
