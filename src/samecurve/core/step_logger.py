"""Turns the metrics of steps into journal lines, one step late."""

import math
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from samecurve.core.determinism import NEGATIVE_WEIGHT_REMEDY
from samecurve.core.events import REQUESTS, Event, Request
from samecurve.core.planning.plan import Plan
from samecurve.core.protocols import (
    Batch,
    Counters,
    Feed,
    PendingMetrics,
    Record,
    StepMetrics,
)
from samecurve.errors import RunError

if TYPE_CHECKING:
    from samecurve.core.measurement.stragglers import StragglerDetector

# what a step's line says of itself beside the loss
STEP_VALUES = frozenset(
    {
        "grad_norm",
        "lr",
        "samples_per_second",
        "tokens_per_second",
        "flops_per_second",
        "seconds",
        "wait_seconds",
        "memory_bytes",
        "mfu",
        "scale",
        "skipped",
        "metrics",
        "step",
        "time",
    }
)
_SMALLEST_SCALE = 2.0**-14  # of f16; below it, what is not finite is not the scale's fault

JournalValues = dict[str, Any]


# a step that is queued, whose line is still to be written: its batch, learning rate and metrics
_Deferred = tuple[int, Batch, float, PendingMetrics]


class StepLogger:
    """Writes each step's line once the next step is queued."""

    def __init__(self, plan: Plan, feed: Feed, record: Record, counters: Counters) -> None:
        self.counters = counters
        self._plan, self._feed, self._record = plan, feed, record
        self._deferred: _Deferred | None = None
        self._began = self._clock = time.perf_counter()
        self._step_seconds, self._steps = 0.0, 0  # of this start
        self._peak_bytes = [0] * plan.layout.num_devices
        self._stragglers = _straggler_detector(plan)

    def add(self, step: int, batch: Batch, lr: float, metrics: PendingMetrics) -> set[Request]:
        """Write the line of the step before, while this one is computed; and this one's too, where
        its metrics are on the host already.

        Returns what ranks were asked, as far as those lines tell.
        """
        requested = self.flush() if self._deferred else set()
        self._deferred = (step, batch, lr, metrics)
        if metrics.on_host:
            requested |= self.flush()
        return requested

    def restart_clock(self) -> None:
        """Leave out the time since the last step, which was no step's."""
        self._clock = time.perf_counter()

    def flush(self) -> set[Request]:
        """Write the line of the step deferred, if one is.

        Returns what ranks were asked when that step was queued.
        """
        if self._deferred is None:
            return set()
        step, batch, lr, pending = self._deferred
        self._deferred = None
        metrics = pending.read()
        seconds = max(metrics.done_at - self._clock, 1e-9)
        self._clock = metrics.done_at
        self._step_seconds += seconds
        self._steps += 1
        self._peak_bytes = list(map(max, self._peak_bytes, map(int, metrics.memory_bytes)))

        values = self._values(batch.samples, lr, metrics, seconds)
        if not metrics.finite:
            self._skip_or_stop(step, metrics, values)
        done = step + 1
        self._record(Event("step", done, values))
        if self._stragglers:
            waits, forwards = metrics.wait_seconds, metrics.forward_seconds
            for slow in self._stragglers.add(seconds, waits, forwards):
                self._record(Event("slow", done, slow))
        return requests_in(metrics.requests) if any(metrics.requests) else set()

    def totals(self) -> Mapping[str, Any]:
        """The totals of this start. memory: each device's peak beside what the plan expected."""
        wall = time.perf_counter() - self._began
        return {
            "seconds": wall,
            "steps": self._steps,
            "goodput": self._step_seconds / wall if wall else 0.0,
            "skipped": self.counters.skipped,
            "memory_bytes_by_device": self._peak_bytes,
            "memory_estimate_bytes": self._plan.memory_estimate,
        }

    def _values(
        self, samples: int, lr: float, metrics: StepMetrics, seconds: float
    ) -> JournalValues:
        """The values of a step's line in the journal."""
        plan = self._plan
        values: JournalValues = {
            "loss": metrics.loss,
            "grad_norm": metrics.grad_norm,
            "lr": lr,
            "samples_per_second": samples / seconds,
            "seconds": seconds,
            "wait_seconds": max(metrics.wait_seconds),
            "memory_bytes": int(max(metrics.memory_bytes)),
        }
        if metrics.means:
            means = metrics.means.items()
            values["metrics"] = {
                name: mean if math.isfinite(mean) else None for name, mean in means
            }
        if plan.data.tokens_per_sample > 1:
            values["tokens_per_second"] = metrics.weight / seconds
        if plan.flops.flops_per_step:
            flops = plan.flops.flops_per_step * samples / plan.batch.global_batch_size / seconds
            values["flops_per_second"] = flops
            if plan.flops.peak_flops:
                values["mfu"] = flops / plan.flops.peak_flops
        if metrics.scale != 1.0:
            values["scale"] = metrics.scale
        return values

    def _skip_or_stop(self, step: int, metrics: StepMetrics, values: JournalValues) -> None:
        """The update was masked on every rank: say so in the step's values.

        An f16 scale that is still being found is no fault; else the policy decides. RunError: the
        run is to stop.
        """
        loss, done = metrics.loss, step + 1
        if metrics.weight < 0:
            raise RunError(
                f"step {done}: the weights of its loss add up to {metrics.weight:g}",
                NEGATIVE_WEIGHT_REMEDY,
            )
        values["skipped"] = True
        values["loss"] = loss if math.isfinite(loss) else None
        values["grad_norm"] = None
        self.counters.skipped += 1
        finds_scale = (
            self._plan.compute.precision == "f16"
            and math.isfinite(loss)
            and metrics.scale > _SMALLEST_SCALE
        )
        if finds_scale or self._plan.compute.non_finite == "skip":
            return
        self._record(Event("step", done, values))
        if not metrics.weight:
            raise RunError(
                f"step {done}: no sample of it has any weight, so it has no loss",
                "data whose labels count, or --set train.non_finite=skip, which leaves such"
                " steps out",
            )
        warning = {
            "text": f"step {done} gave a gradient that is not finite",
            "sample_ids": self._feed.ids(step),
        }
        self._record(Event("warned", done, warning))
        raise RunError(
            f"step {done}: loss {loss:g}, gradient norm {metrics.grad_norm:g}: not finite; its"
            " update was left out on every rank, and its sample ids are in journal.jsonl",
            "--resume RUN with a smaller --lr goes on from its last save; --set"
            " train.non_finite=skip leaves such steps out",
        )


def requests_in(counts: Sequence[int]) -> set[Request]:
    """The requests of which there is one, at least. counts: in the order of events.REQUESTS."""
    return {request for request, count in zip(REQUESTS, counts, strict=True) if count}


def _straggler_detector(plan: Plan) -> "StragglerDetector | None":
    """The detector of slow ranks, where there are several. Shares by measured speed are no fault of
    a rank; where a run could have such shares, the detector says so.
    """
    if plan.layout.world_size == 1:
        return None
    from samecurve.core.measurement.stragglers import StragglerDetector

    on_cpu = plan.layout.devices[0].kind == "cpu"
    if plan.batch.microbatch_seconds:
        return StragglerDetector(plan.batch.microbatches_per_device, on_cpu=on_cpu)
    if plan.layout.can_be_uneven:
        remedy = "; --balance measured would assign it fewer microbatches"
        return StragglerDetector(remedy=remedy, on_cpu=on_cpu)
    return StragglerDetector(on_cpu=on_cpu)
