"""The only training loop.

Tasks, engines, strategies and observers plug into it; none has a loop of its own.

The metrics of a step that is queued on a device are read after the next one is queued, so that the
host never holds a device up. Whatever all ranks must agree on comes from those metrics, which are
the same on every rank; a rank that is alone does at once what it is asked.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any, Generic, Literal, TypeVar, overload

from samecurve.core.evaluation import JournalMetric, Summarize, journal_value, metric_of
from samecurve.core.events import REQUESTS, Event
from samecurve.core.feature_list import hooks_of
from samecurve.core.planning.plan import Plan
from samecurve.core.planning.schedule import Rates
from samecurve.core.protocols import (
    TASK_STATE,
    Checkpoint,
    Counters,
    Engine,
    Feed,
    Heartbeat,
    Held,
    KeepPictures,
    Record,
    Requests,
    Staged,
    State,
    Store,
)
from samecurve.core.step_logger import StepLogger, requests_in
from samecurve.units import join_words

Outcome = Literal["finished", "stopped"]
T = TypeVar("T")
_UNASKED = (0,) * len(REQUESTS)


@dataclass(frozen=True, kw_only=True)
class LoopContext(Generic[State, Staged]):
    """The parts that plug into the loop on one rank."""

    plan: Plan
    engine: Engine[State, Staged]
    feed: Feed[Staged]
    store: Store
    record: Record
    heartbeat: Heartbeat
    requests: Requests
    summarize: Summarize
    keep_pictures: KeepPictures  # samples into files, whose names it gives
    lr_factor: Callable[[int], float] | None = None  # of a step, by the task's own schedule
    started: Mapping[str, Any] = field(default_factory=dict)  # more values of the `started` event
    as_if_split: bool = False  # what only one microbatch trains alike is refused, too

    @cached_property
    def hooks(self) -> Sequence[Any]:
        """The hooks of the run's features, in their order (loop_hooks.py)."""
        return [hooks(self, value) for _, hooks, value in hooks_of(self.plan.features, "loop")]


def train(
    context: LoopContext[State, Staged],
    *,
    saved: Checkpoint | None = None,
    weights: Checkpoint | None = None,
    stop_at: int | None = None,
) -> tuple[State, Outcome]:
    """Train to plan.steps, to stop_at, or until asked to stop. Returns the state and how it ended.

    saved: go on from here; None: from the start. weights: start with these, or, of a task with a
        frozen base, go on with them beneath `saved`; None: with initial values.

    RunError: a gradient was not finite and the plan says stop.
    """
    plan, engine, heartbeat = context.plan, context.engine, context.heartbeat
    state, done, counters = _begin(context, saved, weights)
    logger = StepLogger(plan, context.feed, context.record, counters)
    is_alone = plan.layout.world_size == 1  # nobody else is to agree to what this rank is asked
    next_due, is_saving = plan.next_due(done), False
    rates, ends_early = Rates(plan.schedule, context.lr_factor), plan.ends_early(counters)

    for step, batch in () if ends_early else context.feed:
        heartbeat(step, "step")
        lr = rates[step]
        requests = _UNASKED if is_alone else _LateRequests(context.requests)
        state, metrics = engine.step(state, batch, lr, requests)
        requested = logger.add(step, batch, lr, metrics)
        if engine.notes:
            _record_notes(context, step + 1)
        if is_alone and any(counts := context.requests.pending()):
            requested |= requests_in(counts)
        if is_saving:
            is_saving = context.store.check()
        done = step + 1
        if requested or done in (next_due, stop_at):
            due = plan.actions_due(done) | requested
            due |= logger.flush()  # what was asked during this very step counts too
            if done == stop_at:
                due |= {"save", "stop"}
            run_due_actions(context, logger, state, step=done, due=due)
            next_due, is_saving = plan.next_due(done), True
            ends_early = plan.ends_early(counters)
            if ends_early or ("stop" in due and done < plan.steps):
                break
        heartbeat(done, "data")
    return _finish(context, logger, state, done, ends_early=ends_early)


