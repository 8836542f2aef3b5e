"""The only training loop.

Tasks, engines, strategies and observers plug into it; none has a loop of its own.

The figures of a step are read after the next one is queued, so that the host never holds a device
up. Whatever all ranks must agree on comes from those figures, which are the same on every rank.
"""

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict
from typing import Any, Literal

from samecurve.core.determinism.digest import combined
from samecurve.core.eval_sums import Summarize, journal_value
from samecurve.core.events import Event
from samecurve.core.planning.plan import Plan
from samecurve.core.protocols import (
    Checkpoint,
    Counters,
    Engine,
    Feed,
    Heartbeat,
    KeepPictures,
    Record,
    Requests,
    Store,
)
from samecurve.core.step_logger import StepLogger

Outcome = Literal["finished", "stopped"]


def train(
    plan: Plan,
    engine: Engine,
    feed: Feed,
    store: Store,
    record: Record,
    pulse: Heartbeat,
    requests: Requests,
    summarize: Summarize,
    keep_pictures: KeepPictures,
    saved: Checkpoint | None = None,
    stop_at: int | None = None,
    weights: Checkpoint | None = None,
) -> tuple[Any, Outcome]:
    """Train from `saved`, or from the start (with these weights, if they are given), to plan.steps,
    to stop_at, or until asked to stop. Returns the state and how it ended.

    keep_pictures: samples into files, whose names it gives. RunError: a gradient was not finite and plan says
    stop.
    """
    state = engine.restore(saved) if saved else engine.init(weights)
    ledger = StepLogger(plan, feed, record, Counters(**saved.loop) if saved else Counters())
    done = saved.step if saved else 0
    record(Event("started", done, {"exact": True} if plan.exact else {}))
    for step, batch in feed:
        pulse(step, "step")
        lr = plan.lr_at(step)
        state, stats = engine.step(state, batch, lr, requests.pending())
        asked = ledger.flush()
        ledger.defer(step, batch, lr, stats)
        store.check()
        done = step + 1
        due: set[str] = (
            plan.actions_due(done) | asked | ({"save", "stop"} if done == stop_at else set())
        )
        if due:
            due |= ledger.flush()  # what was asked during this very step counts too
            _serve(
                due,
                done,
                plan,
                engine,
                state,
                feed,
                store,
                record,
                pulse,
                ledger,
                summarize,
                keep_pictures,
            )
        if "stop" in due and done < plan.steps:
            break
        pulse(done, "data")
    ledger.flush()
    pulse(done, "end")
    store.close()
    outcome: Outcome = "finished" if done >= plan.steps else "stopped"
    record(
        Event(
            outcome,
            done,
            {**ledger.counters.metrics, **ledger.totals(), "reference": dict(plan.reference)},
        )
    )
    return state, outcome


def evaluate(
    engine: Engine, feed: Feed, saved: Checkpoint, record: Record, summarize: Summarize
) -> Outcome:
    """The metrics of `saved`, and nothing trained."""
    began = time.perf_counter()
    found = _measured(engine, engine.restore(saved), feed.evaluation(), summarize)
    record(Event("evaluated", saved.step, {**found, "seconds": time.perf_counter() - began}))
    return "finished"


def _beating(rounds: Iterable[Any], beat: Callable[[], None]) -> Iterator[Any]:
    """A sign of life for each round: an evaluation may take hours."""
    for found in rounds:
        beat()
        yield found


def _measured(
    engine: Engine, state: Any, rounds: Iterable[Any], summarize: Summarize
) -> dict[str, Any]:
    """Metrics as the journal has them: numbers, None where one is not finite, and nested lists."""
    metrics = summarize(engine.evaluate(state, rounds))
    return {name: journal_value(value) for name, value in metrics.items()}


def _serve(
    due: set[str],
    done: int,
    plan: Plan,
    engine: Engine,
    state: Any,
    feed: Feed,
    store: Store,
    record: Record,
    pulse: Heartbeat,
    ledger: "StepLogger",
    summarize: Summarize,
    keep_pictures: KeepPictures,
) -> None:
    """Evaluate, sample, hash and save, in this order, so that a checkpoint carries its own metrics."""
    counters = ledger.counters
    if "evaluate" in due and plan.eval_samples:
        pulse(done, "evaluate")
        began = time.perf_counter()
        metrics = _measured(
            engine, state, _beating(feed.evaluation(), lambda: pulse(done, "evaluate")), summarize
        )
        counters.metrics = {
            name: value for name, value in metrics.items() if not isinstance(value, list)
        }
        counters.metrics_step = done
        loss = counters.metrics["loss"]
        if loss is not None and (counters.best_loss is None or loss < counters.best_loss):
            counters.best_loss, counters.best_step = loss, done
            due |= {"save"} if plan.every.save else set()  # the best is kept, so it must be there
        record(
            Event(
                "evaluated",
                done,
                {
                    **metrics,
                    "best_loss": counters.best_loss,
                    "best_step": counters.best_step,
                    "seconds": time.perf_counter() - began,
                },
            )
        )
    if "sample" in due:
        pulse(done, "sample")
        samples = engine.sample(state, done)
        texts = [sample for sample in samples if isinstance(sample, str)]
        names = keep_pictures(done, [sample for sample in samples if not isinstance(sample, str)])
        if samples:
            pictures = {"pictures": names} if names else {}
            record(Event("sampled", done, {"texts": texts, **pictures}))
    if "hash" in due:
        pulse(done, "save")
        digests = engine.digests(state)
        record(Event("hashed", done, {"hash": combined(digests), "arrays": digests}))
    if due & {"save", "stop"}:
        pulse(done, "save")
        store.save(done, engine.gather(state), asdict(counters))
    ledger.restart_clock()
