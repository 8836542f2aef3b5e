"""The numbers of a report.

They are: one run's summary, where its time went, and what differs between runs. Sums come from
every step; medians from at most 2048 steps, evenly chosen. An unknown number is None.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypedDict, cast

import numpy as np
from numpy.typing import NDArray

from samecurve.core.events import BESIDE_METRICS
from samecurve.seam import Event
from samecurve_products.report.reading import flat
from samecurve_products.report.record import RunRecord, as_mapping, devices, show_devices
from samecurve_products.report.steps import number

Grid = NDArray[np.float64]

_MAX_DEVICES = 4096


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


class Summary(Decisions):
    """The numbers of a run. None: not known, or not finite."""

    run: str  # its directory
    outcome: str
    step: int  # the last step; 0: there is none
    devices: dict[str, int]  # names of devices and their numbers
    world: int  # number of devices
    lr: float | None  # its peak
    # losses
    loss: float | None  # of the last step
    loss_mean: float | None  # of the last loss_mean_steps steps
    loss_mean_steps: int
    best_loss: float | None  # the lowest of the evaluations
    best_step: int | None
    evaluated_at: int | None  # step of the last evaluation
    evaluated: dict[str, float | None]  # its loss and metrics
    # times
    wall_seconds: float  # in which the run's processes ran
    training_seconds: float  # of the steps that no resume made void
    goodput: float | None  # their share
    voided_steps: int
    seconds_by_use: dict[str, float]
    # rates: medians over steps
    samples_seen: int
    step_seconds: float | None
    samples_per_second: float | None
    tokens_per_second: float | None
    mfu: float | None
    wait_share: float | None  # of a step
    # memory
    memory_bytes: int | None  # the largest peak of a device
    memory_bytes_by_device: list[int]
    memory_estimate_bytes: int | None
    # sensors: over devices and readings
    utilisation_mean: float | None
    power_watts_mean: float | None  # of all devices together
    celsius_max: float | None
    # the number of
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
    plan, steps = record.plan_json, record.steps
    uses = where_time_went(record)
    wall, training = sum(uses.values()), steps.total("seconds")
    points = -(-_window(len(steps)) // steps.each)  # over which the loss is taken
    count = float(steps.counts("loss")[-points:].sum())
    evaluation = record.evaluated[-1] if record.evaluated else None
    best_loss = _finite(record.best.values.get("loss")) if record.best else None
    peaks = [int(number(peak, 0.0)) for peak in _peaks_by_device(record)]
    step_peaks = steps.high("memory_bytes")
    largest = int(step_peaks[np.isfinite(step_peaks)].max(initial=0))
    readings = sensor_readings(record)
    watts, celsius = readings["power_watts"], readings["celsius"]
    return {
        "run": str(record.directory),
        "outcome": outcome(record),
        "step": int(steps.last("step")) if len(steps) else 0,
        **_decisions(plan),
        "devices": dict(devices(plan)),
        "world": sum(devices(plan).values()),
        "lr": _finite(as_mapping(plan.get("schedule")).get("peak")),
        "loss": _finite(steps.last("loss")),
        "loss_mean": float(steps.sums("loss")[-points:].sum()) / count if count else None,
        "loss_mean_steps": min(points * steps.each, len(steps)),
        "best_loss": best_loss,
        "best_step": record.best.step if record.best and best_loss is not None else None,
        "evaluated_at": evaluation.step if evaluation else None,
        "evaluated": metrics_of(evaluation) if evaluation else {},
        "wall_seconds": wall,
        "training_seconds": training,
        "goodput": min(1.0, training / wall) if wall else None,
        "voided_steps": record.totals.voided_steps,
        "seconds_by_use": uses,
        "samples_seen": int(steps.total("samples")),
        "step_seconds": _of_finite(np.median, steps.first("seconds")),
        "samples_per_second": _of_finite(np.median, steps.first("samples_per_second")),
        "tokens_per_second": _of_finite(np.median, steps.first("tokens_per_second")),
        "mfu": _of_finite(np.median, steps.first("mfu")),
        "wait_share": _of_finite(np.median, steps.first("wait_percent") / 100),
        "memory_bytes": max([*peaks, largest]) or None,
        "memory_bytes_by_device": peaks,
        "memory_estimate_bytes": record.plan.memory_estimate if record.plan else None,
        "utilisation_mean": _of_finite(np.mean, readings["utilisation"]),
        "power_watts_mean": _of_finite(np.mean, np.nansum(watts, axis=0)) if watts.size else None,
        "celsius_max": _of_finite(np.max, celsius),
        "starts": record.totals.starts,
        "warnings": record.counts["warned"] + record.counts["slow"],
        "skipped": int(steps.total("skipped")),
    }


def _decisions(plan: Mapping[str, object]) -> Decisions:
    return cast("Decisions", {name: plan.get(name) for name in Decisions.__annotations__})


def _window(count: int) -> int:
    """The number of last steps whose mean is the run's loss: a fiftieth; 1 below 200 steps."""
    return count // 50 | 1 if count >= 200 else 1


