"""The figures of a report.

One run: raw curve, smoothed curve, marks where it was interrupted. Several: one smoothed curve a
run, over each other.

What has no numbers is left out and named, so that a missing figure is no riddle.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from samecurve.observe.report.bars import memory_bars, time_bars, time_unit
from samecurve.observe.report.canvas import (
    COLOURS,
    SERIES,
    STYLES,
    Picture,
    canvas,
    legend_label,
    save_picture,
)
from samecurve.observe.report.reading import RunRecord, number
from samecurve.observe.report.summary import NOT_METRICS, samples_seen, sensed
from samecurve.observe.report.thinning import Column, smooth, thin, window
from samecurve.units import show_count

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_MOST_MARKS = 200
_MOST_METRICS = 12
_MARKS = {
    "resumed": ("|", "ink", "resumed"),
    "restarted": ("d", "ink", "restarted"),
    "warned": ("^", "warn", "warned"),
    "slow": ("v", "warn", "slow"),
    "failed": ("x", "bad", "failed"),
}


@dataclass(frozen=True)
class Across:
    """An x axis.

    values: a record's, one for each step that counts. at: where a number of steps lies on it.
    """

    label: str
    values: Callable[[RunRecord], Column]

    def at(self, record: RunRecord, steps: Sequence[int]) -> Column:
        if not record.num_steps:
            return np.array(steps, np.float64)
        return np.interp(steps, record.column("step"), self.values(record))


def draw(records: Sequence[RunRecord], names: Sequence[str]) -> tuple[list[Picture], list[str]]:
    """The figures, and what could not be drawn for want of numbers."""
    steps = Across("step", lambda record: record.column("step"))
    makers: list[tuple[str, Callable[[], Picture | None]]] = [
        ("loss", lambda: _loss(records, names, steps, "loss", "Loss"))
    ]
    if len(records) > 1:
        makers.append(
            (
                "loss over time",
                lambda: _loss(records, names, _hours(records), "loss-time", "Loss over time"),
            )
        )
        if len({record.plan_json.get("batch") for record in records}) > 1:
            seen = Across("samples", samples_seen)
            makers.append(
                (
                    "loss over samples",
                    lambda: _loss(records, names, seen, "loss-samples", "Loss over samples"),
                )
            )
    makers += [
        (metric, lambda metric=metric: _metric(records, names, steps, metric))  # type: ignore[misc]
        for metric in _metrics(records)
    ]
    tokens = all(record.has_values("tokens_per_second") for record in records)
    rate = "tokens_per_second" if tokens else "samples_per_second"
    makers += [
        (
            "learning rate",
            lambda: _curve(
                records,
                names,
                steps,
                "lr",
                "Learning rate",
                lambda record: record.column("lr"),
                raw=False,
            ),
        ),
        (
            "gradient norm",
            lambda: _curve(
                records,
                names,
                steps,
                "grad-norm",
                "Gradient norm, before clipping",
                lambda record: record.column("grad_norm"),
            ),
        ),
        (
            "throughput",
            lambda: _curve(
                records,
                names,
                steps,
                "throughput",
                "Throughput, tokens a second" if tokens else "Throughput, samples a second",
                lambda record: record.column(rate),
                zero=True,
            ),
        ),
        (
            "data wait",
            lambda: _curve(
                records,
                names,
                steps,
                "wait",
                "Waiting for data, % of a step (slowest rank)",
                _waits,
                zero=True,
            ),
        ),
        (
            "loss scale",
            lambda: _curve(
                records,
                names,
                steps,
                "scale",
                "Loss scale (f16)",
                lambda record: record.column("scale"),
                raw=False,
            ),
        ),
        ("memory", lambda: memory_bars(records, names)),
        (
            "utilisation",
            lambda: _sensor(records, names, "utilisation", "Utilisation of devices, %", 100.0),
        ),
        ("power", lambda: _sensor(records, names, "power_watts", "Power of all devices, W")),
        ("where time went", lambda: time_bars(records, names)),
    ]
    made = [(what, maker()) for what, maker in makers]
    return _told_apart([picture for _, picture in made if picture]), [
        what for what, picture in made if picture is None and what not in {"loss scale"}
    ]


def _told_apart(pictures: Sequence[Picture]) -> list[Picture]:
    """Metrics whose names differ only in what no file name holds get a number."""
    seen: Counter[str] = Counter()
    found = []
    for picture in pictures:
        seen[picture.name] += 1
        found.append(
            replace(picture, name=f"{picture.name}-{seen[picture.name]}")
            if seen[picture.name] > 1
            else picture
        )
    return found


def _hours(records: Sequence[RunRecord]) -> Across:
    longest = max((float(np.nansum(record.column("seconds"))) for record in records), default=0.0)
    unit, size = time_unit(longest)
    return Across(
        f"{unit} of training (steps alone)",
        lambda record: np.cumsum(np.nan_to_num(record.column("seconds"))) / size,
    )


def _waits(record: RunRecord) -> Column:
    return np.minimum(100.0, 100.0 * record.column("wait_seconds") / record.column("seconds"))


def _metrics(records: Sequence[RunRecord]) -> list[str]:
    """Of evaluations, beside the loss: numbers alone."""
    found = {
        name: None
        for record in records
        for event in record.evaluated
        for name, value in event.values.items()
        if name not in NOT_METRICS and np.isfinite(number(value))
    }
    return list(found)[:_MOST_METRICS]


def _looks(
    records: Sequence[RunRecord], names: Sequence[str]
) -> Iterator[tuple[RunRecord, str, str, str]]:
    """(record, legend, colour, line style)."""
    for index, (record, name) in enumerate(zip(records, names, strict=True)):
        yield (
            record,
            legend_label(name),
            SERIES[index % len(SERIES)],
            STYLES[index // len(SERIES) % len(STYLES)],
        )


def _loss(
    records: Sequence[RunRecord], names: Sequence[str], across: Across, name: str, title: str
) -> Picture | None:
    if not any(record.has_values("loss") or record.evaluated for record in records):
        return None
    alone = len(records) == 1
    with canvas() as (figure, axes):
        shown: list[Column] = []
        notes: list[str] = []
        for record, legend, colour, style in _looks(records, names):
            shown += _line(
                axes,
                record,
                across,
                record.column("loss"),
                "training" if alone else legend,
                colour,
                style,
                raw=alone,
                notes=notes,
            )
            at = across.at(record, [event.step for event in record.evaluated])
            losses = np.array(
                [number(event.values.get("loss")) for event in record.evaluated], np.float64
            )
            if np.isfinite(losses).any():
                axes.plot(
                    *thin(at, losses),
                    color=SERIES[1] if alone else colour,
                    linestyle="-" if alone else ":",
                    marker="o",
                    markersize=4,
                    linewidth=1.0,
                    label="validation" if alone else "_",
                )
                shown.append(losses)
        if alone:
            _marks(axes, records[0], across)
        elif any(record.evaluated for record in records):
            notes.append("points: validation")
        notes += _fit(axes, shown)
        return _done(figure, axes, across, name, title, notes)


def _metric(
    records: Sequence[RunRecord], names: Sequence[str], across: Across, metric: str
) -> Picture:
    with canvas() as (figure, axes):
        shown = []
        for record, legend, colour, style in _looks(records, names):
            values = np.array(
                [number(event.values.get(metric)) for event in record.evaluated], np.float64
            )
            shown.append(values)
            x, y = thin(across.at(record, [event.step for event in record.evaluated]), values)
            axes.plot(
                x,
                y,
                color=colour,
                linestyle=style,
                marker="o",
                markersize=4,
                label="_" if len(records) == 1 else legend,
            )
        return _done(
            figure,
            axes,
            across,
            f"metric-{re.sub('[^a-z0-9]+', '-', metric.lower()).strip('-')[:40] or 'x'}",
            f"Validation: {legend_label(metric)}",
            _fit(axes, shown),
        )


def _curve(
    records: Sequence[RunRecord],
    names: Sequence[str],
    across: Across,
    name: str,
    title: str,
    values: Callable[[RunRecord], Column],
    raw: bool = True,
    zero: bool = False,
) -> Picture | None:
    """raw: each step's number beside the smoothed ones, where there is one run; False: the number
    itself, which is smooth. zero: the axis begins there.
    """
    columns = [values(record) for record in records]
    if not any(np.isfinite(column).any() for column in columns):
        return None
    alone = len(records) == 1
    with canvas() as (figure, axes):
        shown: list[Column] = []
        notes: list[str] = []
        for (record, legend, colour, style), column in zip(
            _looks(records, names), columns, strict=True
        ):
            shown += _line(
                axes,
                record,
                across,
                column,
                "_" if alone else legend,
                colour,
                style,
                raw=alone and raw,
                notes=notes,
                smoothed=raw,
            )
        notes += _fit(axes, shown)
        if alone:
            _seams(axes, records[0], across)
        if zero:
            axes.set_ylim(bottom=0)
        return _done(figure, axes, across, name, title, notes)


def _line(
    axes: "Axes",
    record: RunRecord,
    across: Across,
    column: Column,
    legend: str,
    colour: str,
    style: str,
    raw: bool,
    notes: list[str],
    smoothed: bool = True,
) -> list[Column]:
    """One run's curve; returns the numbers shown."""
    if not np.isfinite(column).any():
        return []
    x, width = across.values(record), window(len(column)) if smoothed else 1
    if raw and width > 1:
        axes.plot(*thin(x, column), color=colour, alpha=0.3, linewidth=0.7, label="_")
    mean = smooth(column, width)
    axes.plot(
        *thin(x, mean),
        color=colour,
        linestyle=style,
        label=legend,
        marker="o" if len(column) == 1 else None,
        markersize=4,
    )
    if width > 1:
        note = (
            f"mean of {width} steps, each step pale"
            if raw
            else "each the mean over a fiftieth of its steps"
        )
        notes += [] if note in notes else [note]
    return [column if raw else mean]


