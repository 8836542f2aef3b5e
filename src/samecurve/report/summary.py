"""The numbers of a report.

They are: one run's summary, where its time went, and what differs between runs. All numbers come
from every step's exact numbers, not from the charts. An unknown number is None.
"""

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import TypedDict

import numpy as np
from numpy.typing import NDArray

from samecurve.core.events import BESIDE_METRICS, Event
from samecurve.report.reading import flat
from samecurve.report.record import RunRecord, Start, as_mapping, number
from samecurve.report.thinning import Column, window

Grid = NDArray[np.float64]

NOT_METRICS = {"loss", *BESIDE_METRICS}
_MAX_DEVICES = 4096
_MAX_SAMPLES = 1e12  # most samples of one step; a larger number is damaged


class Decisions(TypedDict):
    """Decisions of the plan, from plan.json. None: plan.json lacks the decision."""

    engine: object
    strategy: object
    backend: object
    precision: object
    batch: object
    micro: object
    rounds: object
    steps: object
    samples: object
    exact: object


class Losses(TypedDict):
    """Losses of a run. None: there is no such loss, or it is not finite."""

    loss: float | None  # of the last step
    loss_mean: float | None  # of the last loss_mean_steps steps
    loss_mean_steps: int
    best_loss: float | None  # the lowest of the evaluations
    best_step: int | None
    evaluated_at: int | None  # step of the last evaluation
    evaluated: dict[str, float | None]  # its loss and metrics


class Times(TypedDict):
    wall_seconds: float  # in which the run's processes ran
    training_seconds: float  # of the steps that no resume made void
    goodput: float | None  # their share
    voided_steps: int
    seconds_by_use: dict[str, float]


class Rates(TypedDict):
    """Rates of a run, as medians over steps."""

    samples_seen: int
    step_seconds: float | None
    samples_per_second: float | None
    tokens_per_second: float | None
    mfu: float | None
    wait_share: float | None  # of a step


class Memory(TypedDict):
    memory_bytes: int | None  # the largest peak of a device
    memory_bytes_by_device: list[int]
    memory_estimate_bytes: int | None


class Sensors(TypedDict):
    """Sensor values, as means over devices and readings."""

    utilisation_mean: float | None
    power_watts_mean: float | None  # of all devices together
    celsius_max: float | None


class Summary(Decisions, Losses, Times, Rates, Memory, Sensors):
    """The numbers of a run."""

    run: str  # its directory
    outcome: str
    step: int  # the last step; 0: there is none
    devices: dict[str, int]  # names of devices and their numbers
    world: int  # number of devices
    lr: object  # its peak
    starts: int
    warnings: int
    skipped: int  # steps whose update was left out


def outcome(record: RunRecord) -> str:
    """finished, stopped, failed, running, starting, not started, or cut off.

    cut off: no line says how the run ended, and no process holds its lock
    """
    if record.starts and record.starts[-1].end:
        return record.starts[-1].end
    if record.live:
        return "running" if record.starts else "starting"
    return "cut off" if record.starts else "not started"


@np.errstate(all="ignore")  # a damaged journal may hold any number
def summary(record: RunRecord) -> Summary:
    plan, steps = record.plan_json, record.column("step")
    return {
        "run": str(record.directory),
        "outcome": outcome(record),
        "step": int(steps[-1]) if record.num_steps else 0,
        **_decisions(plan),
        "devices": dict(devices(plan)),
        "world": sum(devices(plan).values()),
        "lr": as_mapping(plan.get("schedule")).get("peak"),
        **_losses(record),
        **_times(record),
        **_rates(record),
        **_memory(record),
        **_sensors(record),
        "starts": len(record.starts),
        "warnings": sum(event.kind in {"warned", "slow"} for event in record.notable),
        "skipped": int((record.column("skipped") > 0).sum()),
    }


def _decisions(plan: Mapping[str, object]) -> Decisions:
    return {
        "engine": plan.get("engine"),
        "strategy": plan.get("strategy"),
        "backend": plan.get("backend"),
        "precision": plan.get("precision"),
        "batch": plan.get("batch"),
        "micro": plan.get("micro"),
        "rounds": plan.get("rounds"),
        "steps": plan.get("steps"),
        "samples": plan.get("samples"),
        "exact": plan.get("exact"),
    }


def devices(plan: Mapping[str, object]) -> Counter[str]:
    """The devices' names, each with its number of devices."""
    entries = plan.get("devices")
    if not isinstance(entries, list):
        return Counter()
    return Counter(str(as_mapping(entry).get("name")) for entry in entries)


def _losses(record: RunRecord) -> Losses:
    loss = record.column("loss")
    width = window(record.num_steps)
    evaluated = [
        (number(event.values.get("loss"), math.inf), event.step) for event in record.evaluated
    ]
    best_loss, best_step = min(evaluated, default=(math.inf, 0))
    losses: Losses = {
        "loss": _mean(loss[-1:]),
        "loss_mean": _mean(loss[-width:]),
        "loss_mean_steps": min(width, record.num_steps),
        "best_loss": None,
        "best_step": None,
        "evaluated_at": None,
        "evaluated": {},
    }
    if math.isfinite(best_loss):
        losses["best_loss"], losses["best_step"] = best_loss, best_step
    if record.evaluated:
        last = record.evaluated[-1]
        losses["evaluated_at"], losses["evaluated"] = last.step, _metrics_of(last)
    return losses


def _metrics_of(evaluated: Event) -> dict[str, float | None]:
    """The loss and the task's metrics of an evaluation."""
    left_out = NOT_METRICS - {"loss"}
    return {
        name: _finite_or_none(value)
        for name, value in evaluated.values.items()
        if name not in left_out and not isinstance(value, list)
    }


