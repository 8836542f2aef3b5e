"""This process as a rank that torchrun, Slurm or the user started."""

import json
import os
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from samecurve.core.config.loading import LoadedConfig
from samecurve.core.loop import Outcome
from samecurve.core.planning.facts import Measure
from samecurve.core.protocols import Rank
from samecurve.core.system.process_name import name_rank
from samecurve.diagnose.crash import explain
from samecurve.diagnose.notes import FailureNote, note_of, read_notes
from samecurve.errors import START_AGAIN, SamecurveError, UserError, not_hiding
from samecurve.launch import Signals, kill_children, stopping
from samecurve.launch.agent_words import code_after, end_for_good, goes_on, judge
from samecurve.launch.last_line import repeat_after_torchrun
from samecurve.launch.local import is_refusal, with_mirror
from samecurve.launch.monitors import done_line, mirrored, tracked, watched
from samecurve.launch.network import interface_towards, resolve, use_interface
from samecurve.launch.prepare_external import prepare_external, take_back
from samecurve.launch.rank_agreement import check_ranks_agree, report_config
from samecurve.launch.ranks import rank_call, read_report
from samecurve.launch.shared_directory import SHARED, answer_shared, check_shared
from samecurve.launch.supervisor import RankGroup
from samecurve.observe.console import make_view, show_journal
from samecurve.observe.failed_event import record_failure
from samecurve.probe import oom_kills, oom_kills_since
from samecurve.processes import how_ended, start_process
from samecurve.processes.orphan_guard import OrphanGuard
from samecurve.run.directory import Run
from samecurve.run.directory.attempt import STOP_SIGNAL, Attempt, Requests, ask
from samecurve.run.preconditions import remove_refused
from samecurve.run.resume import Options
from samecurve.run.start_files import PreparedRun
from samecurve.terminal import echo
from samecurve.watch import HangLimit, watched_from_outside
from samecurve.worker import is_first, is_first_of_host, leave_seconds
from samecurve.worker.meeting import Meeting, hear, rendezvous_of
from samecurve.worker.rank_main import run_rank, run_rank_with_note

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store


class ReadConfig(Protocol):
    """Reads the config. loud: notes about it are printed."""

    def __call__(self, *, loud: bool) -> LoadedConfig: ...


_DECISION = "samecurve/word"  # the first rank's message to the others: what to do
_READ = "samecurve/read"  # how many ranks have read the message
# seconds to prepare the run: a large corpus takes long; torchrun ends the others if the first dies
_PREPARED = 7 * 86_400.0
_TRACKERS = 10.0  # seconds for trackers to take the rest, within what torchrun leaves
_LEAVE_SECONDS = 20.0  # to hear that there is nothing to do
_OTHERS = 1.0  # seconds in which ranks that failed first have left their notes


def run_as_external_rank(
    rank: Rank, read: ReadConfig, options: Options, *, measure: Measure, headless: bool
) -> int:
    """Be a rank that torchrun, Slurm or the user started.

    The first rank prepares the run, tells the others, and reports for all.

    measure: measures what the plan goes by

    Returns the exit code.
    """
    try:
        return _take_part(rank, read, options, measure, headless=headless)
    except SamecurveError as error:
        judge(error, None, None)
        raise


def _take_part(
    rank: Rank, read: ReadConfig, options: Options, measure: Measure, *, headless: bool
) -> int:
    name_rank(rank.index)
    leave_seconds(os.environ)  # a wrong one is refused before it is needed
    os.environ.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")  # the probe counts GPUs in this order
    if rank.hosts > 1:
        use_interface(interface_towards(resolve(os.environ["MASTER_ADDR"])), os.environ)
    meeting = Meeting(rank)
    if not is_first(rank):
        store = meeting.join()
        report_config(store, rank, lambda: read(loud=False), _DECISION)
        return follow_leader(rank, store)
    came: Store | None = None
    try:
        loaded = read(loud=True)
        came = store = meeting.join()
        cores = check_ranks_agree(store, rank, loaded)
        prepared = prepare_external(loaded, rank, options, measure, cores)
        if rank.hosts > 1 and not prepared.done:
            _share_directory(store, rank, prepared)
    except BaseException as error:
        code = error.exit_code if isinstance(error, SamecurveError) else 1
        with not_hiding(error):
            _dismiss_others(came or meeting.join(_LEAVE_SECONDS), rank, code)
        raise
    if prepared.done:
        _dismiss_others(store, rank, 0)
        echo(done_line(prepared), err=headless)
        return 0
    store.set(_DECISION, json.dumps({"attempt": prepared.attempt.to_json()}))
    limit = HangLimit(loaded.config.devices.hang_floor)
    return _lead(prepared, rank, rendezvous_of(store), limit=limit, headless=headless)


