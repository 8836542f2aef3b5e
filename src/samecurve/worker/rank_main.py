"""A rank, from its environment to its exit: the only place where the rooms are put together.

The first rank keeps the journal, publishes checkpoints and reads requests. Nowhere else does a
rank's number matter (RankContext.is_first).
"""

import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from samecurve.checkpoint.format import load
from samecurve.core.evaluation import check_goals
from samecurve.core.events import stop_signals
from samecurve.core.loop import LoopContext, Outcome, evaluate, train
from samecurve.core.planning.fixed import is_same_data
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
from samecurve.core.system.cache import cache_home
from samecurve.data import held_out_data
from samecurve.data.feed import Feed
from samecurve.errors import RunError, UserError, closing_all, not_hiding
from samecurve.observe import Heartbeat, Journal
from samecurve.run.directory import Run
from samecurve.run.directory.attempt import (
    STOP_SIGNAL,
    Attempt,
    ControlFile,
    Requests,
    StartupClock,
    log_to,
    machine_load,
)
from samecurve.tasks import open_task
from samecurve.watch import announce, answering, meeting
from samecurve.worker import rank_from
from samecurve.worker.context import RankContext, checkpoint_store, keep_assets
from samecurve.worker.join import import_engine, join

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store as Rendezvous

    from samecurve.worker.data_workers import DataWorkers


def run_rank(
    attempt: Attempt,
    rank: Rank,
    *,
    rendezvous: "Rendezvous | None" = None,
    on_signal: Callable[[Requests], None] | None = None,
) -> Outcome:
    """Train as this rank, from joining the others to leaving them.

    rendezvous: where the ranks meet; None: the environment names it.
    on_signal: called for SIGTERM, SIGINT and SIGHUP, where no launcher stands beside the rank.
    """
    context = RankContext.read(attempt, rank)
    run, plan = context.run, context.plan
    clock = StartupClock()
    control = ControlFile(run, attempt.name, plan.every.save_seconds)
    requests = Requests(control if context.is_first else None)
    _hear_signals(requests, on_signal)
    # any other rank has a launcher that reports its failure
    speaks = context.is_first and (on_signal is not None or rank.world_size == 1)
    with answering(run.logs, rank.index):
        announce(run.logs, rank.index)
        with clock.part("import"):
            import_engine(plan)
        with (
            clock.part("rendezvous"),
            _meeting_limit(context, speaks=speaks),
            meeting(run.logs, rank.index),
        ):
            session = join(plan, rank, rendezvous, attempt.coordinator)
        task = open_task(context.config, str(cache_home()))
        engine = session.make_engine(task, context.config.optimizer)
        if plan.layout.preflight and plan.layout.num_devices > 1:
            from samecurve.worker.preflight import check_collective

            with clock.part("preflight"):
                check_collective(context, engine, speaks=speaks)
        outcome = train_rank(context, engine, task, requests, clock=clock)
        if outcome == "finished" and context.is_first and not attempt.evaluate:
            from samecurve.run.directory.results_file import write_results

            write_results(run, plan, context.config)
        session.leave()
    return outcome


def _hear_signals(requests: Requests, on_signal: Callable[[Requests], None] | None) -> None:
    """Take requests by signals. on_signal: as run_rank() has it"""
    signal.signal(STOP_SIGNAL, lambda *_: requests.stop())
    if on_signal is None:
        return

    def hear(number: int, _frame: object) -> None:
        requests.signal = number
        on_signal(requests)

    for number in stop_signals():
        signal.signal(number, hear)