def _finite_or_none(value: object) -> float | None:
    as_float = number(value)
    if math.isnan(as_float):
        return None
    return as_float


def _times(record: RunRecord) -> Times:
    seconds_by_use = where_time_went(record)
    wall = sum(seconds_by_use.values())
    training = float(np.nansum(record.column("seconds")))
    goodput = None
    if wall:
        goodput = min(1.0, training / wall)
    return {
        "wall_seconds": wall,
        "training_seconds": training,
        "goodput": goodput,
        "voided_steps": record.totals.voided_steps,
        "seconds_by_use": seconds_by_use,
    }


def _rates(record: RunRecord) -> Rates:
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


def _memory(record: RunRecord) -> Memory:
    peak_bytes = [int(number(peak, 0.0)) for peak in _peaks_by_device(record)]
    of_steps = record.column("memory_bytes")
    largest = int(of_steps[np.isfinite(of_steps)].max(initial=0))
    return {
        "memory_bytes": max([*peak_bytes, largest]) or None,
        "memory_bytes_by_device": peak_bytes,
        "memory_estimate_bytes": record.plan.memory_estimate if record.plan else None,
    }


def _peaks_by_device(record: RunRecord) -> list[object]:
    """Peak bytes of each device in the last start that ended normally; []: there is none."""
    for start in reversed(record.starts):
        peaks = start.end_values.get("memory_bytes_by_device")
        if isinstance(peaks, list):
            return peaks
    return []


def _sensors(record: RunRecord) -> Sensors:
    readings = sensor_readings(record)
    sensors: Sensors = {
        "utilisation_mean": _mean(readings["utilisation"]),
        "power_watts_mean": None,
        "celsius_max": None,
    }
    if readings["power_watts"].size:
        sensors["power_watts_mean"] = _mean(np.nansum(readings["power_watts"], axis=0))
    if readings["celsius"].size:
        sensors["celsius_max"] = float(np.nanmax(readings["celsius"]))
    return sensors


def sensor_readings(record: RunRecord) -> dict[str, Grid]:
    """Readings by sensor: a row for each device, a number for each reading; nan: missing.

    A sensor without any number has no rows.
    """
    return {
        name: _grid([event.values.get(f"{name}_by_device") for event in record.sensors])
        for name in ("utilisation", "power_watts", "celsius")
    }


def _grid(readings: Sequence[object]) -> Grid:
    columns: list[list[float]] = []
    for values in readings:
        of_devices = values[:_MAX_DEVICES] if isinstance(values, list) else []
        columns.append([number(value) for value in of_devices])
    grid: Grid = np.full((max(map(len, columns), default=0), len(columns)), np.nan)
    for index, values in enumerate(columns):
        grid[: len(values), index] = values
    return grid[np.isfinite(grid).any(axis=1)]


def samples_seen(record: RunRecord) -> Column:
    """The number of samples consumed up to each step.

    The samples of a step are its rate times its seconds, rounded.
    """
    of_step = np.rint(np.nan_to_num(record.column("samples_per_second") * record.column("seconds")))
    return np.cumsum(np.clip(of_step, 0, _MAX_SAMPLES))


def where_time_went(record: RunRecord) -> dict[str, float]:
    """Seconds of the run's processes over all starts, by what they were spent on.

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
    until = start.training_since
    if until is None:
        until = start.last_time
    return max(0.0, until - start.time)


def _mean(values: Column | Grid) -> float | None:
    finite = values[np.isfinite(values)]
    if not len(finite):
        return None
    return float(finite.mean())


def _median(column: Column) -> float | None:
    finite = column[np.isfinite(column)]
    if not len(finite):
        return None
    return float(np.median(finite))


def differences(records: Sequence[RunRecord]) -> dict[str, dict[str, list[object]]]:
    """Values that differ between runs: by key one value for each run, None if a run has none.

    config: values of the configs
    plan: decisions of the plans
    environment: versions and machines
    """
    parts: dict[str, Callable[[RunRecord], Mapping[str, object]]] = {
        "config": lambda record: record.config,
        "plan": plan_decisions,
        "environment": environment,
    }
    return {name: _differing([part(record) for record in records]) for name, part in parts.items()}


def _differing(runs: Sequence[Mapping[str, object]]) -> dict[str, list[object]]:
    keys = dict.fromkeys(key for values in runs for key in values)
    rows = {key: [values.get(key) for values in runs] for key in keys}
    return {key: row for key, row in rows.items() if any(value != row[0] for value in row)}


def plan_decisions(record: RunRecord) -> dict[str, object]:
    """The plan's decisions that affect results, speed or memory."""
    plan_json, plan = record.plan_json, record.plan
    decisions: dict[str, object] = {**_decisions(plan_json)}
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
    decisions["data"] = as_mapping(plan_json.get("fixed")).get("fingerprint")
    return decisions


def environment(record: RunRecord) -> dict[str, object]:
    """The environment of the last start.

    If the start has no versions (older journals), they come from the newest checkpoint.
    """
    values: dict[str, object] = {}
    if record.starts:
        values |= flat(record.starts[-1].environment)
    if not values and record.checkpoints:
        versions = record.checkpoints[0].versions
        values = {f"versions.{name}": version for name, version in versions.items()}
    if record.plan:
        drivers = {device.driver for device in record.plan.layout.devices if device.driver}
        if drivers:
            values["driver"] = ", ".join(sorted(drivers))
    return values