def _share_directory(store: "Store", rank: Rank, prepared: PreparedRun) -> None:
    """Check that every host sees the run's directory. UserError: one does not."""
    try:
        check_shared(store, rank, prepared.run)
    except UserError as error:
        with not_hiding(error):
            take_back(prepared)
        raise


def _lead(
    prepared: PreparedRun, rank: Rank, rendezvous: "Store", *, limit: HangLimit, headless: bool
) -> int:
    """Train as the first rank, and show what the run does. SamecurveError: why the run failed."""
    run, plan, attempt = prepared.run, prepared.plan, prepared.attempt
    notes: list[FailureNote] = []
    exit_codes: dict[int, int] = {}
    signals: list[int] = []  # those that asked for a stop
    outcome: Outcome | None = None

    def stop(requests: Requests) -> None:
        signals.append(requests.signal or 0)
        _stop_or_leave(run, attempt, requests)

    oom_kills_before = oom_kills()
    view = make_view(plan, run.home, headless=headless)
    with (
        show_journal(view, run.journal, prepared.journal_start),
        mirrored(prepared, partial(ask, run, attempt.name, "stop")) as mirror,
        tracked(run, prepared.track, _TRACKERS),
        watched(run, plan, prepared.track.sensors_every),
        watched_from_outside(run.journal, run.logs, world_size=plan.layout.world_size, limit=limit),
    ):
        try:
            code = 0
            if attempt.coordinator:
                code, stop_signals = _run_child(attempt, rank)
                signals += stop_signals if code == 0 else ()
            else:
                outcome = run_rank(attempt, rank, rendezvous=rendezvous, on_signal=stop)
            if signals:
                repeat_after_torchrun(f"saved  {run.home}; the same command goes on from there")
            elif goes_on(run, attempt, outcome):
                echo("a host has left; the others go on from what was saved", err=True)
                return START_AGAIN
            exit_codes = {rank.index: code}
        except BaseException as error:
            code, notes = 1, [note_of(rank.index, error, run.home)]
    if code == 0:
        failure = with_mirror(None, mirror, run)
        if failure is None:
            return _code_of_stop(signals, outcome)
        raise failure
    time.sleep(_OTHERS)
    notes = sorted([*read_notes(run.logs, attempt.name), *notes], key=lambda note: note.time)
    kills = oom_kills_since(oom_kills_before)
    failure = explain(notes, exit_codes, run.logs, oom_kills=kills)
    failure = with_mirror(failure, mirror, run) or failure
    raise _recorded(prepared, failure)


def _recorded(prepared: PreparedRun, failure: SamecurveError) -> SamecurveError:
    """The failure, once it is in the run's files and its agent knows."""
    run = prepared.run
    record_failure(run.journal, run.logs, failure)
    judge(failure, run, prepared.attempt)
    if is_refusal(prepared, failure):
        with not_hiding(failure):
            remove_refused(run)
    return failure


def _code_of_stop(signals: Sequence[int], outcome: Outcome | None) -> int:
    """The exit code of a run that did not fail: 128 + the signal that has stopped it.

    torchrun would start a rank again that leaves with another code than 0.
    """
    if not signals or outcome == "finished" or "TORCHELASTIC_RUN_ID" in os.environ:
        return 0
    return 128 + signals[0]