def _meeting_limit(context: RankContext, *, speaks: bool) -> Any:
    """Limits the time in which ranks meet; does nothing for one device."""
    if context.plan.layout.num_devices == 1:
        return nullcontext()
    from samecurve.worker.preflight import meeting_limit

    return meeting_limit(context, speaks=speaks)


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
    """Put together one rank's feed, store and journal, and run the loop over them.

    store: in place of the run's own checkpoints. clock: has timed what came before.
    as_if_split: also refuse what only one microbatch on one device would train.
    """
    attempt, run, plan = context.attempt, context.run, context.plan
    _check_data(task, plan)
    if not attempt.evaluate:
        check_goals(plan.goals if plan.data.eval_samples else (), task.eval_sums, task.summarize)
    saved, weights = _load_beginning(context, task)
    first_step = saved.step if saved else 0
    journal, record = _begin_journal(context, task, first_step)
    data_workers = _start_data_workers(context)
    feed = _make_feed(context, engine, task, data_workers, first_step=first_step)
    store = store or checkpoint_store(context, record, journal, requests)
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
        keep_pictures=_keep_pictures(context),
        lr_factor=lr_factor(task, plan),
        started={**(clock.seconds if clock else {}), **machine_load()},
        as_if_split=as_if_split,
    )
    closers = [feed.close, engine.close, *([journal.close] if journal else [])]
    if data_workers:
        closers.insert(0, data_workers.kill)
    with closing_all(*closers), _explained(context, engine, store, heartbeat):
        if not _prepare_data(context, task, requests, loop=loop_context, step=first_step):
            return "stopped"
        if attempt.evaluate:
            assert saved
            return evaluate(loop_context, saved, weights)
        return train(loop_context, saved=saved, weights=weights, stop_at=attempt.stop_at)[1]


def _prepare_data(
    context: RankContext,
    task: Task,
    requests: Requests,
    *,
    loop: LoopContext[Any, Any],
    step: int,
) -> bool:
    """Have the task's files made, if it has any. False: somebody asked for a stop meanwhile.

    UserError: rows that are read from these files change when they are read again.
    """
    if not task.prepare:
        return True
    from samecurve.worker.prepare_data import prepare_data

    is_ready = prepare_data(
        context,
        task,
        loop.engine,
        requests,
        record=loop.record,
        heartbeat=loop.heartbeat,
        step=step,
    )
    if is_ready:
        task.check_rows()
    return is_ready


@contextmanager
def _explained(
    context: RankContext, engine: Engine, store: Store, heartbeat: Heartbeat
) -> Iterator[None]:
    """End the store if the block fails, and raise a better explanation, where there is one."""
    try:
        yield
    except BaseException as error:
        reason = None
        with not_hiding(error):
            store.abandon()
            reason = _reason_of(error, context, engine, heartbeat)
        if reason:
            raise reason from error
        raise


def _load_beginning(
    context: RankContext, task: Task
) -> tuple[Checkpoint | None, Checkpoint | None]:
    """Load the checkpoint to go on from, and the weights to begin with.

    Where the run trains something small on a frozen base, the weights are the base's, with the
    adapter that the run begins with, if there is one.
    """
    attempt = context.attempt
    saved = load(Path(attempt.resume)) if attempt.resume else None
    first = load(Path(attempt.weights), weights_only=True) if attempt.weights else None
    if not context.run.base.is_file():
        return saved, first
    from samecurve.run.weights.base_arrays import base_weights, with_adapter

    base = base_weights(context.run, task, context.config)
    return saved, base if base is None or first is None else with_adapter(base, first)


def _begin_journal(
    context: RankContext, task: Task, first_step: int
) -> tuple[Journal | None, Record]:
    """Open the journal, and copy the task's assets. Only the first rank does so, for all."""
    if not context.is_first:
        return None, lambda _: None  # the first rank keeps the journal
    keep_assets(context.run, task)
    journal = Journal(context.run.journal)
    earlier = context.attempt.earlier
    if not earlier:
        return journal, journal.record
    from samecurve.run.directory.attempt import after_others

    return journal, after_others(journal.record, earlier, resumed_at=first_step)


def _keep_pictures(context: RankContext) -> KeepPictures:
    """A function that puts the task's pictures into the run's directory, for the first rank."""

    def keep(step: int, pictures: Any) -> list[str]:
        if not context.is_first or not pictures:
            return []
        from samecurve.observe.pictures import keep_pictures

        return keep_pictures(context.run.home, step, pictures)

    return keep


