"""One rank, from its environment to its exit: the only place where the rooms are put together.

The first rank keeps the journal, publishes checkpoints and reads requests; nowhere else does a rank's number matter.
"""

import json
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from lockstep.checkpoint.format import load
from lockstep.core.config import Config, Loaded
from lockstep.core.events import REQUESTS, Event
from lockstep.core.loop import Outcome, evaluate, train
from lockstep.core.plan import Plan
from lockstep.core.protocols import Engine, Rank
from lockstep.data.feed import Feed
from lockstep.diagnose.crash import explain
from lockstep.diagnose.memory import out_of_memory
from lockstep.diagnose.notes import Note, note_of, read_notes, write_note
from lockstep.errors import LockstepError, RunError, UserError
from lockstep.launch.cluster import meet, rank_from
from lockstep.launch.describe import cache_home, die_with
from lockstep.launch.engines import import_engine, take_seat
from lockstep.launch.files import Attempt, ControlFile, Run, log_to
from lockstep.launch.given import given
from lockstep.launch.hanging import Hangs, overseen
from lockstep.launch.preflight import MEETING, Deadline, check_sum, left_hanging, record_failure
from lockstep.launch.prepare import Options, Prepared, done_line
from lockstep.launch.reading import Readers
from lockstep.launch.same import answer, compare
from lockstep.launch.saving import checkpoint_store, keep_assets
from lockstep.launch.signals import LAUNCHER, STOP_SIGNAL, run_child
from lockstep.launch.starts import Clock, accounted
from lockstep.launch.watching import tracked, watched
from lockstep.launch.witness import attending
from lockstep.observe.console import showing, view
from lockstep.observe.journal import Journal
from lockstep.observe.pulse import Pulse
from lockstep.probe.cpu import oom_kills, starved_since
from lockstep.tasks import Tasks, open_task

_WORD = "lockstep/word"  # from the first rank to the others, before they start
_READ = "lockstep/read"  # how many have read it
_PREPARED = 7 * 86_400.0  # seconds; a large corpus takes its time; torchrun ends the others if the first rank dies
_LAST = 20.0  # seconds after torchrun's SIGTERM in which to leave in order; it kills after 30
_REST = 10.0  # seconds for trackers to take the rest, within what torchrun leaves
_OTHERS = 1.0  # seconds in which ranks that failed first have left their notes


@dataclass
class Requests:
    """What this rank was asked: by the control file, if it reads that, and by signals."""

    control: ControlFile | None
    signalled: list[int] = field(default_factory=lambda: [0] * len(REQUESTS))

    def stop(self) -> None:
        self.signalled[REQUESTS.index("stop")] += 1

    def pending(self) -> Sequence[int]:
        counts, self.signalled = self.signalled, [0] * len(REQUESTS)
        return [a + b for a, b in zip(counts, self.control.pending(), strict=True)] if self.control else counts


def work(attempt: Attempt, rank: Rank, store: Any = None, catch_stop: bool = False) -> Outcome:
    """Train as this rank. store: of the ranks' rendezvous (None: from the environment). catch_stop: SIGTERM and SIGINT ask for a stop."""
    run = Run(Path(attempt.run))
    plan, config = run.read_plan(), run.read_config(Tasks())
    first, clock = rank.index == 0, Clock()
    requests = Requests(ControlFile(run, attempt.name) if first else None)
    signal.signal(STOP_SIGNAL, lambda *_: requests.stop())
    if catch_stop:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: _stop_or_leave(requests, run, attempt))
    speaks = first and (catch_stop or rank.world == 1)
    with attending(run.logs, rank.index):
        run.announce(rank.index)
        with clock.part("import"):
            import_engine(plan)
        with clock.part("rendezvous"), Deadline(MEETING * plan.preflight, "meeting the other ranks", plan, run, attempt.name, rank, speaks):
            seat = take_seat(plan, rank, store, attempt.coordinator)
        task = open_task(config, str(cache_home()))
        engine = seat.engine(task, config.optimizer)
        if plan.preflight and plan.world > 1:
            with clock.part("preflight"), Deadline(plan.preflight, "a first collective", plan, run, attempt.name, rank, speaks):
                check_sum(engine.preflight(), plan)
        outcome = train_rank(attempt, plan, config, rank, engine, task, requests, clock=clock)
        seat.leave()
    return outcome