def _finite(value: object) -> float | None:
    as_float = number(value)
    return None if math.isnan(as_float) else as_float


def metrics_of(evaluated: Event) -> dict[str, float | None]:
    """The loss and the metrics of an evaluation that are no arrays."""
    return {
        name: _finite(value)
        for name, value in evaluated.values.items()
        if name not in BESIDE_METRICS and not isinstance(value, list)
    }


def _peaks_by_device(record: RunRecord) -> list[object]:
    """Peak bytes of each device in the last start that ended normally; []: there is none."""
    for start in reversed(record.starts):
        peaks = start.end_values.get("memory_bytes_by_device")
        if isinstance(peaks, list):
            return peaks
    return []


def sensor_readings(record: RunRecord) -> dict[str, Grid]:
    """Readings by sensor: a row for each device, a number for each reading; nan: missing.

    A sensor without any number has no rows.
    """
    return {
        name: _grid([event.values.get(f"{name}_by_device") for event in record.sensors])
        for name in ("utilisation", "memory_bytes", "power_watts", "celsius")
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


def where_time_went(record: RunRecord) -> dict[str, float]:
    """Seconds of the run's processes over all starts, by what they were spent on.

    Time between starts is not counted.
    """
    totals = record.totals
    wall = totals.wall + sum(start.wall_seconds for start in record.starts)
    training, waiting = record.steps.total("seconds"), record.steps.total("waited")
    parts = {
        "training": training - waiting,
        "waiting for data": waiting,
        "steps done again": totals.voided,
        "evaluating": totals.evaluating,
        "saving": totals.saving,
        "starting": totals.starting + sum(start.starting_seconds for start in record.starts),
    }
    return {**parts, "other": max(0.0, wall - sum(parts.values()))}


def _of_finite(reduce: Callable[[Grid], Any], values: Grid) -> float | None:
    """A number of the finite values, such as their median; None: there is none."""
    finite = values[np.isfinite(values)]
    return float(reduce(finite)) if len(finite) else None


def differences(records: Sequence[RunRecord]) -> dict[str, dict[str, list[object]]]:
    """Values that differ between runs: by key one value for each run, None if a run has none.

    config: values of the configs
    plan: decisions of the plans
    environment: versions and machines
    """
    return {
        "config": _differing([record.config for record in records]),
        "plan": _differing([plan_decisions(record) for record in records]),
        "environment": _differing([environment(record) for record in records]),
    }


def _differing(runs: Sequence[Mapping[str, object]]) -> dict[str, list[object]]:
    keys = dict.fromkeys(key for values in runs for key in values)
    rows = {key: [values.get(key) for values in runs] for key in keys}
    return {key: row for key, row in rows.items() if any(value != row[0] for value in row)}


def plan_decisions(record: RunRecord) -> dict[str, object]:
    """The plan's decisions that affect results, speed or memory."""
    plan_json, plan = record.plan_json, record.plan
    names = ("processes", "threads", "recompute", "compress")
    decisions: dict[str, object] = {
        **_decisions(plan_json),
        "devices": show_devices(devices(plan_json)),
        **{name: plan_json.get(name) for name in names},
        "data": as_mapping(plan_json.get("fixed")).get("fingerprint"),
    }
    if plan is not None:
        decisions |= {
            "lr": plan.schedule.peak,
            "warmup": plan.schedule.warmup,
            "memory_estimate_bytes": plan.memory_estimate,
            "seed": plan.fixed.seed,
        }
    return decisions


def environment(record: RunRecord) -> dict[str, object]:
    """The environment of the last start.

    If the start has no versions (older journals), they come from the newest checkpoint.
    """
    values: dict[str, object] = {**flat(record.environment)}
    if not values and record.checkpoints:
        versions = record.checkpoints[0].versions
        values = {f"versions.{name}": version for name, version in versions.items()}
    if record.plan:
        drivers = {device.driver for device in record.plan.layout.devices if device.driver}
        if drivers:
            values["driver"] = ", ".join(sorted(drivers))
    return values
