"""The charts of one run, or of several in the same charts.

A chart without numbers is left out, and its name is given, so that the page can say so.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import chain

import numpy as np

from samecurve.core.events import Event
from samecurve.report.bars import memory_bars, time_bars
from samecurve.report.blocks import COLOURS, Block, Line, Mark, chart
from samecurve.report.columns import plain
from samecurve.report.record import RunRecord
from samecurve.report.steps import MEANS, Column, number
from samecurve.report.summary import NOT_METRICS, sensor_readings

_MAX_METRICS = 12
_MAX_MARKS = 200
_MAX_DEVICES = 16  # that have a line or a row each
_NEVER_MISSED = {"loss scale", "MFU", "memory over time", "temperature"}  # few runs have them
_MARKS = {"resumed", "restarted", "warned", "slow", "failed", "stopped", "finished"}
Charts = dict[str, Block | None]


def charts(records: Sequence[RunRecord], names: Sequence[str]) -> tuple[list[Block], list[str]]:
    """The charts, and the names of those that have no numbers."""
    drawn: Charts = {
        **_loss_charts(records, names),
        **_step_charts(records, names),
        "memory": memory_bars(records, names),
        **_sensor_charts(records, names),
        "where time went": time_bars(records, names),
    }
    blocks = _with_distinct_names([block for block in drawn.values() if block])
    missing = [what for what, block in drawn.items() if block is None]
    return blocks, [what for what in missing if what not in _NEVER_MISSED]


@dataclass(frozen=True)
class _Shown:
    """A column of steps as a chart shows it."""

    column: str
    name: str
    title: str
    form: str
    smooth: bool = True
    axis: dict[str, bool] = field(default_factory=dict)  # more keys of the y axis


_FROM_ZERO = {"from_zero": True}
_SHOWN = {
    "learning rate": _Shown("lr", "lr", "Learning rate", "lr", smooth=False),
    "gradient norm": _Shown(
        "grad_norm", "grad-norm", "Gradient norm, before clipping", "number", axis={"log": True}
    ),
    "MFU": _Shown("mfu", "mfu", "MFU, share of the devices' peak", "percent", axis=_FROM_ZERO),
    "data wait": _Shown(
        "wait_percent",
        "wait",
        "Waiting for data, of a step (slowest rank)",
        "percent100",
        axis=_FROM_ZERO,
    ),
    "loss scale": _Shown("scale", "scale", "Loss scale (f16)", "number", smooth=False),
}


def _loss_charts(records: Sequence[RunRecord], names: Sequence[str]) -> Charts:
    drawn: Charts = {"loss": _loss_chart(records, names)}
    means = list(dict.fromkeys(chain.from_iterable(record.steps.means for record in records)))
    for mean in means[:_MAX_METRICS]:
        shown = _Shown(MEANS + mean, f"training-{_file_name(mean)}", f"Training: {mean}", "number")
        drawn[f"training {mean}"] = _step_chart(records, names, shown)
    if len(means) > _MAX_METRICS:
        drawn[f"{len(means) - _MAX_METRICS} more of training"] = None
    for metric in _metrics(records):
        lines = _evaluation_lines(records, names if len(records) > 1 else [metric], metric)
        drawn[f"metric {metric}"] = chart(
            f"metric-{_file_name(metric)}", f"Validation: {metric}", lines, y="number"
        )
    return drawn


def _loss_chart(records: Sequence[RunRecord], names: Sequence[str]) -> Block | None:
    alone = len(records) == 1
    lines = _column_lines(records, ["training"] if alone else names, "loss")
    validation = _evaluation_lines(
        records, ["validation"] if alone else [f"{name}, validation" for name in names], "loss"
    )
    if not lines and not validation:
        return None
    if alone:
        for line in validation:
            line["colour"] = 1
    return chart(
        "loss",
        "Loss",
        [*lines, *validation],
        y={"format": "number", "log": True},
        smooth=True,
        marks=_marks(records[0]) if alone else [],
    )


def _column_lines(
    records: Sequence[RunRecord], labels: Sequence[str], column: str, shown: str = ""
) -> list[Line]:
    """A line for each run that has the column."""
    return [
        {"label": label, "run": index, "column": shown or column, **_style(index)}
        for index, (record, label) in enumerate(zip(records, labels, strict=True))
        if record.steps.has_values(column)
    ]


def _style(index: int) -> Line:
    """The colour of a run, and its dash where colours repeat."""
    return {"colour": index % COLOURS, "dash": index // COLOURS}


def _evaluation_lines(
    records: Sequence[RunRecord], labels: Sequence[str], metric: str
) -> list[Line]:
    lines: list[Line] = []
    for index, (record, label) in enumerate(zip(records, labels, strict=True)):
        values = np.array([number(event.values.get(metric)) for event in record.evaluated])
        if np.isfinite(values).any():
            steps = [float(event.step) for event in record.evaluated]
            line: Line = {"label": label, "run": index, "x": steps, "y": plain(values)}
            lines.append({**line, **_style(index), "points": True})
    return lines


def _marks(record: RunRecord) -> list[Mark]:
    """Marks of what interrupted a run: resumes, warnings, its end, updates that were left out."""
    skipped = record.steps.high("step")[record.steps.high("skipped") > 0]
    marks: list[Mark] = [
        {"run": 0, "step": int(step), "kind": "skipped", "text": "update left out"}
        for step in skipped[-_MAX_MARKS:]
    ]
    events = [event for event in record.notable if event.kind in _MARKS][-_MAX_MARKS:]
    for event in events:
        kind = "resumed" if event.kind == "restarted" else event.kind
        marks.append({"run": 0, "step": event.step, "kind": kind, "text": _mark_text(event)})
    return marks


def _mark_text(event: Event) -> str:
    text = str(event.values.get("text") or event.values.get("cause") or "")
    return f"{event.kind}: {text[:200]}" if text else event.kind


def _step_charts(records: Sequence[RunRecord], names: Sequence[str]) -> Charts:
    """Charts of each step's numbers beside the loss."""
    unit = "samples"
    if all(record.steps.has_values("tokens_per_second") for record in records):
        unit = "tokens"
    title = f"Throughput, {unit} a second"
    throughput = _Shown(f"{unit}_per_second", "throughput", title, "count", axis=_FROM_ZERO)
    shown = {"throughput": throughput, **_SHOWN}
    return {what: _step_chart(records, names, each) for what, each in shown.items()}