def _begin(
    context: LoopContext[State, Staged], saved: Checkpoint | None, weights: Checkpoint | None
) -> tuple[State, int, Counters]:
    """The state before the first step of this start, with the steps done and what they counted."""
    plan, engine = context.plan, context.engine
    state = engine.restore(saved, weights) if saved else engine.init(weights)
    done = saved.step if saved else 0
    context.record(Event("started", done, {**plan.at_start, **context.started}))
    if done < plan.steps:
        engine.begin_training(state, context.feed.trial_rows(), as_if_split=context.as_if_split)
        _record_notes(context, done)
        for hooks in context.hooks:
            hooks.before_training(state, done)
    return state, done, Counters.from_loop(saved.loop) if saved else Counters()


def _finish(
    context: LoopContext[State, Staged],
    logger: StepLogger,
    state: State,
    done: int,
    *,
    ends_early: bool,
) -> tuple[State, Outcome]:
    """Write what is still to be written, test what was trained, if it is finished, and record how
    the training ended.
    """
    logger.flush()
    context.store.close()
    plan, counters = context.plan, logger.counters
    outcome: Outcome = "finished" if done >= plan.steps or ends_early else "stopped"
    if outcome == "finished" and plan.data.test_samples:
        state = _test(context, counters, state, done)
    context.heartbeat(done, "end")
    values = {**counters.metrics, **logger.totals(), "reference": dict(plan.data.reference)}
    if ends_early and done < plan.steps:
        for hooks in context.hooks:
            values |= hooks.last_words(counters)
    context.record(Event(outcome, done, values))
    return state, outcome


class _LateRequests(Sequence[int]):
    """The requests to this rank as they stand when they are read for the first time: an engine
    reads them as late in its step as it can.
    """

    def __init__(self, requests: Requests) -> None:
        self._requests = requests

    @cached_property
    def _pending(self) -> Sequence[int]:
        return self._requests.pending()

    def __len__(self) -> int:
        return len(REQUESTS)

    def __iter__(self) -> Iterator[int]:
        return iter(self._pending)

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[int]: ...
    def __getitem__(self, index: int | slice) -> int | Sequence[int]:
        return self._pending[index]


def _record_notes(context: LoopContext[State, Staged], done: int) -> None:
    for note in context.engine.notes:
        line = Event("warned", done, {"text": note}) if isinstance(note, str) else note
        context.record(line)
    context.engine.notes.clear()


def evaluate(
    context: LoopContext[State, Staged], saved: Checkpoint, weights: Checkpoint | None = None
) -> Outcome:
    """The metrics of `saved`, and nothing trained. weights: as train()"""
    began = time.perf_counter()
    state = context.engine.restore(saved, weights)
    metrics = _measure(context, state, saved.step)
    seconds = time.perf_counter() - began
    _warn_if_not_finite(context, metrics, saved.step)
    context.record(Event("evaluated", saved.step, {**metrics, "seconds": seconds}))
    return "finished"


def run_due_actions(
    context: LoopContext[State, Staged],
    logger: StepLogger,
    state: State,
    *,
    step: int,
    due: set[str],
) -> None:
    """Evaluate, sample, hash and save, in this order: a checkpoint carries its own metrics."""
    plan, engine = context.plan, context.engine
    for hooks in context.hooks:
        hooks.before_actions(state, step)
    save = bool(due & {"save", "stop"})
    if "evaluate" in due and plan.data.eval_samples:
        context.heartbeat(step, "evaluate")
        is_best = _evaluate(context, logger.counters, state, step)
        save = save or (is_best and bool(plan.every.save))  # the best is kept, so it must be there
        if plan.ends_early(logger.counters):
            due = due | plan.actions_at_end()
            save = True
    if "sample" in due:
        context.heartbeat(step, "sample")
        _sample(context, state, step)
    if "hash" in due:
        context.heartbeat(step, "save")
        from samecurve.core.weights import combined

        digests = engine.digests(state)
        context.record(Event("hashed", step, {"hash": combined(digests), "arrays": digests}))
    if save:
        context.heartbeat(step, "save")
        began = time.perf_counter()  # before the copies from the devices, which training waits for
        loop = asdict(logger.counters)
        if kept := engine.kept():
            loop[TASK_STATE] = kept
        pieces = engine.gather(state)
        context.store.save(step, pieces, loop, began=began)
    logger.restart_clock()