def _stop_or_leave(requests: Requests, run: Run, attempt: Attempt) -> None:
    """torchrun signals a wanted stop and a lost rank alike: stop in order, and if no step ends any more, say why and go."""
    requests.stop()

    def leave() -> None:
        notes = read_notes(run.logs, attempt.name)
        if notes:
            print(f"error: {explain(notes, {}, run.logs)}", file=sys.stderr, flush=True)
        os._exit(1)

    timer = threading.Timer(_LAST, leave)
    timer.daemon = True
    timer.start()


def train_rank(attempt: Attempt, plan: Plan, config: Config, rank: Rank, engine: Engine, task: Any, requests: Requests, store: Any = None, clock: Clock | None = None) -> Outcome:
    """Feed, store and journal of one rank, and the loop over them. store: another than the run's own checkpoints. clock: of what came before."""
    run, first = Run(Path(attempt.run)), rank.index == 0
    if task.fingerprint() != plan.fixed.fingerprint or len(task.train_data()) != plan.samples:
        raise RunError("the data changed while the run was starting: it is not what the plan was made for", "run the same command again, once the files rest", "data")
    if first:
        keep_assets(run, task)
    saved = load(Path(attempt.resume)) if attempt.resume else None
    weights = load(Path(attempt.weights)) if attempt.weights else None
    devices = plan.held_by(rank.index)
    readers = Readers(config, config.data.workers * len(devices), run.logs / f"stack-{rank.index}-workers.txt") if config.data.workers else None
    held_out = task.train_data() if attempt.evaluate == "train" else task.eval_data()
    feed = Feed(plan, devices, task.train_data(), held_out, engine.stage, saved.step if saved else 0, config.data.prefetch, readers.workers if readers else None)
    journal = Journal(run.journal) if first else None
    record: Callable[[Event], None] = accounted(journal.record, clock or Clock(), attempt.earlier, saved.step if saved else 0) if journal else lambda event: None
    writer = store or checkpoint_store(run, plan, config, rank, attempt, first, record, journal)
    pulse = Pulse(run.logs / f"pulse-{rank.index}")
    try:
        if attempt.evaluate:
            assert saved
            return evaluate(engine, feed, saved, record, task.summarize)
        _, outcome = train(plan, engine, feed, writer, record, pulse, requests, task.summarize, saved, attempt.stop_at, weights)
    except BaseException as error:
        writer.abandon()
        if isinstance(error, UserError) and pulse.trained:  # nothing is refused any more: the run has failed
            raise RunError(error.cause, error.remedy, error.where) from error
        if short := out_of_memory(error, plan, rank.index, engine.peak_memory()):
            raise short from error
        raise
    finally:
        if readers:
            readers.kill()
        feed.close()
        engine.close()
        if journal:
            journal.close()
    return outcome


def guarded(attempt: Attempt, rank: Rank, **how: Any) -> int:
    """work(), its failure left as a note for the launcher. Returns the exit code."""
    logs = Run(Path(attempt.run)).logs
    try:
        work(attempt, rank, **how)
        return 0
    except BaseException as error:
        note = note_of(rank.index, error)
        with suppress(OSError):  # each of the two may fail on a full disk; the other, or the exit code, remains
            write_note(logs, attempt.name, note)
        with suppress(OSError):
            traceback.print_exc()
        return note.exit_code


def joined(rank: Rank, read: Callable[[bool], Loaded], options: Options, headless: bool) -> int:
    """This process as a rank that torchrun, Slurm or the user started. The first rank prepares the run, tells the others, and speaks for all. read: the config, saying what is to be said or not. Returns the exit code."""
    os.environ.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")  # as the probe counts
    store, ranks = meet(serves=rank.index == 0)
    if rank.index:
        answer(store, rank, lambda: read(False), _WORD)
        return _told(rank, store, ranks)
    try:
        loaded = read(True)
        compare(store, rank, loaded)
        prepared = given(loaded, rank, options)
    except BaseException as error:
        _tell(store, rank, {"leave": error.exit_code if isinstance(error, LockstepError) else 1})
        raise
    if prepared.done:
        _tell(store, rank, {"leave": 0})
        print(done_line(prepared), file=sys.stderr if headless else sys.stdout)
        return 0
    store.set(_WORD, json.dumps({"attempt": asdict(prepared.attempt)}))
    return _led(prepared, loaded.config.devices.hang_floor, rank, ranks, headless)


