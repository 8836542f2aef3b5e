"""The only training loop. Tasks, engines, strategies and observers plug into it; none has a loop of its own.

The figures of a step are read after the next one is queued, so that the host never holds a device up. Whatever all
ranks must agree on comes from those figures, which are the same on every rank.
"""

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict
from typing import Any, Literal

from lockstep.core.digest import combined
from lockstep.core.events import Event
from lockstep.core.pace import Laggards
from lockstep.core.plan import Plan
from lockstep.core.protocols import Batch, Counters, Engine, Feed, Figures, Pulse, Record, Requests, Saved, Stats, Store
from lockstep.errors import RunError

Outcome = Literal["finished", "stopped"]
_SMALLEST_SCALE = 2.0**-14


def train(plan: Plan, engine: Engine, feed: Feed, store: Store, record: Record, pulse: Pulse, requests: Requests,
          summarize: Any, saved: Saved | None = None, stop_at: int | None = None, weights: Saved | None = None) -> tuple[Any, Outcome]:
    """Train from `saved`, or from the start (with these weights, if they are given), to plan.steps, to stop_at, or until asked to stop. Returns the state and how it ended.

    summarize: sums of an evaluation -> metrics. RunError: a gradient was not finite and plan says stop.
    """
    state = engine.restore(saved) if saved else engine.init(weights)
    ledger = Ledger(plan, feed, record, Counters(**saved.loop) if saved else Counters())
    done = saved.step if saved else 0
    record(Event("started", done, {"exact": True} if plan.exact else {}))
    for step, batch in feed:
        pulse(step, "step")
        lr = plan.lr_at(step)
        state, stats = engine.step(state, batch, lr, requests.pending())
        asked = ledger.settle()
        ledger.owe(step, batch, lr, stats)
        store.check()
        done = step + 1
        due: set[str] = plan.due(done) | asked | ({"save", "stop"} if done == stop_at else set())
        if due:
            due |= ledger.settle()  # what was asked during this very step counts too
            _serve(due, done, plan, engine, state, feed, store, record, pulse, ledger, summarize)
        if "stop" in due and done < plan.steps:
            break
        pulse(done, "data")
    ledger.settle()
    pulse(done, "end")
    store.close()
    outcome: Outcome = "finished" if done >= plan.steps else "stopped"
    record(Event(outcome, done, {**ledger.counters.metrics, **ledger.totals(), "reference": dict(plan.reference)}))
    return state, outcome


def evaluate(engine: Engine, feed: Feed, saved: Saved, record: Record, summarize: Any) -> Outcome:
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


def _measured(engine: Engine, state: Any, rounds: Iterable[Any], summarize: Any) -> dict[str, float | None]:
    found: dict[str, float] = summarize(engine.evaluate(state, rounds))
    return {name: value if math.isfinite(value) else None for name, value in found.items()}


def _serve(due: set[str], done: int, plan: Plan, engine: Engine, state: Any, feed: Feed, store: Store, record: Record, pulse: Pulse, ledger: "Ledger", summarize: Any) -> None:
    """Evaluate, sample, hash and save, in this order, so that a checkpoint carries its own metrics."""
    counters = ledger.counters
    if "evaluate" in due and plan.eval_samples:
        pulse(done, "evaluate")
        began = time.perf_counter()
        counters.metrics = _measured(engine, state, _beating(feed.evaluation(), lambda: pulse(done, "evaluate")), summarize)
        counters.metrics_step = done
        loss = counters.metrics["loss"]
        if loss is not None and (counters.best_loss is None or loss < counters.best_loss):
            counters.best_loss, counters.best_step = loss, done
            due |= {"save"} if plan.every.save else set()  # the best is kept, so it must be there
        record(Event("evaluated", done, {**counters.metrics, "best_loss": counters.best_loss, "best_step": counters.best_step, "seconds": time.perf_counter() - began}))
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