def _evaluate(
    context: LoopContext[State, Staged], counters: Counters, state: State, step: int
) -> bool:
    """Evaluate, and keep what a checkpoint is to know. Returns whether it is the best so far."""
    plan, began = context.plan, time.perf_counter()
    metrics = _measure(context, state, step)
    if None not in counters.metrics.values():  # said once, not at each evaluation that follows
        _warn_if_not_finite(context, metrics, step)
    counters.metrics_step = step
    counters.metrics = {
        name: value for name, value in metrics.items() if not isinstance(value, list)
    }
    value = metric_of(counters.metrics, plan.best)
    is_best = plan.best.is_better(value, counters.best_value)
    if is_best:
        counters.best_value, counters.best_step = value, step
    for hooks in context.hooks:
        hooks.after_evaluation(counters, step)
    key = "best_loss" if plan.best.metric == "loss" else "best_value"
    best = {key: counters.best_value, "best_step": counters.best_step}
    seconds = time.perf_counter() - began
    context.record(Event("evaluated", step, {**metrics, **best, "seconds": seconds}))
    return is_best


def _test(
    context: LoopContext[State, Staged], counters: Counters, state: State, done: int
) -> State:
    """The best checkpoint, or the last where the best was not kept, on data that nothing was chosen
    by. Returns a state with its weights.
    """
    began, step = time.perf_counter(), done
    context.heartbeat(done, "evaluate")
    context.engine.preflight()  # the best is published by one rank, which all wait for here
    # without save_every in steps, whether the best was saved follows from the clock
    best_step = counters.best_step if context.plan.every.save else None
    saved = context.store.load(best_step) if best_step else None
    if saved is not None and saved.step != done:
        state, step = context.engine.refill(state, saved), saved.step
    metrics = _measure(context, state, step, "test")
    _warn_if_not_finite(context, metrics, step)
    seconds = time.perf_counter() - began
    context.record(Event("tested", step, {**metrics, "seconds": seconds}))
    return state


def _warn_if_not_finite(
    context: LoopContext[State, Staged], metrics: Mapping[str, JournalMetric], step: int
) -> None:
    """An evaluation that says nothing says so, with what to look at."""
    names = [name for name, value in metrics.items() if value is None]
    if not names:
        return
    text = (
        f"the evaluation at step {step} gives no finite {join_words(names)}: it counts as no best."
        " On these held-out rows something divides by 0 (a weight of 0 over all of them), takes the"
        " logarithm of 0 or overflows, or the rows themselves hold a nan: `samecurve eval RUN --on"
        " train` tells the model from the data, --dtype f32 or f64 the precision"
    )
    context.record(Event("warned", step, {"text": text}))


def _sample(context: LoopContext[State, Staged], state: State, step: int) -> None:
    samples = context.engine.sample(state, step)
    texts = [sample for sample in samples if isinstance(sample, str)]
    pictures = [sample for sample in samples if not isinstance(sample, str)]
    names = context.keep_pictures(step, pictures)
    if samples:
        kept = {"pictures": names} if names else {}
        context.record(Event("sampled", step, {"texts": texts, **kept}))


def _measure(
    context: LoopContext[State, Staged], state: State, step: int, which: Held = "eval"
) -> dict[str, JournalMetric]:
    """step: how many are done."""
    plan, engine = context.plan, context.engine
    rounds = _each_with(context.feed.evaluation(which), lambda: context.heartbeat(step, "evaluate"))
    progress = plan.progress_at(max(step - 1, 0))
    metrics = context.summarize(engine.evaluate(state, rounds, progress, plan.held_out(which)))
    return {name: journal_value(value) for name, value in metrics.items()}


def _each_with(rounds: Iterable[T], sign_of_life: Callable[[], None]) -> Iterator[T]:
    """An evaluation may take hours: a sign of life for each round of it."""
    for staged in rounds:
        sign_of_life()
        yield staged