def _marks(axes: "Axes", record: RunRecord, across: Across) -> None:
    """Where a run was gone on with, warned or failed: along the lower edge, a line across for a
    resume.
    """
    for kind, (marker, colour, text) in _MARKS.items():
        steps = [event.step for event in record.notable if event.kind == kind][-_MOST_MARKS:]
        at = across.at(record, steps)
        if steps:
            axes.plot(
                at,
                np.full(len(at), 0.03),
                linestyle="none",
                marker=marker,
                color=COLOURS[colour],
                markersize=6,
                label=text,
                transform=axes.get_xaxis_transform(),
                clip_on=False,
            )
    _seams(axes, record, across)
    skipped = across.values(record)[record.column("skipped") > 0][-_MOST_MARKS:]
    if len(skipped):
        axes.plot(
            skipped,
            np.full(len(skipped), 0.03),
            linestyle="none",
            marker="s",
            color=COLOURS["bad"],
            markersize=4,
            label="update left out",
            transform=axes.get_xaxis_transform(),
            clip_on=False,
        )


def _seams(axes: "Axes", record: RunRecord, across: Across) -> None:
    """A line across wherever other processes, and maybe other devices, went on with the run."""
    for x in across.at(
        record,
        [event.step for event in record.notable if event.kind in {"resumed", "restarted"}][
            -_MOST_MARKS:
        ],
    ):
        axes.axvline(x, color=COLOURS["ink"], linewidth=0.6, linestyle=":")