def lr_factor(task: Task, plan: Plan) -> Callable[[int], float] | None:
    """The learning rate's factor by step, where the task has a schedule; None: the plan's holds.

    UserError: the task's schedule has no value at the run's last step.
    """
    factor = task.lr_factor
    if factor:
        factor(plan.schedule.steps - 1)
    return factor


def _check_data(task: Task, plan: Plan) -> None:
    """Compare the data with the plan's. UserError: the plan was made for other data."""
    is_same = is_same_data(plan.fixed.fingerprint, task.fingerprint())
    if not is_same or len(task.train_data()) != plan.data.samples:
        raise UserError(
            "the data of this process is not what the plan was made for: its files changed while"
            " the run was starting, or it is made of what differs from process to process: the"
            " order of a set, hash(), the time, random numbers",
            "sorted(set(...)), and random numbers from a generator of a fixed seed; if files"
            " changed, the same command again once they rest",
            "data",
        )


def _start_data_workers(context: RankContext) -> "DataWorkers | None":
    """Start the rank's data workers; None: this process reads its data itself."""
    config, index = context.config, context.rank.index
    count = config.data.workers * len(context.plan.layout.devices_of(index))
    if not count:
        return None
    from samecurve.worker.data_workers import DataWorkers

    stacks = context.run.logs / f"stack-{index}-workers.txt"
    return DataWorkers(config, count, stacks, context.attempt.evaluate)


def _make_feed(
    context: RankContext,
    engine: Engine,
    task: Task,
    data_workers: "DataWorkers | None",
    *,
    first_step: int,
) -> Feed[Any]:
    """The batches of this rank's devices, and what it evaluates on."""
    return Feed(
        context.plan,
        context.plan.layout.devices_of(context.rank.index),
        task.train_data(),
        held_out_data(task, context.attempt.evaluate),
        engine.stage,
        start=first_step,
        prefetch=context.config.data.prefetch,
        workers=data_workers.workers if data_workers else None,
    )


def _reason_of(
    error: BaseException, context: RankContext, engine: Engine, heartbeat: Heartbeat
) -> BaseException | None:
    """A better explanation of what ended the training; None: the error's own is good."""
    from samecurve.diagnose.kernels import explain_nondeterministic

    refused = explain_nondeterministic(error, context.plan)
    error = refused or error
    if isinstance(error, UserError) and heartbeat.trained:
        # no longer a refusal: the run has failed
        return RunError(error.cause, error.remedy, error.where)
    if refused:
        return refused
    from samecurve.diagnose.memory import explain_out_of_memory

    return explain_out_of_memory(
        error,
        context.plan,
        rank=context.rank.index,
        peak_bytes=engine.peak_memory(),
        activity=heartbeat.activity,
    )


def run_rank_with_note(
    attempt: Attempt,
    rank: Rank,
    *,
    rendezvous: "Rendezvous | None" = None,
    on_signal: Callable[[Requests], None] | None = None,
) -> tuple[int, Outcome | None]:
    """Do run_rank(), with its output in the rank's log and its failure in a note to the launcher.

    Returns the exit code, and how the training ended.
    """
    # now: where a library opens too many files, nothing more can be imported
    from samecurve.diagnose.notes import note_of, write_note

    run = Run(Path(attempt.run))
    try:
        log_to(run.logs / f"rank-{rank.index}.log", attempt.name)
        return 0, run_rank(attempt, rank, rendezvous=rendezvous, on_signal=on_signal)
    except BaseException as error:
        note = note_of(rank.index, error, run.home)
        # on a full disk each of the two may fail; the other, or the exit code, remains
        with suppress(OSError):
            write_note(run.logs, attempt.name, note)
        with suppress(OSError):
            traceback.print_exc()
        return note.exit_code, None


def main(argument: str) -> None:
    """Be a rank that our launcher started."""
    from samecurve.core.system.process_name import name_rank

    attempt = Attempt.from_json(argument)
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # the launcher owns signals
    rank = rank_from(os.environ)
    name_rank(rank.index)
    code, _ = run_rank_with_note(attempt, rank)
    with suppress(OSError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)  # does not wait for threads of a collective that a lost rank left hanging
