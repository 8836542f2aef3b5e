"""One rank, from its environment to its exit: the only place where the rooms are put together.

The first rank keeps the journal, publishes checkpoints and reads requests; nowhere else does a
rank's number matter (RankContext.is_first).
"""

import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from samecurve.checkpoint.format import load
from samecurve.core.evaluation.early_stop import check_goals
from samecurve.core.events import Event
from samecurve.core.loop import LoopContext, Outcome, evaluate, train
from samecurve.core.planning.plan import Plan
from samecurve.core.protocols import (
    Checkpoint,
    Engine,
    KeepPictures,
    Rank,
    Record,
    Store,
    Task,
)
from samecurve.data.feed import Feed
from samecurve.diagnose.crash import explain
from samecurve.diagnose.memory import explain_out_of_memory
from samecurve.diagnose.notes import note_of, read_notes, write_note
from samecurve.errors import RunError, UserError
from samecurve.observe.heartbeat import Heartbeat
from samecurve.observe.journal import Journal
from samecurve.observe.pictures import keep_pictures
from samecurve.run.directory.attempt import Attempt
from samecurve.run.directory.control import ControlFile, Requests
from samecurve.run.directory.rank_logs import log_to
from samecurve.run.directory.results import write_results
from samecurve.run.directory.run_directory import Run
from samecurve.run.weights.base import base_weights
from samecurve.system import (
    LAUNCHER,
    STOP_SIGNAL,
    cache_home,
    closing_all,
    die_with,
    not_hiding,
)
from samecurve.tasks import open_task
from samecurve.worker.checkpointing import checkpoint_store, keep_assets
from samecurve.worker.cluster_env import rank_from
from samecurve.worker.context import RankContext
from samecurve.worker.data_workers import DataWorkers
from samecurve.worker.hang_responder import attending
from samecurve.worker.join import import_engine, join
from samecurve.worker.preflight import MEETING, Deadline, check_sum
from samecurve.worker.startup_timing import StartupClock, after_others, machine_load

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store as Rendezvous

# after torchrun's SIGTERM, to leave in order; it kills after 30
LEAVE_SECONDS = 20.0


def run_rank(
    attempt: Attempt,
    rank: Rank,
    *,
    rendezvous: "Rendezvous | None" = None,
    catch_stop: bool = False,
) -> Outcome:
    """Train as this rank, from joining the others to leaving them.

    rendezvous: None: from the environment.
    catch_stop: SIGTERM and SIGINT ask for a stop.
    """
    context = RankContext.read(attempt, rank)
    run, plan, config = context.run, context.plan, context.config
    clock = StartupClock()
    requests = Requests(ControlFile(run, attempt.name) if context.is_first else None)
    signal.signal(STOP_SIGNAL, lambda *_: requests.stop())
    if catch_stop:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: _stop_or_leave(requests, run, attempt))
    # no launcher that would tell of a failure
    speaks = context.is_first and (catch_stop or rank.world_size == 1)
    with attending(run.logs, rank.index):
        run.announce(rank.index)
        with clock.part("import"):
            import_engine(plan)
        meeting = Deadline(
            MEETING * plan.preflight, "meeting the other ranks", context, speaks=speaks
        )
        with clock.part("rendezvous"), meeting:
            session = join(plan, rank, rendezvous, attempt.coordinator)
        task = open_task(config, str(cache_home()))
        engine = session.make_engine(task, config.optimizer)
        if plan.preflight and plan.num_devices > 1:
            collective = Deadline(plan.preflight, "a first collective", context, speaks=speaks)
            with clock.part("preflight"), collective:
                check_sum(engine.preflight(), plan)
        outcome = train_rank(context, engine, task, requests, clock=clock)
        if outcome == "finished" and context.is_first and not attempt.evaluate:
            write_results(run, plan, config)
        session.leave()
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

    timer = threading.Timer(LEAVE_SECONDS, leave)
    timer.daemon = True
    timer.start()


def train_rank(
    context: RankContext,
    engine: Engine,
    task: Task,
    requests: Requests,
    *,
    store: Store | None = None,
    clock: StartupClock | None = None,
    as_if_split: bool = False,
) -> Outcome:
    """Feed, store and journal of one rank, and the loop over them.

    store: another than the run's own checkpoints.
    clock: of what came before.
    as_if_split: refuses what only one microbatch on one device would train.
    """
    attempt, run, plan = context.attempt, context.run, context.plan
    _check_data(task, plan)
    if not attempt.evaluate:
        check_goals(plan, task.eval_sums, task.summarize)
    saved, weights = _load_beginning(context, task)
    first_step = saved.step if saved else 0
    journal, record, keep = _begin_records(context, task, first_step)
    data_workers = _start_data_workers(context)
    feed = _make_feed(context, engine, task, data_workers, first_step=first_step)
    store = store or checkpoint_store(context, record, journal)
    heartbeat = Heartbeat(run.logs / f"heartbeat-{context.rank.index}")
    loop_context = LoopContext(
        plan=plan,
        engine=engine,
        feed=feed,
        store=store,
        record=record,
        heartbeat=heartbeat,
        requests=requests,
        summarize=task.summarize,
        keep_pictures=keep,
        lr_factor=lr_factor(task, plan),
        started={**(clock.seconds if clock else {}), **machine_load()},
        as_if_split=as_if_split,
    )
    closers = [feed.close, engine.close]
    if data_workers:
        closers.insert(0, data_workers.kill)
    if journal:
        closers.append(journal.close)
    with closing_all(*closers):
        try:
            if attempt.evaluate:
                assert saved
                return evaluate(loop_context, saved, weights)
            _, outcome = train(loop_context, saved=saved, weights=weights, stop_at=attempt.stop_at)
            return outcome
        except BaseException as error:
            reason = None
            with not_hiding(error):
                store.abandon()
                reason = _reason_of(error, context, engine, has_trained=heartbeat.trained)
            if reason:
                raise reason from error
            raise


