"""The events of a journal that a record keeps beside its steps, in lists of bounded length."""

import math
from collections.abc import Mapping

from samecurve.seam import Event
from samecurve_products.report.record import (
    EvenEvents,
    RunRecord,
    Start,
    as_mapping,
    devices,
    show_devices,
)
from samecurve_products.report.steps import number

_MAX_NOTABLE = 2000
_MAX_STARTS = 1000
_NOTABLE = {"resumed", "restarted", "warned", "slow", "finished", "stopped", "failed"}


def begin_start_with(record: RunRecord, event: Event) -> Mapping[str, object]:
    """Add a start if the event begins one; returns its plan, or {}.

    A restart has the plan of the start before it.
    """
    plan: Mapping[str, object] = {}
    if event.kind == "planned" or not record.starts:
        plan = as_mapping(event.values.get("plan"))
        record.environment = as_mapping(event.values.get("environment"))
        how = f"{plan.get('engine', '')} {plan.get('strategy', '')}".strip()
        begin_start(record, event.time, event.step, how, show_devices(devices(plan)))
    elif event.kind == "restarted":
        last = record.starts[-1]
        begin_start(record, event.time, event.step, last.how, last.devices)
    return plan


def begin_start(
    record: RunRecord, time: float, step: int, how: str = "", devices: str = ""
) -> None:
    """Add a start. how: its engine and strategy"""
    record.starts.append(
        Start(time=time, step=step, how=how, devices=devices, last_time=time, last_step=step)
    )
    record.totals.starts += 1
    if len(record.starts) > _MAX_STARTS:
        old = record.starts.pop(_MAX_STARTS // 2)
        record.totals.wall += old.wall_seconds
        record.totals.starting += old.starting_seconds


def keep_event(record: RunRecord, event: Event) -> None:
    """Add an event to its list and to the totals. A start has begun."""
    start, totals = record.starts[-1], record.totals
    start.last_time = max(start.last_time, event.time)
    start.last_step = event.step
    record.counts[event.kind] += 1
    if event.kind in _NOTABLE:
        record.notable.append(event)
        if len(record.notable) > _MAX_NOTABLE:
            del record.notable[_MAX_NOTABLE // 2]
    if (even := even_events(record).get(event.kind)) is not None:
        even.add(event)
    match event.kind:
        case "started":
            start.training_since = event.time
        case "evaluated":
            totals.evaluating += number(event.values.get("seconds"), 0.0)
            record.best = min(filter(None, (record.best, event)), key=_loss)
        case "tested":
            record.tested = event
        case "saved":
            totals.saving += number(event.values.get("blocked_seconds"), 0.0)
        case "finished" | "stopped" | "failed":
            start.end, start.end_values = event.kind, event.values


def even_events(record: RunRecord) -> dict[str, EvenEvents]:
    """The lists of events that are kept evenly, by the events' kind."""
    return {kind: getattr(record, kind) for kind in ("evaluated", "sampled", "sensors")}


def void_events_beyond(record: RunRecord, step: int) -> None:
    """Remove the events after `step` that a resume made void."""
    record.evaluated.void_beyond(step)
    record.sampled.void_beyond(step)
    if record.best and record.best.step > step:
        record.best = min(record.evaluated, key=_loss, default=None)


def _loss(evaluated: Event) -> float:
    return number(evaluated.values.get("loss"), math.inf)
