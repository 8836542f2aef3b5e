"""One rank, from its environment to its exit: the only place where the rooms are put together.

The first rank keeps the journal, publishes checkpoints and reads requests; nowhere else does a
rank's number matter.
"""

import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from samecurve.checkpoint.format import load
from samecurve.core.config.sections import Config
from samecurve.core.events import REQUESTS, Event
from samecurve.core.loop import Outcome, evaluate, train
from samecurve.core.planning.plan import Plan
from samecurve.core.protocols import Engine, Rank
from samecurve.data.feed import Feed
from samecurve.diagnose.crash import explain
from samecurve.diagnose.memory import explain_out_of_memory
from samecurve.diagnose.notes import note_of, read_notes, write_note
from samecurve.errors import RunError, UserError
from samecurve.observe.heartbeat import Heartbeat
from samecurve.observe.journal import Journal
from samecurve.observe.pictures import keep_pictures
from samecurve.run.attempt import Attempt
from samecurve.run.control import ControlFile
from samecurve.run.directory import Run, log_to
from samecurve.system import LAUNCHER, STOP_SIGNAL, cache_home, die_with
from samecurve.tasks import Tasks, open_task
from samecurve.worker.checkpointing import checkpoint_store, keep_assets
from samecurve.worker.cluster_env import rank_from
from samecurve.worker.data_workers import Readers
from samecurve.worker.hang_responder import attending
from samecurve.worker.join import import_engine, join
from samecurve.worker.preflight import MEETING, Deadline, check_sum
from samecurve.worker.startup_timing import StartupClock, accounted

_LAST = 20.0  # seconds after torchrun's SIGTERM in which to leave in order; it kills after 30


@dataclass
class Requests:
    """What this rank was asked: by the control file, if it reads that, and by signals."""

    control: ControlFile | None
    signalled: list[int] = field(default_factory=lambda: [0] * len(REQUESTS))

    def stop(self) -> None:
        self.signalled[REQUESTS.index("stop")] += 1

    def pending(self) -> Sequence[int]:
        counts, self.signalled = self.signalled, [0] * len(REQUESTS)
        return (
            [a + b for a, b in zip(counts, self.control.pending(), strict=True)]
            if self.control
            else counts
        )


def work(attempt: Attempt, rank: Rank, store: Any = None, catch_stop: bool = False) -> Outcome:
    """Train as this rank.

    store: of the ranks' rendezvous (None: from the environment). catch_stop: SIGTERM and SIGINT ask
    for a stop.
    """
    run = Run(Path(attempt.run))
    plan, config = run.read_plan(), run.read_config(Tasks())
    first, clock = rank.index == 0, StartupClock()
    requests = Requests(ControlFile(run, attempt.name) if first else None)
    signal.signal(STOP_SIGNAL, lambda *_: requests.stop())
    if catch_stop:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: _stop_or_leave(requests, run, attempt))
    speaks = first and (catch_stop or rank.world_size == 1)
    with attending(run.logs, rank.index):
        run.announce(rank.index)
        with clock.part("import"):
            import_engine(plan)
        with (
            clock.part("rendezvous"),
            Deadline(
                MEETING * plan.preflight,
                "meeting the other ranks",
                plan,
                run,
                attempt.name,
                rank,
                speaks,
            ),
        ):
            seat = join(plan, rank, store, attempt.coordinator)
        task = open_task(config, str(cache_home()))
        engine = seat.make_engine(task, config.optimizer)
        if plan.preflight and plan.num_devices > 1:
            with (
                clock.part("preflight"),
                Deadline(
                    plan.preflight, "a first collective", plan, run, attempt.name, rank, speaks
                ),
            ):
                check_sum(engine.preflight(), plan)
        outcome = train_rank(attempt, plan, config, rank, engine, task, requests, clock=clock)
        seat.leave()
    return outcome


def _stop_or_leave(requests: Requests, run: Run, attempt: Attempt) -> None:
    """torchrun signals a wanted stop and a lost rank alike: stop in order, and if no step ends any
    more, say why and go.
    """
    requests.stop()

    def leave() -> None:
        notes = read_notes(run.logs, attempt.name)
        if notes:
            print(f"error: {explain(notes, {}, run.logs)}", file=sys.stderr, flush=True)
        os._exit(1)

    timer = threading.Timer(_LAST, leave)
    timer.daemon = True
    timer.start()


def train_rank(
    attempt: Attempt,
    plan: Plan,
    config: Config,
    rank: Rank,
    engine: Engine,
    task: Any,
    requests: Requests,
    store: Any = None,
    clock: StartupClock | None = None,
) -> Outcome:
    """Feed, store and journal of one rank, and the loop over them.

    store: another than the run's own checkpoints. clock: of what came before.
    """
    run, first = Run(Path(attempt.run)), rank.index == 0
    if task.fingerprint() != plan.fixed.fingerprint or len(task.train_data()) != plan.samples:
        raise RunError(
            "the data changed while the run was starting: it is not what the plan was made for",
            "run the same command again, once the files rest",
            "data",
        )
    if first:
        keep_assets(run, task)
    saved = load(Path(attempt.resume)) if attempt.resume else None
    weights = load(Path(attempt.weights)) if attempt.weights else None
    devices = plan.devices_of(rank.index)
    readers = (
        Readers(
            config, config.data.workers * len(devices), run.logs / f"stack-{rank.index}-workers.txt"
        )
        if config.data.workers
        else None
    )
    held_out = task.train_data() if attempt.evaluate == "train" else task.eval_data()
    feed = Feed(
        plan,
        devices,
        task.train_data(),
        held_out,
        engine.stage,
        saved.step if saved else 0,
        config.data.prefetch,
        readers.workers if readers else None,
    )
    journal = Journal(run.journal) if first else None
    record: Callable[[Event], None] = (
        accounted(
            journal.record, clock or StartupClock(), attempt.earlier, saved.step if saved else 0
        )
        if journal
        else lambda event: None
    )
    writer = store or checkpoint_store(run, plan, config, rank, attempt, first, record, journal)
    pulse = Heartbeat(run.logs / f"pulse-{rank.index}")
    try:
        if attempt.evaluate:
            assert saved
            return evaluate(engine, feed, saved, record, task.summarize)
        _, outcome = train(
            plan,
            engine,
            feed,
            writer,
            record,
            pulse,
            requests,
            task.summarize,
            partial(keep_pictures, run.home) if first else lambda step, pictures: [],
            saved,
            attempt.stop_at,
            weights,
        )
    except BaseException as error:
        writer.abandon()
        if (
            isinstance(error, UserError) and pulse.trained
        ):  # nothing is refused any more: the run has failed
            raise RunError(error.cause, error.remedy, error.where) from error
        if short := explain_out_of_memory(error, plan, rank.index, engine.peak_memory()):
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
        with suppress(
            OSError
        ):  # each of the two may fail on a full disk; the other, or the exit code, remains
            write_note(logs, attempt.name, note)
        with suppress(OSError):
            traceback.print_exc()
        return note.exit_code


def main(argument: str) -> None:
    """A rank started by our launcher: `python -m samecurve.worker.main ATTEMPT`."""
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