def _load_beginning(
    context: RankContext, task: Task
) -> tuple[Checkpoint | None, Checkpoint | None]:
    """The checkpoint to go on from, and the weights to begin with, or those beneath it."""
    attempt = context.attempt
    saved = load(Path(attempt.resume)) if attempt.resume else None
    if attempt.weights:
        return saved, load(Path(attempt.weights), weights_only=True)
    return saved, base_weights(context.run, task, context.config)


def _begin_records(
    context: RankContext, task: Task, first_step: int
) -> tuple[Journal | None, Record, KeepPictures]:
    """What one rank writes for all: the task's assets, at once; then the journal and pictures."""
    if not context.is_first:
        return None, _ignore_event, _ignore_pictures
    run = context.run
    keep_assets(run, task)
    journal = Journal(run.journal)
    record: Record = journal.record
    earlier = context.attempt.earlier
    if earlier:
        record = after_others(record, earlier, resumed_at=first_step)
    return journal, record, partial(keep_pictures, run.home)


def lr_factor(task: Task, plan: Plan) -> Callable[[int], float] | None:
    """By the task's own schedule; None: the plan's holds.

    UserError: it has none at the run's last step.
    """
    factor: Callable[[int], float] | None = getattr(task, "lr_factor", None)
    if factor:
        factor(plan.schedule.steps - 1)
    return factor


def _check_data(task: Task, plan: Plan) -> None:
    """UserError: the data is not what the plan was made for."""
    if task.fingerprint() != plan.fixed.fingerprint or len(task.train_data()) != plan.samples:
        raise UserError(
            "the data of this process is not what the plan was made for: its files changed while"
            " the run was starting, or it is made of what differs from process to process: the"
            " order of a set, hash(), the time, random numbers",
            "sorted(set(...)), and random numbers from a generator of a fixed seed; if files"
            " changed, the same command again once they rest",
            "data",
        )


def _start_data_workers(context: RankContext) -> DataWorkers | None:
    """None: this process reads its data itself."""
    config, index = context.config, context.rank.index
    count = config.data.workers * len(context.plan.devices_of(index))
    if not count:
        return None
    return DataWorkers(config, count, context.run.logs / f"stack-{index}-workers.txt")


def _make_feed(
    context: RankContext,
    engine: Engine,
    task: Task,
    data_workers: DataWorkers | None,
    *,
    first_step: int,
) -> Feed[Any]:
    """The batches of this rank's devices, and what it evaluates on."""
    train_data, test = task.train_data(), task.test_data()
    evaluation = task.eval_data()
    if context.attempt.evaluate == "train":
        evaluation = train_data
    if context.attempt.evaluate == "test":
        evaluation = test
    return Feed(
        context.plan,
        context.plan.devices_of(context.rank.index),
        train_data,
        {"eval": evaluation, "test": test},
        engine.stage,
        start=first_step,
        prefetch=context.config.data.prefetch,
        workers=data_workers.workers if data_workers else None,
    )


def _reason_of(
    error: BaseException, context: RankContext, engine: Engine, *, has_trained: bool
) -> BaseException | None:
    """A better account of what ended the training; None: its own is good."""
    if isinstance(error, UserError) and has_trained:
        # nothing is refused any more: the run has failed
        return RunError(error.cause, error.remedy, error.where)
    peak_bytes = engine.peak_memory()
    return explain_out_of_memory(
        error, context.plan, rank=context.rank.index, peak_bytes=peak_bytes
    )


def _ignore_event(_: Event) -> None:
    """Only the first rank keeps the journal."""


def _ignore_pictures(_step: int, _pictures: object) -> list[str]:
    """Nor the samples."""
    return []


def run_rank_with_note(
    attempt: Attempt,
    rank: Rank,
    *,
    rendezvous: "Rendezvous | None" = None,
    catch_stop: bool = False,
) -> int:
    """run_rank(), what it prints in its log, its failure left as a note for the launcher.

    Returns the exit code.
    """
    run = Run(Path(attempt.run))
    try:
        log_to(run.logs / f"rank-{rank.index}.log", attempt.name)
        run_rank(attempt, rank, rendezvous=rendezvous, catch_stop=catch_stop)
        return 0
    except BaseException as error:
        note = note_of(rank.index, error, run.home)
        # each of the two may fail on a full disk; the other, or the exit code, remains
        with suppress(OSError):
            write_note(run.logs, attempt.name, note)
        with suppress(OSError):
            traceback.print_exc()
        return note.exit_code


def main(argument: str) -> None:
    """A rank started by our launcher: `python -m samecurve.worker.main ATTEMPT`."""
    attempt = Attempt.from_json(argument)
    die_with(int(os.environ[LAUNCHER]))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the launcher owns signals
    rank = rank_from(os.environ)
    code = run_rank_with_note(attempt, rank)
    with suppress(OSError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)  # not waiting for a collective's threads that a lost rank left hanging


if __name__ == "__main__":
    main(sys.argv[1])
