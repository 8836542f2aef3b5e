"""The charts of one run, or of several in the same charts.

A chart without numbers is left out, and a note names it.
"""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import chain
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from samecurve.seam import Event
from samecurve_products.report.bars import memory_bars, time_bars
from samecurve_products.report.blocks import COLOURS, Block, Line, chart, text
from samecurve_products.report.columns import plain
from samecurve_products.report.record import RunRecord
from samecurve_products.report.steps import MEANS, Column, number
from samecurve_products.report.summary import Grid, metrics_of, sensor_readings

_MAX_METRICS = 12
_MAX_MARKS = 200
_MAX_DEVICES = 16  # that have a line or a row each
_NEVER_MISSED = {"loss scale", "MFU", "memory over time", "temperature"}  # few runs have them
Charts = dict[str, Block | None]


class _Shown(NamedTuple):
    """A column of steps as a chart shows it."""

    column: str
    name: str
    title: str
    form: str
    axis: Mapping[str, bool] = MappingProxyType({})  # more keys of the y axis
    smooth: bool = True


_FROM_ZERO, _LOG = {"from_zero": True}, {"log": True}
_NORM, _WAIT = "Gradient norm, before clipping", "Waiting for data, of a step (slowest rank)"
_SHOWN = {
    "learning rate": _Shown("lr", "lr", "Learning rate", "lr", smooth=False),
    "gradient norm": _Shown("grad_norm", "grad-norm", _NORM, "number", _LOG),
    "MFU": _Shown("mfu", "mfu", "MFU, share of the devices' peak", "percent", _FROM_ZERO),
    "data wait": _Shown("wait_percent", "wait", _WAIT, "percent100", _FROM_ZERO),
    "loss scale": _Shown("scale", "scale", "Loss scale (f16)", "number", smooth=False),
}
_SENSORS = {  # sensor, chart's name, title, format, what is shown of a run's devices
    "utilisation": ("utilisation", "utilisation", "Utilisation", "percent", "mean"),
    "memory over time": ("memory_bytes", "memory-time", "Memory", "bytes", "highest"),
    "power": ("power_watts", "power-watts", "Power", "watts", "sum"),
    "temperature": ("celsius", "celsius", "Temperature", "celsius", "highest"),
}
_OVER_DEVICES: dict[str, Any] = {"mean": np.nanmean, "highest": np.nanmax, "sum": np.nansum}


def charts(records: Sequence[RunRecord], names: Sequence[str]) -> list[Block]:
    """The charts, and a note on those that have no numbers."""
    drawn: Charts = {
        "loss": _loss_chart(records, names),
        **_mean_charts(records, names),
        **_metric_charts(records, names),
        **_step_charts(records, names),
        "memory": memory_bars(records, names),
        **_sensor_charts(records, names),
        "where time went": time_bars(records, names),
    }
    blocks = _with_distinct_names([block for block in drawn.values() if block])
    empty = [what for what, block in drawn.items() if block is None]
    missing = ", ".join(what for what in empty if what not in _NEVER_MISSED)
    note = text(f"Not drawn, since there are no numbers for it: {missing}.", "quiet")
    return [*blocks, note] if missing else blocks


def _loss_chart(records: Sequence[RunRecord], names: Sequence[str]) -> Block | None:
    alone = len(records) == 1
    lines = _column_lines(records, ["training"] if alone else names, "loss")
    labels = ["validation"] if alone else [f"{name}, validation" for name in names]
    validation = _evaluation_lines(records, labels, "loss")
    if not lines and not validation:
        return None
    if alone:
        validation = [{**line, "colour": 1} for line in validation]
    return chart(
        "loss",
        "Loss",
        [*lines, *validation],
        y={"format": "number", "log": True},
        smooth=True,
        marks=_marks(records[0]) if alone else [],
    )


def _marks(record: RunRecord) -> list[dict[str, Any]]:
    """Marks of what interrupted a run: resumes, warnings, its end, updates that were left out."""
    skipped = record.steps.high("step")[record.steps.high("skipped") > 0]
    marks = [(int(step), "skipped", "update left out") for step in skipped[-_MAX_MARKS:]]
    for event in record.notable[-_MAX_MARKS:]:
        kind = "resumed" if event.kind == "restarted" else event.kind
        marks.append((event.step, kind, _mark_text(event)))
    return [{"run": 0, "step": step, "kind": kind, "text": words} for step, kind, words in marks]


