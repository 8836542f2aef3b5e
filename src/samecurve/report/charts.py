"""All the charts of a report, in their order.

A chart without numbers is left out, and the report names it.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain

import numpy as np

from samecurve.report.bars import memory_bars, time_bars, time_unit
from samecurve.report.canvas import Picture, canvas, legend_label
from samecurve.report.curves import (
    RunStyle,
    XAxis,
    file_name,
    finish_chart,
    loss_chart,
    metric_chart,
    step_chart,
    style_runs,
)
from samecurve.report.record import MEANS, RunRecord, number
from samecurve.report.summary import NOT_METRICS, samples_seen, sensor_readings
from samecurve.report.thinning import Column, thin

_MAX_METRICS = 12
_NEVER_MISSED = {"loss scale"}  # has numbers only in f16

Chart = Callable[[], Picture | None]


def draw(records: Sequence[RunRecord], names: Sequence[str]) -> tuple[list[Picture], list[str]]:
    """The charts, and the names of those that have no numbers."""
    runs = style_runs(records, names)
    charts: dict[str, Chart] = {
        **_loss_charts(records, runs),
        **_step_charts(records, runs),
        "memory": partial(memory_bars, records, names),
        "utilisation": partial(
            sensor_chart, runs, "utilisation", title="Utilisation of devices, %", scale=100.0
        ),
        "power": partial(sensor_chart, runs, "power_watts", title="Power of all devices, W"),
        "where time went": partial(time_bars, records, names),
    }
    drawn = {what: chart() for what, chart in charts.items()}
    pictures = _with_distinct_names([picture for picture in drawn.values() if picture])
    missing = [what for what, picture in drawn.items() if picture is None]
    return pictures, [what for what in missing if what not in _NEVER_MISSED]


def _loss_charts(records: Sequence[RunRecord], runs: Sequence[RunStyle]) -> dict[str, Chart]:
    """Charts of the loss and of evaluations. Several runs: also over time and over samples."""
    steps = _step_axis()
    charts: dict[str, Chart] = {"loss": partial(loss_chart, runs, steps, name="loss", title="Loss")}
    if len(records) > 1:
        hours = _time_axis(records)
        charts["loss over time"] = partial(
            loss_chart, runs, hours, name="loss-time", title="Loss over time"
        )
    if len({record.plan_json.get("batch") for record in records}) > 1:
        samples = XAxis("samples", samples_seen)
        charts["loss over samples"] = partial(
            loss_chart, runs, samples, name="loss-samples", title="Loss over samples"
        )
    means = list(dict.fromkeys(chain.from_iterable(record.means for record in records)))
    for mean in means[:_MAX_METRICS]:
        charts[f"training {mean}"] = partial(_mean_chart, runs, steps, mean)
    if len(means) > _MAX_METRICS:
        charts[f"{len(means) - _MAX_METRICS} more of training"] = _nothing
    for metric in _metrics(records):
        charts[f"metric {metric}"] = partial(metric_chart, runs, steps, metric)
    return charts


def _nothing() -> None:
    """No chart: metrics beyond the limit are only counted."""


def _mean_chart(runs: Sequence[RunStyle], x_axis: XAxis, mean: str) -> Picture | None:
    """The chart of a mean that the loss returns beside the loss value."""
    return step_chart(
        runs,
        x_axis,
        lambda record: record.column(MEANS + mean),
        name=f"training-{file_name(mean)}",
        title=f"Training: {legend_label(mean)}",
    )


def _step_charts(records: Sequence[RunRecord], runs: Sequence[RunStyle]) -> dict[str, Chart]:
    """Charts of each step's numbers beside the loss."""
    chart = partial(step_chart, runs, _step_axis())
    unit = "samples"
    if all(record.has_values("tokens_per_second") for record in records):
        unit = "tokens"
    return {
        "learning rate": partial(
            chart,
            lambda record: record.column("lr"),
            name="lr",
            title="Learning rate",
            smoothed=False,
        ),
        "gradient norm": partial(
            chart,
            lambda record: record.column("grad_norm"),
            name="grad-norm",
            title="Gradient norm, before clipping",
        ),
        "throughput": partial(
            chart,
            lambda record: record.column(f"{unit}_per_second"),
            name="throughput",
            title=f"Throughput, {unit} a second",
            from_zero=True,
        ),
        "data wait": partial(
            chart,
            _wait_percent,
            name="wait",
            title="Waiting for data, % of a step (slowest rank)",
            from_zero=True,
        ),
        "loss scale": partial(
            chart,
            lambda record: record.column("scale"),
            name="scale",
            title="Loss scale (f16)",
            smoothed=False,
        ),
    }


