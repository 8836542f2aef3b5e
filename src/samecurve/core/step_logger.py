"""Turns the metrics of steps into journal lines, one step late."""

import math
import time
from collections.abc import Mapping
from typing import Any

from samecurve.core.events import Event
from samecurve.core.planning.plan import Plan
from samecurve.core.protocols import (
    Batch,
    Counters,
    Feed,
    PendingMetrics,
    Record,
    StepMetrics,
)
from samecurve.core.stragglers import StragglerDetector
from samecurve.errors import RunError

_SMALLEST_SCALE = 2.0**-14


class StepLogger:
    """Turns the figures of steps into journal lines, one step late."""

    def __init__(self, plan: Plan, feed: Feed, record: Record, counters: Counters) -> None:
        self.counters = counters
        self._plan, self._feed, self._record = plan, feed, record
        self._owed: tuple[int, Batch, float, PendingMetrics] | None = None
        self._began = self._clock = time.perf_counter()
        self._useful, self._trained = 0.0, 0
        self._peaks = [0] * plan.num_devices
        self._laggards = StragglerDetector(
            plan.microbatches_per_device if plan.microbatch_seconds else (),
            (
                "; --balance measured would deal it fewer slots"
                if plan.can_be_uneven and not plan.microbatch_seconds
                else ""
            ),
        )

    def defer(self, step: int, batch: Batch, lr: float, stats: PendingMetrics) -> None:
        self._owed = (step, batch, lr, stats)

    def restart_clock(self) -> None:
        """What passed since the last step was no step's time."""
        self._clock = time.perf_counter()

    def flush(self) -> set[str]:
        """Write the line of the step owed, if one is.

        Returns what the ranks were asked for when it was queued.
        """
        if self._owed is None:
            return set()
        (step, batch, lr, stats), self._owed = self._owed, None
        figures = stats.read()
        seconds, self._clock = max(figures.done_at - self._clock, 1e-9), figures.done_at
        self._useful += seconds
        self._trained += 1
        self._peaks = [
            max(peak, int(found))
            for peak, found in zip(self._peaks, figures.memory_bytes, strict=True)
        ]
        values: dict[str, Any] = {
            "loss": figures.loss,
            "grad_norm": figures.grad_norm,
            "lr": lr,
            "samples_per_second": batch.samples / seconds,
            "seconds": seconds,
            "wait_seconds": max(figures.wait_seconds),
            "memory_bytes": int(max(figures.memory_bytes)),
        }
        if self._plan.tokens_per_sample > 1:
            values["tokens_per_second"] = figures.weight / seconds
        if self._plan.flops_per_step:
            values["flops_per_second"] = (
                self._plan.flops_per_step * batch.samples / self._plan.global_batch_size / seconds
            )
            if self._plan.peak_flops:
                values["mfu"] = values["flops_per_second"] / self._plan.peak_flops
        if figures.scale != 1.0:
            values["scale"] = figures.scale
        if not figures.finite:
            self._not_finite(step, figures, values)
        self._record(Event("step", step + 1, values))
        for found in self._laggards.add(seconds, figures.wait_seconds, figures.forward_seconds):
            self._record(Event("slow", step + 1, found))
        return {request for request, count in figures.requests.items() if count}

    def totals(self) -> Mapping[str, Any]:
        """Of this start; memory: each device's peak beside what the plan expected of it."""
        wall = time.perf_counter() - self._began
        memory = {
            "memory_bytes_by_device": self._peaks,
            "memory_estimate_bytes": self._plan.memory_estimate,
        }
        return {
            "seconds": wall,
            "steps": self._trained,
            "goodput": self._useful / wall if wall else 0.0,
            "skipped": self.counters.skipped,
            **memory,
        }

    def _not_finite(self, step: int, figures: StepMetrics, values: dict[str, Any]) -> None:
        """The update was masked on every rank.

        An f16 scale that is still being found is no fault; else the policy decides.
        """
        loss, norm, scale = figures.loss, figures.grad_norm, figures.scale
        searching = (
            self._plan.precision == "f16" and math.isfinite(loss) and scale > _SMALLEST_SCALE
        )
        values.update(skipped=True, loss=loss if math.isfinite(loss) else None, grad_norm=None)
        self.counters.skipped += 1
        if searching or self._plan.non_finite == "skip":
            return
        self._record(Event("step", step + 1, values))
        if not figures.weight:
            raise RunError(
                f"step {step + 1}: no sample of it has any weight, so it has no loss",
                "data whose labels count, or --set train.non_finite=skip, which leaves such"
                " steps out",
            )
        self._record(
            Event(
                "warned",
                step + 1,
                {
                    "text": f"step {step + 1} gave a gradient that is not finite",
                    "sample_ids": self._feed.ids(step),
                },
            )
        )
        raise RunError(
            f"step {step + 1}: loss {loss:g}, gradient norm {norm:g}: not finite; its update was"
            " left out on every rank, and its sample ids are in journal.jsonl",
            "--resume RUN with a smaller --lr goes on from its last save; --set"
            " train.non_finite=skip leaves such steps out",
        )