def _stop_or_leave(run: Run, attempt: Attempt, requests: Requests) -> None:
    """Ask for a stop. If no step ends any more, say why and leave.

    torchrun sends the same signal for a stop that somebody wants and for a rank that is lost.
    """
    requests.stop()

    def leave() -> None:
        notes = read_notes(run.logs, attempt.name)
        if notes:
            echo(f"error: {explain(notes, {}, run.logs)}", err=True)
        os._exit(1)

    timer = threading.Timer(leave_seconds(os.environ), leave)
    timer.daemon = True
    timer.start()


def follow_leader(rank: Rank, store: "Store") -> int:
    """Do what the first rank has decided, as another rank. Returns the exit code."""
    stands_for_host = rank.hosts > 1 and is_first_of_host(rank)
    topics = [SHARED, _DECISION] if stands_for_host else [_DECISION]
    topic, decision = hear(store, rank, topics, _PREPARED)
    if topic == SHARED:
        answer_shared(store, rank, decision)
        _, decision = hear(store, rank, [_DECISION], _PREPARED)
    store.add(_READ, 1)
    if "leave" in decision:
        return end_for_good(int(decision["leave"]))
    attempt = Attempt.from_json(decision["attempt"])
    if stands_for_host:
        echo(
            f"rank {rank.index} of {rank.world_size} trains in {attempt.run}; the first host shows"
            " how it goes"
        )
    if attempt.coordinator:
        return _follow_in_child(attempt, rank, store)
    run, stop_asked = Run(Path(attempt.run)), threading.Event()

    def stop(requests: Requests) -> None:
        stop_asked.set()
        _stop_or_leave(run, attempt, requests)

    code, outcome = run_rank_with_note(
        attempt, rank, rendezvous=rendezvous_of(store), on_signal=stop
    )
    if not stop_asked.is_set() and goes_on(run, attempt, outcome):
        code = START_AGAIN
    elif code:
        code = code_after(code, run, attempt, store)
    os._exit(code)  # does not wait for a collective that a lost rank left hanging


def _run_child(attempt: Attempt, rank: Rank) -> tuple[int, Sequence[int]]:
    """Run the rank that the environment describes in a child process.

    jax may abort the child when a peer is lost; this process then reports the failure.

    Returns the child's exit code, negative for a signal that ended it, and the signals that asked
    for a stop.
    """
    run = Run(Path(attempt.run))
    with OrphanGuard() as orphans:
        group = RankGroup(
            [partial(start_process, rank_call(attempt))],
            orphans=orphans,
            read_report=lambda _: read_report(run, rank.index),
        )

        def stop() -> None:
            group.send(STOP_SIGNAL)
            if is_first_of_host(rank):  # once on each terminal
                with suppress(OSError):  # the terminal is closed
                    os.write(2, stopping())

        with Signals(stop, kill_children) as signals:
            try:
                group.start()
                group.watch()
            finally:
                group.clear()
    return group.exit_codes[0], (signals.received,) if signals.received else ()


def _follow_in_child(attempt: Attempt, rank: Rank, store: "Store") -> int:
    """Run a rank that is not the first in a child process. Returns the exit code.

    A failure is mentioned on its terminal; the first rank's terminal says what has failed.
    """
    code, signals = _run_child(attempt, rank)
    if code == 0:
        return _code_of_stop(signals, None)
    run = Run(Path(attempt.run))
    if code < 128:
        log = run.logs / f"rank-{rank.index}.log"
        echo(
            f"error: rank {rank.index} left with {how_ended(code)}\n"
            f"  remedy: the first host's terminal says why; {log} has more",
            err=True,
        )
    return code_after(START_AGAIN if code < 0 else code, run, attempt, store)


def _dismiss_others(store: "Store", rank: Rank, code: int) -> None:
    """Have the other ranks leave with this exit code.

    This process may serve the store, so it waits until they have read the message.
    """
    store.set(_DECISION, json.dumps({"leave": code}))
    until = time.monotonic() + _LEAVE_SECONDS
    while store.add(_READ, 0) < rank.world_size - 1 and time.monotonic() < until:
        time.sleep(0.05)