def _step_chart(records: Sequence[RunRecord], names: Sequence[str], shown: _Shown) -> Block | None:
    """The chart of a column. None: no run has it."""
    labels = names if len(records) > 1 else [shown.title]
    lines = _column_lines(records, labels, shown.column)
    if not lines:
        return None
    y = {"format": shown.form, **shown.axis}
    return chart(shown.name, shown.title, lines, y=y, smooth=shown.smooth)


@dataclass(frozen=True)
class _Sensor:
    """A sensor as a chart shows it."""

    sensor: str
    name: str
    title: str
    form: str
    over_devices: Callable[..., Column]  # np.nanmean, np.nanmax, np.nansum


_SENSORS = {
    "utilisation": _Sensor(
        "utilisation", "utilisation", "Utilisation of devices", "percent", np.nanmean
    ),
    "memory over time": _Sensor(
        "memory_bytes", "memory-time", "Memory of devices", "bytes", np.nanmax
    ),
    "power": _Sensor("power_watts", "power-watts", "Power of devices", "watts", np.nansum),
    "temperature": _Sensor("celsius", "celsius", "Temperature of devices", "celsius", np.nanmax),
}


def _sensor_charts(records: Sequence[RunRecord], names: Sequence[str]) -> Charts:
    readings = [sensor_readings(record) for record in records]
    return {
        what: _sensor_chart(records, names, [each[sensor.sensor] for each in readings], sensor)
        for what, sensor in _SENSORS.items()
    }


def _sensor_chart(
    records: Sequence[RunRecord],
    names: Sequence[str],
    readings: Sequence[Column],
    sensor: _Sensor,
) -> Block | None:
    """The chart of a sensor: a line for each device, or for each run one over its devices."""
    lines: list[Line] = []
    notes = set()
    unit, unit_seconds = _time_unit([_reading_times(record) for record in records])
    for index, (record, by_device) in enumerate(zip(records, readings, strict=True)):
        if not by_device.size:
            continue
        known = np.isfinite(by_device).any(axis=0)
        values = by_device[:, known]
        x = plain(_reading_times(record)[known] / unit_seconds)
        if len(records) == 1 and len(values) <= _MAX_DEVICES:
            lines += [
                {"label": f"device {device}", "x": x, "y": plain(row), **_style(device)}
                for device, row in enumerate(values)
            ]
            continue
        line: Line = {"label": names[index], "x": x, **_style(index)}
        line["y"] = plain(sensor.over_devices(values, axis=0))
        if sensor.over_devices is np.nansum:
            notes.add("all devices together")
        elif len(values) > 1:
            line["low"] = plain(np.nanmin(values, axis=0))
            line["high"] = plain(np.nanmax(values, axis=0))
            which = "mean" if sensor.over_devices is np.nanmean else "highest"
            notes.add(f"{which} of the devices; band: from the lowest to the highest")
        lines.append(line)
    if not lines:
        return None
    x_axis = {"kind": "own", "label": f"{unit} since the first reading"}
    y_axis = {"format": sensor.form, "from_zero": sensor.form != "celsius"}
    note = "; ".join(sorted(notes))
    return chart(sensor.name, sensor.title, lines, y=y_axis, x=x_axis, note=note)


def _reading_times(record: RunRecord) -> Column:
    """Seconds since the first reading."""
    times = np.array([event.time for event in record.sensors], np.float64)
    return times - times[:1]


def _time_unit(times: Sequence[Column]) -> tuple[str, float]:
    longest = max(float(each.max(initial=0.0)) for each in times)
    if longest < 300:
        return "seconds", 1.0
    if longest < 3 * 3600:
        return "minutes", 60.0
    return "hours", 3600.0


def _with_distinct_names(blocks: Sequence[Block]) -> list[Block]:
    """Add a number to charts whose names would be equal."""
    uses: dict[str, int] = {}
    distinct: list[Block] = []
    for block in blocks:
        uses[block["name"]] = count = uses.get(block["name"], 0) + 1
        name = block["name"] if count == 1 else f"{block['name']}-{count}"
        distinct.append({**block, "name": name})
    return distinct


def _file_name(metric: str) -> str:
    """A metric's name, in characters that a file name may have."""
    return re.sub("[^a-z0-9]+", "-", metric.lower()).strip("-")[:40] or "x"


def _metrics(records: Sequence[RunRecord]) -> list[str]:
    """Names of the evaluations' metrics beside the loss that are numbers."""
    events = chain.from_iterable(record.evaluated for record in records)
    names = {
        name: None
        for event in events
        for name, value in event.values.items()
        if name not in NOT_METRICS and np.isfinite(number(value))
    }
    return list(names)[:_MAX_METRICS]
