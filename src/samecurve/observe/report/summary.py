"""The numbers of a report.

One run's summary, where its time went, and in what two or more runs differ. All from every step's
exact numbers, not from what is drawn. What is not known is None.
"""

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from samecurve.core.events import Event
from samecurve.observe.report.reading import RunRecord, Start, flat, number
from samecurve.observe.report.thinning import Column, window

Grid = NDArray[np.float64]

NOT_METRICS = {"loss", "best_loss", "best_step", "seconds"}  # of an `evaluated` line
_MAX_DEVICES = 4096
_MAX_SAMPLES = 1e12  # of one step: no more is a number of samples
_DECISIONS = (
    "engine",
    "strategy",
    "backend",
    "precision",
    "batch",
    "micro",
    "rounds",
    "steps",
    "samples",
    "exact",
)


def outcome(record: RunRecord) -> str:
    """finished, stopped, failed, running, starting, not started, or cut off.

    cut off: no line says how it ended, and nobody holds it
    """
    if not record.starts:
        return "starting" if record.live else "not started"
    return record.starts[-1].end or ("running" if record.live else "cut off")


@np.errstate(all="ignore")  # a damaged journal may hold any number
def summary(record: RunRecord) -> dict[str, Any]:
    steps = record.column("step")
    plan = record.plan_json
    return {
        "run": str(record.directory),
        "outcome": outcome(record),
        "step": int(steps[-1]) if record.num_steps else 0,
        **{name: plan.get(name) for name in _DECISIONS},
        "devices": dict(devices(plan)),
        "world": sum(devices(plan).values()),
        "lr": _section(plan, "schedule").get("peak"),
        **_losses(record),
        **_times(record),
        **_rates(record),
        **_memory(record),
        **_sensors(record),
        "starts": len(record.starts),
        "warnings": sum(event.kind in {"warned", "slow"} for event in record.notable),
        "skipped": int((record.column("skipped") > 0).sum()),
    }


def devices(plan: Mapping[str, Any]) -> Counter[str]:
    """How many of which name."""
    entries = plan.get("devices")
    if not isinstance(entries, list):
        return Counter()
    return Counter(
        str(entry.get("name") if isinstance(entry, Mapping) else None) for entry in entries
    )


