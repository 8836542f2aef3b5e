"""The ways to start a run's ranks as processes of this machine, which die with this process.

`direct` starts them by the supervisor, as `samecurve run` does. `elastic` has torch's elastic agent
start and end them, in a thread beside this one. Each returns why the ranks failed, or None.
"""

import shutil
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial

from samecurve.diagnose.crash import explain
from samecurve.diagnose.notes import note_of, read_note, read_notes
from samecurve.errors import Interrupted, RunError, SamecurveError
from samecurve.launch.script.placement import hold_port
from samecurve.launch.supervisor import (
    GroupEnd,
    RankGroup,
    RankReport,
)
from samecurve.probe import oom_kills, oom_kills_since
from samecurve.processes import Call, ForkServer, child_environment, start
from samecurve.processes.guard import OrphanGuard
from samecurve.run.directory.attempt import Attempt
from samecurve.run.directory.run_directory import Run
from samecurve.run.start_files import PreparedRun
from samecurve.watch import HangLimit
from samecurve.watch.hang_watch import OFTEN, HangWatch
from samecurve.worker.cluster_env import local_environment

# the first rank serves the rendezvous, also where this process has got another's from torch's agent
_OWN_STORE = {"TORCHELASTIC_USE_AGENT_STORE": "False"}
_GRACE = 10.0  # seconds in which torch's ranks leave by themselves after one has failed


def direct(
    prepared: PreparedRun,
    limit: HangLimit,
    *,
    port: int,
    server: ForkServer | None,
    gives_up: Callable[[], bool],
) -> SamecurveError | None:
    """Start the ranks by the supervisor, which needs no torch: importing it takes seconds.

    The first rank serves the rendezvous. gives_up: whether the ranks are to be ended, since the
    run was stopped and they have not met
    """
    ranks = _Ranks(prepared, limit)
    world_size = prepared.plan.layout.world_size
    try:
        with OrphanGuard() as guard, hold_port(port) as held_port:
            variables = [
                _OWN_STORE | local_environment(rank, world_size, held_port)
                for rank in range(world_size)
            ]
            calls = [rank_call(prepared.attempt, **of_rank) for of_rank in variables]
            group = RankGroup(
                [partial(start, call, server=server) for call in calls],
                guard=guard,
                read_report=lambda rank: read_report(prepared.run, rank),
            )

            def look(_: Mapping[int, int]) -> None:
                if not group.has_failed and (gives_up() or ranks.find_hang()):
                    group.kill()

            try:
                group.start()
                group.watch([look])
            finally:
                group.clear()
    except Exception as error:
        return ranks.explain_error(error)
    return ranks.explain_end(group.end)


def elastic(
    prepared: PreparedRun,
    limit: HangLimit,
    *,
    port: int,
    server: ForkServer | None,
    gives_up: Callable[[], bool],
) -> SamecurveError | None:
    """Start the ranks by torch's elastic agent. server: not used, since the agent starts them."""
    del server

    logs = prepared.run.logs / "elastic"

    def run() -> GroupEnd:
        import logging

        logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
        from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
        from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
        from torch.distributed.launcher.api import LaunchConfig, elastic_launch

        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=prepared.plan.layout.world_size,
            run_id=prepared.attempt.name,
            rdzv_backend="c10d",
            rdzv_endpoint=f"localhost:{port}",
            max_restarts=0,
            monitor_interval=0.1,
            logs_specs=DefaultLogsSpecs(str(logs)),  # in TMPDIR a kill would leave them
        )
        program, *arguments = rank_call(prepared.attempt).command
        try:
            elastic_launch(config, program)(*arguments)
        except ChildFailedError as error:
            return GroupEnd({rank: failure.exitcode for rank, failure in error.failures.items()})
        return GroupEnd({})

    try:
        return _run_beside(prepared, limit, run, gives_up)
    finally:
        shutil.rmtree(logs, ignore_errors=True)


def rank_call(attempt: Attempt, **variables: str) -> Call:
    """The call of a rank as a process of its own. variables: say which rank it is."""
    return Call(
        "samecurve.worker.rank_main",
        (attempt.to_json(),),
        environment=child_environment(**variables),
        new_session=True,
        unbuffered=True,
    )


def read_report(run: Run, rank: int) -> RankReport | None:
    """The failure that one of our ranks has reported; None: nothing yet."""
    note = read_note(run.logs, rank)
    return RankReport(note.exit_code, note.time) if note else None


class _Ranks:
    """Watches ranks that run as processes, and explains how they ended."""

    def __init__(self, prepared: PreparedRun, limit: HangLimit) -> None:
        self._prepared = prepared
        self._oom_kills = oom_kills()
        self.watch = HangWatch(
            prepared.run.logs,
            prepared.run.processes,
            world_size=prepared.plan.layout.world_size,
            limit=limit,
        )
        self._hang: RunError | None = None

    def find_hang(self) -> bool:
        """Whether the ranks hang. Once a hang is found, no further look takes place."""
        self._hang = self._hang or self.watch.look()
        return self._hang is not None

    def explain_error(self, error: BaseException) -> SamecurveError:
        """The failure of the launcher itself."""
        run = self._prepared.run
        return self._hang or explain([note_of(0, error, run.home)], {}, run.logs)

    def explain_end(self, end: GroupEnd) -> SamecurveError | None:
        """Why the ranks failed, if they did."""
        if self._hang or not end.failed:
            return self._hang
        logs = self._prepared.run.logs
        return explain(
            read_notes(logs, self._prepared.attempt.name),
            end.failed,
            logs,
            oom_kills=oom_kills_since(self._oom_kills),
            world_size=self._prepared.plan.layout.world_size,
            left_early=end.finished_before,
        )


def _run_beside(
    prepared: PreparedRun,
    limit: HangLimit,
    run: Callable[[], GroupEnd],
    gives_up: Callable[[], bool],
) -> SamecurveError | None:
    """Call run() in a thread, so that this thread keeps the signals and watches the ranks."""
    ranks = _Ranks(prepared, limit)
    ends: list[GroupEnd] = []
    errors: list[BaseException] = []

    def target() -> None:
        try:
            ends.append(run())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=target, name="launcher")
    thread.start()
    failed_at: float | None = None
    try:
        while thread.is_alive():
            thread.join(OFTEN)
            if failed_at is None:
                if gives_up():
                    ranks.watch.kill()
                ranks.find_hang()
                if any(prepared.run.logs.glob("failure-*.json")):
                    failed_at = time.monotonic()
            elif time.monotonic() - failed_at > _GRACE:
                ranks.watch.kill()  # stopped, or in a collective that will never end
    except Interrupted:
        ranks.watch.kill()
        raise
    return ranks.explain_error(errors[0]) if errors else ranks.explain_end(ends[0])


# devices.launcher -> its function; `spawn` is an older spelling
LAUNCHERS = {"direct": direct, "elastic": elastic, "spawn": direct}
