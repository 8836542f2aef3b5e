"""The only training loop.

Tasks, engines, strategies and observers plug into it; none has a loop of its own.

The figures of a step are read after the next one is queued, so that the host never holds a device
up. Whatever all ranks must agree on comes from those figures, which are the same on every rank.
"""

import math
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict
from typing import Any, Literal

from samecurve.core.determinism.digest import combined
from samecurve.core.events import Event
from samecurve.core.planning.plan import Plan
from samecurve.core.protocols import (
    Checkpoint,
    Counters,
    Engine,
    Feed,
    Heartbeat,
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
    summarize: Any,
    saved: Checkpoint | None = None,
    stop_at: int | None = None,
    weights: Checkpoint | None = None,
) -> tuple[Any, Outcome]:
    """Train from `saved`, or from the start (with these weights, if they are given), to plan.steps,
    to stop_at, or until asked to stop. Returns the state and how it ended.

    summarize: sums of an evaluation -> metrics. RunError: a gradient was not finite and plan says
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
            _serve(due, done, plan, engine, state, feed, store, record, pulse, ledger, summarize)
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
    engine: Engine, feed: Feed, saved: Checkpoint, record: Record, summarize: Any
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
    engine: Engine, state: Any, rounds: Iterable[Any], summarize: Any
) -> dict[str, float | None]:
    found: dict[str, float] = summarize(engine.evaluate(state, rounds))
    return {name: value if math.isfinite(value) else None for name, value in found.items()}


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
    summarize: Any,
) -> None:
    """Evaluate, sample, hash and save, in this order, so that a checkpoint carries its own metrics."""
    counters = ledger.counters
    if "evaluate" in due and plan.eval_samples:
        pulse(done, "evaluate")
        began = time.perf_counter()
        counters.metrics = _measured(
            engine, state, _beating(feed.evaluation(), lambda: pulse(done, "evaluate")), summarize
        )
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
                    **counters.metrics,
                    "best_loss": counters.best_loss,
                    "best_step": counters.best_step,
                    "seconds": time.perf_counter() - began,
                },
            )
        )
    if "sample" in due:
        pulse(done, "sample")
        texts = engine.sample(state, done)
        if texts:
            record(Event("sampled", done, {"texts": texts}))
    if "hash" in due:
        pulse(done, "save")
        digests = engine.digests(state)
        record(Event("hashed", done, {"hash": combined(digests), "arrays": digests}))
    if due & {"save", "stop"}:
        pulse(done, "save")
        store.save(done, engine.gather(state), asdict(counters))
    ledger.restart_clock()
