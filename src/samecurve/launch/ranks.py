"""The ranks of a run as processes of this machine, which the supervisor starts and watches."""

from collections.abc import Callable, Mapping
from functools import partial

from samecurve.diagnose.crash import explain
from samecurve.diagnose.notes import note_of, read_note, read_notes
from samecurve.errors import RunError, SamecurveError
from samecurve.launch.script.placement import hold_port
from samecurve.launch.supervisor import GroupEnd, RankGroup, RankReport
from samecurve.probe import oom_kills, oom_kills_since
from samecurve.processes import Call, ForkServer, child_environment, start_process
from samecurve.processes.orphan_guard import OrphanGuard
from samecurve.run.directory import Run
from samecurve.run.directory.attempt import Attempt
from samecurve.run.start_files import PreparedRun
from samecurve.watch import HangLimit
from samecurve.watch.hang_watch import HangWatch
from samecurve.worker import local_environment

# the first rank serves the rendezvous, also where this process has got another's from torch's agent
_OWN_STORE = {"TORCHELASTIC_USE_AGENT_STORE": "False"}


def train_by_ranks(
    prepared: PreparedRun,
    limit: HangLimit,
    *,
    port: int,
    server: ForkServer | None,
    gives_up: Callable[[], bool],
) -> SamecurveError | None:
    """Start the ranks, and wait for their end. Returns why they failed; None: they did not.

    No torch is imported here, which takes seconds: the first rank serves the rendezvous.

    gives_up: whether the ranks are to be ended, since the run was stopped and they have not met
    """
    run, world_size = prepared.run, prepared.plan.layout.world_size
    oom_kills_before = oom_kills()
    watch = HangWatch(run.logs, run.processes, world_size=world_size, limit=limit)
    hang: RunError | None = None

    def look(_: Mapping[int, int]) -> None:
        nonlocal hang
        if group.has_failed:
            return
        if not gives_up():
            hang = hang or watch.look()
            if hang is None:
                return
        group.kill()

    try:
        with OrphanGuard() as orphans, hold_port(port) as held_port:
            calls = _rank_calls(prepared.attempt, world_size, held_port)
            starts = [partial(start_process, call, server=server) for call in calls]
            group = RankGroup(starts, orphans=orphans, read_report=partial(read_report, run))
            try:
                group.start()
                group.watch([look])
            finally:
                group.clear()
    except Exception as error:  # of this process itself
        return hang or explain([note_of(0, error, run.home)], {}, run.logs)
    if hang or not group.end.failed:
        return hang
    return _explained(prepared, group.end, oom_kills_since(oom_kills_before))


def _explained(prepared: PreparedRun, end: GroupEnd, kills: int | None) -> SamecurveError:
    """Why ranks have failed. kills: by the system's out-of-memory killer; None: not known"""
    logs = prepared.run.logs
    return explain(
        read_notes(logs, prepared.attempt.name),
        end.failed,
        logs,
        oom_kills=kills,
        world_size=prepared.plan.layout.world_size,
        left_early=end.finished_before,
    )


def _rank_calls(attempt: Attempt, world_size: int, port: int) -> list[Call]:
    of_ranks = [local_environment(rank, world_size, port) for rank in range(world_size)]
    return [rank_call(attempt, **(_OWN_STORE | variables)) for variables in of_ranks]


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
