"""The numbers of a report: one run's summary, where its time went, and what two or more runs have
in common or not.

All from every step's exact figures, not from what is drawn. A figure that is not known is None.
"""

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from samecurve.core.planning.plan import Plan
from samecurve.observe.report.reading import RunRecord, Start, flat, number
from samecurve.observe.report.thinning import Column, window

NOT_METRICS = {"loss", "best_loss", "best_step", "seconds"}  # of an `evaluated` line
Grid = NDArray[np.float64]

_MOST_DEVICES = 4096
_MOST_SAMPLES = 1e12  # of one step: no more is a number of samples
_RESULT = (
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
    """finished, stopped, failed, running, cut off (no line says how it ended, and nobody holds it),
    not started.
    """
    if not record.starts:
        return "starting" if record.live else "not started"
    return record.starts[-1].end or ("running" if record.live else "cut off")


@np.errstate(all="ignore")  # a damaged journal may hold any number
def summary(record: RunRecord) -> dict[str, Any]:
    steps = record.column("step")
    return {
        "run": str(record.directory),
        "outcome": outcome(record),
        "step": int(steps[-1]) if record.num_steps else 0,
        **{name: record.plan_json.get(name) for name in _RESULT},
        "devices": dict(devices(record.plan_json)),
        "world": sum(devices(record.plan_json).values()),
        "lr": _of(record.plan_json, "schedule").get("peak"),
        **_losses(record),
        **_times(record),
        **_rates(record),
        **_memory(record),
        **_sensed(record),
        "starts": len(record.starts),
        "warnings": sum(event.kind in {"warned", "slow"} for event in record.notable),
        "skipped": int((record.column("skipped") > 0).sum()),
    }


def devices(plan: Mapping[str, Any]) -> Counter[str]:
    """How many of which name."""
    found = plan.get("devices")
    return (
        Counter(str(_of({"device": device}, "device").get("name")) for device in found)
        if isinstance(found, list)
        else Counter()
    )


def _of(values: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """A section of what a file said, {} if it is none."""
    found = values.get(name)
    return found if isinstance(found, Mapping) else {}


def _losses(record: RunRecord) -> dict[str, Any]:
    loss, last = record.column("loss"), record.evaluated[-1] if record.evaluated else None
    width = window(record.num_steps)
    best = min(
        ((number(event.values.get("loss"), math.inf), event.step) for event in record.evaluated),
        default=(math.inf, 0),
    )
    return {
        "loss": _known(loss[-1]) if record.num_steps else None,
        "loss_mean": _mean(loss[-width:]),
        "loss_mean_steps": min(width, record.num_steps),
        "best_loss": _known(best[0]),
        "best_step": best[1] if math.isfinite(best[0]) else None,
        "evaluated_at": last.step if last else None,
        "evaluated": (
            {
                name: _known(number(value))
                for name, value in last.values.items()
                if name not in NOT_METRICS - {"loss"} and not isinstance(value, list)
            }
            if last
            else {}
        ),
    }


def _times(record: RunRecord) -> dict[str, Any]:
    spent = where_time_went(record)
    wall = sum(spent.values())
    kept = float(np.nansum(record.column("seconds")))
    return {
        "wall_seconds": wall,
        "training_seconds": kept,
        "goodput": min(1.0, kept / wall) if wall else None,
        "voided_steps": record.totals.voided_steps,
        "seconds_by_use": spent,
    }


def _rates(record: RunRecord) -> dict[str, Any]:
    seconds = record.column("seconds")
    share = record.column("wait_seconds") / seconds if record.num_steps else seconds
    samples = samples_seen(record)
    rates = {
        name: _median(record.column(name))
        for name in ("samples_per_second", "tokens_per_second", "mfu")
    }
    return {
        "samples_seen": int(samples[-1]) if record.num_steps else 0,
        "step_seconds": _median(seconds),
        **rates,
        "wait_share": _median(np.minimum(share, 1.0)),
    }


def _memory(record: RunRecord) -> dict[str, Any]:
    peaks: list[Any] = next(
        (
            start.end_values["memory_bytes_by_device"]
            for start in reversed(record.starts)
            if isinstance(start.end_values.get("memory_bytes_by_device"), list)
        ),
        [],
    )
    known = [int(number(peak, 0.0)) for peak in peaks]
    column = record.column("memory_bytes")
    largest = max([*known, int(np.nanmax(column)) if record.has_values("memory_bytes") else 0])
    return {
        "memory_bytes": largest or None,
        "memory_bytes_by_device": known,
        "memory_estimate_bytes": record.plan.memory_estimate if record.plan else None,
    }


def _sensed(record: RunRecord) -> dict[str, Any]:
    """Means over devices and readings; power: of all devices together."""
    read = sensed(record)
    return {
        "utilisation_mean": _mean(read["utilisation"]),
        "power_watts_mean": (
            _mean(np.nansum(read["power_watts"], axis=0)) if read["power_watts"].size else None
        ),
        "celsius_max": _known(np.nanmax(read["celsius"])) if read["celsius"].size else None,
    }


def sensed(record: RunRecord) -> dict[str, Grid]:
    """By figure: a row for each device, a number for each reading, nan where it is missing; no row
    where there is no number at all.
    """
    return {
        name: _grid([event.values.get(f"{name}_by_device") for event in record.sensors])
        for name in ("utilisation", "power_watts", "celsius")
    }


def _grid(read: Sequence[Any]) -> Grid:
    lists = [
        [number(value) for value in values[:_MOST_DEVICES]] if isinstance(values, list) else []
        for values in read
    ]
    found: Grid = np.full((max(map(len, lists), default=0), len(lists)), np.nan)
    for at, values in enumerate(lists):
        found[: len(values), at] = values
    return found[np.isfinite(found).any(axis=1)]


def samples_seen(record: RunRecord) -> Column:
    """Samples consumed after each step that counts.

    A step's rate times its seconds is its number of samples, exactly but for rounding.
    """
    return np.cumsum(
        np.clip(
            np.rint(np.nan_to_num(record.column("samples_per_second") * record.column("seconds"))),
            0,
            _MOST_SAMPLES,
        )
    )


def where_time_went(record: RunRecord) -> dict[str, float]:
    """Seconds in which processes ran, over all starts, by what they were spent on; time between
    starts is not counted.
    """
    totals = record.totals
    wall = sum(start.last_time - start.time for start in record.starts)
    starting = sum(_starting(start) for start in record.starts)
    seconds = record.column("seconds")
    waiting = float(np.nansum(np.minimum(record.column("wait_seconds"), seconds)))
    parts = {
        "training": float(np.nansum(seconds)) - waiting,
        "waiting for data": waiting,
        "steps done again": totals.voided,
        "evaluating": totals.evaluating,
        "saving": totals.saving,
        "starting": starting,
    }
    return {**parts, "other": max(0.0, wall - sum(parts.values()))}


def _starting(start: Start) -> float:
    return max(
        0.0,
        (start.last_time if start.training_since is None else start.training_since) - start.time,
    )


def _known(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None


def _mean(column: Column | Grid) -> float | None:
    finite = column[np.isfinite(column)]
    return float(finite.mean()) if len(finite) else None


def _median(column: Column) -> float | None:
    finite = column[np.isfinite(column)]
    return float(np.median(finite)) if len(finite) else None


def differences(records: Sequence[RunRecord]) -> dict[str, dict[str, list[Any]]]:
    """What the runs were asked, what their plans made of it, and what they ran in, where it is not
    the same for all: by key one value a run, None where a run has none.
    """
    sides: dict[str, Callable[[RunRecord], Mapping[str, Any]]] = {
        "config": lambda record: record.config,
        "plan": planned,
        "environment": environment,
    }
    found = {}
    for name, side in sides.items():
        values = [side(record) for record in records]
        rows = {
            key: [own.get(key) for own in values]
            for key in dict.fromkeys(key for own in values for key in own)
        }
        found[name] = {
            key: row for key, row in rows.items() if any(value != row[0] for value in row)
        }
    return found


def planned(record: RunRecord) -> dict[str, Any]:
    """The plan's decisions, as far as they bear on results, speed or memory."""
    plan, made = record.plan_json, record.plan
    derived = (
        {
            "lr": made.schedule.peak,
            "warmup": made.schedule.warmup,
            "memory_estimate_bytes": made.memory_estimate,
            "seed": made.fixed.seed,
        }
        if isinstance(made, Plan)
        else {}
    )
    fixed = _of(plan, "fixed")
    return {
        **{name: plan.get(name) for name in _RESULT},
        "devices": ", ".join(f"{count} x {name}" for name, count in devices(plan).items()),
        "processes": plan.get("processes"),
        "threads": plan.get("threads"),
        "recompute": plan.get("recompute"),
        "compress": plan.get("compress"),
        **derived,
        "data": fixed.get("fingerprint"),
    }


def environment(record: RunRecord) -> dict[str, Any]:
    """Of the last start; versions from its newest checkpoint where an older version did not write
    them with the start.
    """
    found = dict(flat(record.starts[-1].environment)) if record.starts else {}
    if not found and record.checkpoints:
        found = {
            f"versions.{name}": version for name, version in record.checkpoints[0].versions.items()
        }
    drivers = (
        {device.driver for device in record.plan.devices if device.driver} if record.plan else set()
    )
    return {**found, **({"driver": ", ".join(sorted(drivers))} if drivers else {})}