class Ledger:
    """Turns the figures of steps into journal lines, one step late."""

    def __init__(self, plan: Plan, feed: Feed, record: Record, counters: Counters) -> None:
        self.counters = counters
        self._plan, self._feed, self._record = plan, feed, record
        self._owed: tuple[int, Batch, float, Stats] | None = None
        self._began = self._clock = time.perf_counter()
        self._useful, self._trained = 0.0, 0
        self._peaks = [0] * plan.world
        self._laggards = Laggards(plan.shares if plan.slot_times else (), "; --balance measured would deal it fewer slots" if plan.divisible and not plan.slot_times else "")

    def owe(self, step: int, batch: Batch, lr: float, stats: Stats) -> None:
        self._owed = (step, batch, lr, stats)

    def restart_clock(self) -> None:
        """What passed since the last step was no step's time."""
        self._clock = time.perf_counter()

    def settle(self) -> set[str]:
        """Write the line of the step owed, if one is. Returns what the ranks were asked for when it was queued."""
        if self._owed is None:
            return set()
        (step, batch, lr, stats), self._owed = self._owed, None
        figures = stats.read()
        seconds, self._clock = max(figures.at - self._clock, 1e-9), figures.at
        self._useful += seconds
        self._trained += 1
        self._peaks = [max(peak, int(found)) for peak, found in zip(self._peaks, figures.memory, strict=True)]
        values: dict[str, Any] = {"loss": figures.loss, "grad_norm": figures.norm, "lr": lr, "samples_per_second": batch.samples / seconds,
                                  "seconds": seconds, "wait_seconds": max(figures.waits), "memory_bytes": int(max(figures.memory))}
        if self._plan.tokens_per_sample > 1:
            values["tokens_per_second"] = figures.weight / seconds
        if self._plan.flops_per_step:
            values["flops_per_second"] = self._plan.flops_per_step * batch.samples / self._plan.batch / seconds
            if self._plan.peak_flops:
                values["mfu"] = values["flops_per_second"] / self._plan.peak_flops
        if figures.scale != 1.0:
            values["scale"] = figures.scale
        if not figures.finite:
            self._not_finite(step, figures, values)
        self._record(Event("step", step + 1, values))
        for found in self._laggards.add(seconds, figures.waits, figures.forwards):
            self._record(Event("slow", step + 1, found))
        return {request for request, count in figures.asked.items() if count}

    def totals(self) -> Mapping[str, Any]:
        """Of this start; memory: each device's peak beside what the plan expected of it."""
        wall = time.perf_counter() - self._began
        memory = {"memory_bytes_by_device": self._peaks, "memory_estimate_bytes": self._plan.memory_estimate}
        return {"seconds": wall, "steps": self._trained, "goodput": self._useful / wall if wall else 0.0, "skipped": self.counters.skipped, **memory}

    def _not_finite(self, step: int, figures: Figures, values: dict[str, Any]) -> None:
        """The update was masked on every rank. An f16 scale that is still being found is no fault; else the policy decides."""
        loss, norm, scale = figures.loss, figures.norm, figures.scale
        searching = self._plan.precision == "f16" and math.isfinite(loss) and scale > _SMALLEST_SCALE
        values.update(skipped=True, loss=loss if math.isfinite(loss) else None, grad_norm=None)
        self.counters.skipped += 1
        if searching or self._plan.non_finite == "skip":
            return
        self._record(Event("step", step + 1, values))
        if not figures.weight:
            raise RunError(f"step {step + 1}: no sample of it has any weight, so it has no loss", "data whose labels count, or --set train.non_finite=skip, which leaves such steps out")
        self._record(Event("warned", step + 1, {"text": f"step {step + 1} gave a gradient that is not finite", "sample_ids": self._feed.ids(step)}))
        raise RunError(
            f"step {step + 1}: loss {loss:g}, gradient norm {norm:g}: not finite; its update was left out on every rank, and its sample ids are in journal.jsonl",
            "--resume RUN with a smaller --lr goes on from its last save; --set train.non_finite=skip leaves such steps out")