def _mark_text(event: Event) -> str:
    words = str(event.values.get("text") or event.values.get("cause") or "")
    return f"{event.kind}: {words[:200]}" if words else event.kind


def _mean_charts(records: Sequence[RunRecord], names: Sequence[str]) -> Charts:
    """Charts of the means that the loss returns beside the loss value."""
    means = list(dict.fromkeys(chain.from_iterable(record.steps.means for record in records)))
    drawn: Charts = {}
    for mean in means[:_MAX_METRICS]:
        name, title = f"training-{_file_name(mean)}", f"Training: {mean}"
        shown = _Shown(MEANS + mean, name, title, "number")
        drawn[f"training {mean}"] = _step_chart(records, names, shown)
    if len(means) > _MAX_METRICS:
        drawn[f"{len(means) - _MAX_METRICS} more of training"] = None
    return drawn


def _metric_charts(records: Sequence[RunRecord], names: Sequence[str]) -> Charts:
    """Charts of the evaluations' metrics beside the loss that are numbers."""
    events = chain.from_iterable(record.evaluated for record in records)
    metrics = dict.fromkeys(
        name
        for event in events
        for name, value in metrics_of(event).items()
        if name != "loss" and value is not None
    )
    drawn: Charts = {}
    for metric in list(metrics)[:_MAX_METRICS]:
        lines = _evaluation_lines(records, names if len(records) > 1 else [metric], metric)
        name, title = f"metric-{_file_name(metric)}", f"Validation: {metric}"
        drawn[f"metric {metric}"] = chart(name, title, lines, y="number")
    return drawn


def _step_charts(records: Sequence[RunRecord], names: Sequence[str]) -> Charts:
    """Charts of each step's numbers beside the loss."""
    has_tokens = all(record.steps.has_values("tokens_per_second") for record in records)
    unit = "tokens" if has_tokens else "samples"
    title = f"Throughput, {unit} a second"
    throughput = _Shown(f"{unit}_per_second", "throughput", title, "count", _FROM_ZERO)
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


def _column_lines(records: Sequence[RunRecord], labels: Sequence[str], column: str) -> list[Line]:
    """A line for each run that has the column."""
    return [
        {"label": label, "run": index, "column": column, **_style(index)}
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


def _sensor_charts(records: Sequence[RunRecord], names: Sequence[str]) -> Charts:
    readings = [sensor_readings(record) for record in records]
    return {
        what: _sensor_chart(records, names, [each[shown[0]] for each in readings], shown)
        for what, shown in _SENSORS.items()
    }


def _sensor_chart(
    records: Sequence[RunRecord],
    names: Sequence[str],
    readings: Sequence[Grid],
    shown: tuple[str, str, str, str, str],
) -> Block | None:
    """The chart of a sensor: a line for each device, or for each run one over its devices."""
    _, name, title, form, over_devices = shown
    lines: list[Line] = []
    note = ""
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
        line["y"] = plain(_OVER_DEVICES[over_devices](values, axis=0))
        if over_devices == "sum":
            note = "all devices together"
        elif len(values) > 1:
            line["low"] = plain(np.nanmin(values, axis=0))
            line["high"] = plain(np.nanmax(values, axis=0))
            note = f"{over_devices} of the devices; band: from the lowest to the highest"
        lines.append(line)
    if not lines:
        return None
    x_axis = {"kind": "own", "label": f"{unit} since the first reading"}
    y_axis = {"format": form, "from_zero": form != "celsius"}
    return chart(name, f"{title} of devices", lines, y=y_axis, x=x_axis, note=note)


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
    uses: Counter[str] = Counter()
    distinct: list[Block] = []
    for block in blocks:
        name = block["name"]
        uses[name] += 1
        distinct.append({**block, "name": name if uses[name] == 1 else f"{name}-{uses[name]}"})
    return distinct


def _file_name(metric: str) -> str:
    """A metric's name, in characters that a file name may have."""
    return re.sub("[^a-z0-9]+", "-", metric.lower()).strip("-")[:40] or "x"