def _fit(axes: "Axes", shown: Sequence[Column]) -> list[str]:
    """Few numbers far above all others would make a flat line of these: the picture ends below
    them, and says so.
    """
    numbers = (
        np.concatenate([column[np.isfinite(column)] for column in shown]) if shown else np.empty(0)
    )
    if len(numbers) < 50:
        return []
    low, high, most = (
        float(np.quantile(numbers, 0.01)),
        float(np.quantile(numbers, 0.99)),
        float(numbers.max()),
    )
    if most <= high + 5 * (high - low) or high <= low:
        return []
    top = high + (high - low)
    axes.set_ylim(top=top, bottom=float(numbers.min()) - 0.05 * (high - low))
    return [f"{int((numbers > top).sum())} above the picture, up to {show_count(most)}"]


def _sensor(
    records: Sequence[RunRecord],
    names: Sequence[str],
    figure_of: str,
    title: str,
    scale: float = 1.0,
) -> Picture | None:
    """Utilisation: mean of a run's devices, and a band from the least to the most used.

    Power: their sum.
    """
    read = [sensed(record)[figure_of] * scale for record in records]
    if not any(rows.size for rows in read):
        return None
    total, alone = figure_of == "power_watts", len(records) == 1
    unit, size = time_unit(
        max(event.time - record.sensors[0].time for record in records for event in record.sensors)
    )
    with canvas() as (figure, axes):
        for (record, legend, colour, style), rows in zip(_looks(records, names), read, strict=True):
            some = (
                np.isfinite(rows).any(axis=0) if rows.size else np.zeros(len(record.sensors), bool)
            )
            x, shown = (
                (
                    np.array([event.time for event in record.sensors])[some]
                    - (record.sensors[0].time if record.sensors else 0.0)
                )
                / size,
                rows[:, some],
            )
            if not shown.size:
                continue
            axes.plot(
                *thin(x, np.nansum(shown, axis=0) if total else np.nanmean(shown, axis=0)),
                color=colour,
                linestyle=style,
                label="_" if alone else legend,
                marker="o" if len(x) == 1 else None,
            )
            if not total and len(shown) > 1:
                (at, low), (also, high) = (
                    thin(x, np.nanmin(shown, axis=0)),
                    thin(x, np.nanmax(shown, axis=0)),
                )
                axes.fill(
                    np.concatenate((at, also[::-1])),
                    np.concatenate((low, high[::-1])),
                    color=colour,
                    alpha=0.2,
                    linewidth=0,
                )
        axes.set_ylim(bottom=0)
        note = (
            "mean of the devices; band: from the least to the most used"
            if not total and any(len(rows) > 1 for rows in read)
            else ""
        )
        return _done(
            figure,
            axes,
            Across(f"{unit} since the first reading", lambda record: record.column("time")),
            figure_of.replace("_", "-"),
            title,
            [note] if note else [],
        )


def _done(
    figure: "Figure", axes: "Axes", across: Across, name: str, title: str, notes: Sequence[str]
) -> Picture:
    axes.set_xlabel(across.label)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(
            lambda value, _: f"{value:.4g}" if abs(value) < 1e4 else show_count(value)
        )
    handles, labels = axes.get_legend_handles_labels()
    if handles:
        axes.legend(handles, labels, ncols=1 if max(map(len, labels)) > 14 else 2, loc="best")
    return save_picture(figure, name, title, "; ".join(notes))