def _led(prepared: Prepared, hang_floor: float, rank: Rank, ranks: Any, headless: bool) -> int:
    """The first rank trains, and shows what the run does. LockstepError: why it failed."""
    own: list[Note] = []
    exits: dict[int, int] = {}
    run, every, starved = prepared.run, prepared.track.sensors_every, oom_kills()
    watch = overseen(Hangs(run.logs, run.processes, prepared.plan.processes, hang_floor), lambda error: left_hanging(run, error))
    with showing(view(prepared.plan, run.home, headless), run.journal, prepared.begin), tracked(run, prepared.track, _REST), watched(run, prepared.plan, every), watch:
        try:
            if not prepared.attempt.coordinator:
                work(prepared.attempt, rank, store=ranks, catch_stop=True)
                return 0
            code = run_child(prepared.attempt)
            if code == 0 or code > 128:
                return code
            exits = {rank.index: code}
        except BaseException as error:
            own = [note_of(rank.index, error)]
    time.sleep(_OTHERS)
    failure = explain(sorted([*read_notes(prepared.run.logs, prepared.attempt.name), *own], key=lambda note: note.time), exits, prepared.run.logs, starved=starved_since(starved))
    record_failure(prepared.run, failure)
    raise failure


def _told(rank: Rank, store: Any, ranks: Any) -> int:
    """Another rank does what the first one says."""
    until = time.monotonic() + _PREPARED
    while not store.check([_WORD]):
        time.sleep(0.1)
        if time.monotonic() > until:
            raise RunError("the first rank never said what to do", "its terminal or log says why", "--rdzv", again=True)
    word = json.loads(store.get(_WORD))
    store.add(_READ, 1)
    if "leave" in word:
        return int(word["leave"])
    attempt = Attempt.from_values(word["attempt"])
    if rank.hosts > 1 and not rank.local:
        print(f"rank {rank.index} of {rank.world} trains in {attempt.run}; the first host shows how it goes", flush=True)
    if attempt.coordinator:
        return _followed(run_child(attempt), rank, attempt)
    log_to(Run(Path(attempt.run)).logs / f"rank-{rank.index}.log", attempt.name)
    code = guarded(attempt, rank, store=ranks, catch_stop=True)
    os._exit(code)  # not waiting for a collective that a lost rank left hanging


def _followed(code: int, rank: Rank, attempt: Attempt) -> int:
    """The exit code of a rank that is not the first. The first one's terminal says what failed; this one's, that something did."""
    if code and code < 128:
        logs = Run(Path(attempt.run)).logs
        how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        print(f"error: rank {rank.index} left with {how}\n  remedy: the first host's terminal says why; {logs / f'rank-{rank.index}.log'} has more", file=sys.stderr)
    return 1 if code < 0 else code


def _tell(store: Any, rank: Rank, word: dict[str, Any]) -> None:
    """The last word to the others. The store may live in this process: it stays until they have read it."""
    store.set(_WORD, json.dumps(word))
    until = time.monotonic() + _LAST
    while store.add(_READ, 0) < rank.world - 1 and time.monotonic() < until:
        time.sleep(0.05)


def main(argument: str) -> None:
    """A rank started by our launcher: `python -m lockstep.launch.worker ATTEMPT`."""
    attempt = Attempt.from_json(argument)
    die_with(int(os.environ[LAUNCHER]))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the launcher owns signals
    rank = rank_from(os.environ)
    log_to(Run(Path(attempt.run)).logs / f"rank-{rank.index}.log", attempt.name)
    code = guarded(attempt, rank)
    with suppress(OSError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)  # not waiting for a collective's threads that a lost rank left hanging


if __name__ == "__main__":
    main(sys.argv[1])