def _section(values: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """A section of what a file said, {} if it is none."""
    section = values.get(name)
    return section if isinstance(section, Mapping) else {}


def _losses(record: RunRecord) -> dict[str, Any]:
    loss = record.column("loss")
    width = window(record.num_steps)
    evaluated = [
        (number(event.values.get("loss"), math.inf), event.step) for event in record.evaluated
    ]
    best_loss, best_step = min(evaluated, default=(math.inf, 0))
    last = record.evaluated[-1] if record.evaluated else None
    return {
        "loss": _finite(loss[-1]) if record.num_steps else None,
        "loss_mean": _mean(loss[-width:]),
        "loss_mean_steps": min(width, record.num_steps),
        "best_loss": _finite(best_loss),
        "best_step": best_step if math.isfinite(best_loss) else None,
        "evaluated_at": last.step if last else None,
        "evaluated": _metrics_of(last) if last else {},
    }


def _metrics_of(evaluated: Event) -> dict[str, float | None]:
    """The loss, and the task's metrics."""
    left_out = NOT_METRICS - {"loss"}
    return {
        name: _finite(number(value))
        for name, value in evaluated.values.items()
        if name not in left_out and not isinstance(value, list)
    }


def _times(record: RunRecord) -> dict[str, Any]:
    seconds_by_use = where_time_went(record)
    wall = sum(seconds_by_use.values())
    training = float(np.nansum(record.column("seconds")))
    return {
        "wall_seconds": wall,
        "training_seconds": training,
        "goodput": min(1.0, training / wall) if wall else None,
        "voided_steps": record.totals.voided_steps,
        "seconds_by_use": seconds_by_use,
    }


def _rates(record: RunRecord) -> dict[str, Any]:
    seconds = record.column("seconds")
    wait_share = record.column("wait_seconds") / seconds
    samples = samples_seen(record)
    return {
        "samples_seen": int(samples[-1]) if record.num_steps else 0,
        "step_seconds": _median(seconds),
        "samples_per_second": _median(record.column("samples_per_second")),
        "tokens_per_second": _median(record.column("tokens_per_second")),
        "mfu": _median(record.column("mfu")),
        "wait_share": _median(np.minimum(wait_share, 1.0)),
    }


def _memory(record: RunRecord) -> dict[str, Any]:
    peak_bytes = [int(number(peak, 0.0)) for peak in _peaks_by_device(record)]
    of_steps = record.column("memory_bytes")
    largest = int(np.nanmax(of_steps)) if record.has_values("memory_bytes") else 0
    return {
        "memory_bytes": max([*peak_bytes, largest]) or None,
        "memory_bytes_by_device": peak_bytes,
        "memory_estimate_bytes": record.plan.memory_estimate if record.plan else None,
    }


def _peaks_by_device(record: RunRecord) -> list[Any]:
    """Of the last start that ended in order; [] without one."""
    for start in reversed(record.starts):
        peaks = start.end_values.get("memory_bytes_by_device")
        if isinstance(peaks, list):
            return peaks
    return []


def _sensors(record: RunRecord) -> dict[str, Any]:
    """Means over devices and readings; power: of all devices together."""
    readings = sensor_readings(record)
    power, celsius = readings["power_watts"], readings["celsius"]
    return {
        "utilisation_mean": _mean(readings["utilisation"]),
        "power_watts_mean": _mean(np.nansum(power, axis=0)) if power.size else None,
        "celsius_max": _finite(np.nanmax(celsius)) if celsius.size else None,
    }


def sensor_readings(record: RunRecord) -> dict[str, Grid]:
    """By sensor: a row for each device, a number for each reading, nan where it is missing.

    No row where there is no number at all.
    """
    return {
        name: _grid([event.values.get(f"{name}_by_device") for event in record.sensors])
        for name in ("utilisation", "power_watts", "celsius")
    }


def _grid(readings: Sequence[Any]) -> Grid:
    columns = [
        [number(value) for value in values[:_MAX_DEVICES]] if isinstance(values, list) else []
        for values in readings
    ]
    grid: Grid = np.full((max(map(len, columns), default=0), len(columns)), np.nan)
    for index, values in enumerate(columns):
        grid[: len(values), index] = values
    return grid[np.isfinite(grid).any(axis=1)]


def samples_seen(record: RunRecord) -> Column:
    """Samples consumed after each step that counts.

    A step's rate times its seconds is its number of samples, exactly but for rounding.
    """
    of_step = np.rint(np.nan_to_num(record.column("samples_per_second") * record.column("seconds")))
    return np.cumsum(np.clip(of_step, 0, _MAX_SAMPLES))


def where_time_went(record: RunRecord) -> dict[str, float]:
    """Seconds in which processes ran, over all starts, by what they were spent on.

    Time between starts is not counted.
    """
    wall = sum(start.last_time - start.time for start in record.starts)
    seconds = record.column("seconds")
    waiting = float(np.nansum(np.minimum(record.column("wait_seconds"), seconds)))
    parts = {
        "training": float(np.nansum(seconds)) - waiting,
        "waiting for data": waiting,
        "steps done again": record.totals.voided,
        "evaluating": record.totals.evaluating,
        "saving": record.totals.saving,
        "starting": sum(_starting_seconds(start) for start in record.starts),
    }
    return {**parts, "other": max(0.0, wall - sum(parts.values()))}


def _starting_seconds(start: Start) -> float:
    until = start.last_time if start.training_since is None else start.training_since
    return max(0.0, until - start.time)


def _finite(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None


def _mean(values: Column | Grid) -> float | None:
    finite = values[np.isfinite(values)]
    return float(finite.mean()) if len(finite) else None


def _median(column: Column) -> float | None:
    finite = column[np.isfinite(column)]
    return float(np.median(finite)) if len(finite) else None


def differences(records: Sequence[RunRecord]) -> dict[str, dict[str, list[Any]]]:
    """What is not the same for all runs: by key one value a run, None where a run has none.

    config: what they were asked; plan: what their plans made of it; environment: what they ran in
    """
    parts: dict[str, Callable[[RunRecord], Mapping[str, Any]]] = {
        "config": lambda record: record.config,
        "plan": plan_decisions,
        "environment": environment,
    }
    return {name: _differing([part(record) for record in records]) for name, part in parts.items()}


def _differing(runs: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    keys = dict.fromkeys(key for values in runs for key in values)
    rows = {key: [values.get(key) for values in runs] for key in keys}
    return {key: row for key, row in rows.items() if any(value != row[0] for value in row)}


def plan_decisions(record: RunRecord) -> dict[str, Any]:
    """The plan's decisions, as far as they bear on results, speed or memory."""
    plan_json, plan = record.plan_json, record.plan
    decisions = {name: plan_json.get(name) for name in _DECISIONS}
    decisions["devices"] = ", ".join(
        f"{count} x {name}" for name, count in devices(plan_json).items()
    )
    for name in ("processes", "threads", "recompute", "compress"):
        decisions[name] = plan_json.get(name)
    if plan is not None:
        decisions |= {
            "lr": plan.schedule.peak,
            "warmup": plan.schedule.warmup,
            "memory_estimate_bytes": plan.memory_estimate,
            "seed": plan.fixed.seed,
        }
    decisions["data"] = _section(plan_json, "fixed").get("fingerprint")
    return decisions


def environment(record: RunRecord) -> dict[str, Any]:
    """Of the last start.

    Versions from its newest checkpoint where an older version did not write them with the start.
    """
    values = dict(flat(record.starts[-1].environment)) if record.starts else {}
    if not values and record.checkpoints:
        versions = record.checkpoints[0].versions
        values = {f"versions.{name}": version for name, version in versions.items()}
    if record.plan:
        drivers = {device.driver for device in record.plan.devices if device.driver}
        if drivers:
            values["driver"] = ", ".join(sorted(drivers))
    return values