def sensor_chart(
    runs: Sequence[RunStyle], sensor: str, *, title: str, scale: float = 1.0
) -> Picture | None:
    """The chart of a sensor. None: no run has readings.

    Utilisation: the mean over a run's devices, and a band from the least to the most used device.
    Power: the sum over a run's devices.
    """
    readings = [sensor_readings(run.record)[sensor] * scale for run in runs]
    if not any(by_device.size for by_device in readings):
        return None
    is_sum = sensor == "power_watts"
    has_band = not is_sum and any(len(by_device) > 1 for by_device in readings)
    unit, unit_seconds = time_unit(max(_reading_times(run.record).max(initial=0.0) for run in runs))
    with canvas() as (figure, axes):
        for run, by_device in zip(runs, readings, strict=True):
            if not by_device.size:
                continue
            known = np.isfinite(by_device).any(axis=0)
            x, values = _reading_times(run.record)[known] / unit_seconds, by_device[:, known]
            over_devices = np.nansum if is_sum else np.nanmean
            axes.plot(
                *thin(x, over_devices(values, axis=0)),
                color=run.colour,
                linestyle=run.line,
                label="_" if len(runs) == 1 else run.legend,
                marker="o" if len(x) == 1 else None,
            )
            if not is_sum and len(values) > 1:
                low_x, low = thin(x, np.nanmin(values, axis=0))
                high_x, high = thin(x, np.nanmax(values, axis=0))
                axes.fill(
                    np.concatenate((low_x, high_x[::-1])),
                    np.concatenate((low, high[::-1])),
                    color=run.colour,
                    alpha=0.2,
                    linewidth=0,
                )
        axes.set_ylim(bottom=0)
        notes = []
        if has_band:
            notes.append("mean of the devices; band: from the least to the most used")
        return finish_chart(
            figure,
            axes,
            x_label=f"{unit} since the first reading",
            name=sensor.replace("_", "-"),
            title=title,
            notes=notes,
        )


def _reading_times(record: RunRecord) -> Column:
    """Seconds since the first reading."""
    times = np.array([event.time for event in record.sensors], np.float64)
    return times - times[:1]


def _with_distinct_names(pictures: Sequence[Picture]) -> list[Picture]:
    """Add a number to pictures whose file names would be equal."""
    uses: Counter[str] = Counter()
    distinct = []
    for picture in pictures:
        uses[picture.name] += 1
        if uses[picture.name] == 1:
            distinct.append(picture)
        else:
            distinct.append(replace(picture, name=f"{picture.name}-{uses[picture.name]}"))
    return distinct


def _step_axis() -> XAxis:
    return XAxis("step", lambda record: record.column("step"))


def _time_axis(records: Sequence[RunRecord]) -> XAxis:
    unit, unit_seconds = time_unit(
        max(float(np.nansum(record.column("seconds"))) for record in records)
    )
    return XAxis(
        f"{unit} of training (steps alone)",
        lambda record: np.cumsum(np.nan_to_num(record.column("seconds"))) / unit_seconds,
    )


def _wait_percent(record: RunRecord) -> Column:
    return np.minimum(100.0, 100.0 * record.column("wait_seconds") / record.column("seconds"))


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
