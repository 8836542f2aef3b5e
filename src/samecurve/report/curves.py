"""The charts of a report that are curves.

One run: the raw curve, the smoothed curve, and marks where the run was interrupted. Several runs:
one smoothed curve for each run in one picture.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from samecurve.report.canvas import (
    COLOURS,
    SERIES,
    STYLES,
    Picture,
    canvas,
    legend_label,
    save_picture,
)
from samecurve.report.record import RunRecord, number
from samecurve.report.thinning import MOST_DRAWN, Column, drawable, smooth, thin, window
from samecurve.units import show_count

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from samecurve.core.events import Event

_MAX_MARKS = 200
_MARKS_AT = 0.03  # of the height
_MARKS = {
    "resumed": ("|", "ink", "resumed"),
    "restarted": ("d", "ink", "restarted"),
    "warned": ("^", "warn", "warned"),
    "slow": ("v", "warn", "slow"),
    "failed": ("x", "bad", "failed"),
}


@dataclass(frozen=True)
class RunStyle:
    """A run and the style in which it is drawn."""

    record: RunRecord
    legend: str
    colour: str
    line: str


@dataclass(frozen=True)
class XAxis:
    label: str
    values: Callable[[RunRecord], Column]  # one for each step that counts

    def at(self, record: RunRecord, steps: Sequence[int]) -> Column:
        """The positions of these steps on the axis."""
        if not record.num_steps:
            return np.array(steps, np.float64)
        return np.interp(steps, record.column("step"), self.values(record))


def style_runs(records: Sequence[RunRecord], names: Sequence[str]) -> list[RunStyle]:
    """Give each run a colour; further runs repeat the colours with another kind of line."""
    return [
        RunStyle(
            record,
            legend_label(name),
            SERIES[index % len(SERIES)],
            STYLES[index // len(SERIES) % len(STYLES)],
        )
        for index, (record, name) in enumerate(zip(records, names, strict=True))
    ]


def loss_chart(runs: Sequence[RunStyle], x_axis: XAxis, *, name: str, title: str) -> Picture | None:
    """The chart of training and validation loss. None: no run has a loss."""
    if not any(run.record.has_values("loss") or run.record.evaluated for run in runs):
        return None
    alone = len(runs) == 1
    with canvas() as (figure, axes):
        drawn: list[Column] = []
        notes: list[str] = []
        for run in runs:
            losses = run.record.column("loss")
            column, legend = drawable(losses), "training" if alone else run.legend
            notes += _beyond_notes(losses, _evaluated(run.record, "loss"))
            drawn += _draw_line(axes, run, x_axis, column, legend=legend, raw=alone)
            notes += _smoothing_notes(column, raw=alone)
            drawn += _draw_validation(axes, run, x_axis, alone=alone)
        if alone:
            _draw_marks(axes, runs[0].record, x_axis)
        elif any(run.record.evaluated for run in runs):
            notes.append("points: validation")
        notes += _clip_outliers(axes, drawn)
        return finish_chart(figure, axes, x_label=x_axis.label, name=name, title=title, notes=notes)


def _draw_validation(axes: "Axes", run: RunStyle, x_axis: XAxis, *, alone: bool) -> list[Column]:
    """Draw the losses of one run's evaluations as points; return these losses."""
    losses = drawable(_evaluated(run.record, "loss"))
    if not np.isfinite(losses).any():
        return []
    colour, line, legend = run.colour, ":", "_"
    if alone:
        colour, line, legend = SERIES[1], "-", "validation"
    axes.plot(
        *thin(x_axis.at(run.record, _steps(run.record.evaluated)), losses),
        color=colour,
        linestyle=line,
        marker="o",
        markersize=4,
        linewidth=1.0,
        label=legend,
    )
    return [losses]


def file_name(metric: str) -> str:
    """A metric's name, in characters that a file name may have."""
    return re.sub("[^a-z0-9]+", "-", metric.lower()).strip("-")[:40] or "x"


def metric_chart(runs: Sequence[RunStyle], x_axis: XAxis, metric: str) -> Picture:
    """The chart of one metric of evaluations."""
    with canvas() as (figure, axes):
        drawn, notes = [], []
        for run in runs:
            numbers = _evaluated(run.record, metric)
            values = drawable(numbers)
            notes += _beyond_notes(numbers)
            axes.plot(
                *thin(x_axis.at(run.record, _steps(run.record.evaluated)), values),
                color=run.colour,
                linestyle=run.line,
                marker="o",
                markersize=4,
                label="_" if len(runs) == 1 else run.legend,
            )
            drawn.append(values)
        return finish_chart(
            figure,
            axes,
            x_label=x_axis.label,
            name=f"metric-{file_name(metric)}",
            title=f"Validation: {legend_label(metric)}",
            notes=[*notes, *_clip_outliers(axes, drawn)],
        )


def step_chart(
    runs: Sequence[RunStyle],
    x_axis: XAxis,
    values: Callable[[RunRecord], Column],
    *,
    name: str,
    title: str,
    smoothed: bool = True,
    from_zero: bool = False,
) -> Picture | None:
    """The chart of a metric of steps. None: no run has the metric.

    smoothed: draw a smoothed curve, and for a single run also the raw one; False: draw the raw one
    from_zero: the axis begins at zero
    """
    numbers = [values(run.record) for run in runs]
    columns = [drawable(column) for column in numbers]
    if not any(np.isfinite(column).any() for column in columns):
        return None
    alone = len(runs) == 1
    with canvas() as (figure, axes):
        drawn: list[Column] = []
        notes = _beyond_notes(*numbers)
        for run, column in zip(runs, columns, strict=True):
            drawn += _draw_line(
                axes,
                run,
                x_axis,
                column,
                legend="_" if alone else run.legend,
                raw=alone and smoothed,
                smoothed=smoothed,
            )
            if smoothed:
                notes += _smoothing_notes(column, raw=alone)
        notes += _clip_outliers(axes, drawn)
        if alone:
            _draw_interruptions(axes, runs[0].record, x_axis)
        if from_zero:
            axes.set_ylim(bottom=0)
        return finish_chart(figure, axes, x_label=x_axis.label, name=name, title=title, notes=notes)


def _evaluated(record: RunRecord, metric: str) -> Column:
    values = [number(event.values.get(metric)) for event in record.evaluated]
    return np.array(values, np.float64)


def _steps(events: "Sequence[Event]") -> list[int]:
    return [event.step for event in events]


def _draw_line(
    axes: "Axes",
    run: RunStyle,
    x_axis: XAxis,
    column: Column,
    *,
    legend: str,
    raw: bool,
    smoothed: bool = True,
) -> list[Column]:
    """Draw a run's curve; returns the numbers drawn.

    raw: also draw each step's number, pale, behind the smoothed curve
    """
    if not np.isfinite(column).any():
        return []
    x = x_axis.values(run.record)
    width = 1
    if smoothed:
        width = window(len(column))
    if raw and width > 1:
        axes.plot(*thin(x, column), color=run.colour, alpha=0.3, linewidth=0.7, label="_")
    mean = smooth(column, width)
    axes.plot(
        *thin(x, mean),
        color=run.colour,
        linestyle=run.line,
        label=legend,
        marker="o" if len(column) == 1 else None,
        markersize=4,
    )
    if raw:
        return [column]
    return [mean]


def _beyond_notes(*columns: Column) -> list[str]:
    """A note on how many numbers are too large to be drawn; empty if none are."""
    count = sum(int((np.abs(column) > MOST_DRAWN).sum()) for column in columns)
    return [f"{count} beyond {MOST_DRAWN:g} not drawn"] if count else []


def _smoothing_notes(column: Column, *, raw: bool) -> list[str]:
    """A note on how the curve was smoothed; empty if it was not."""
    width = window(len(column))
    if width == 1 or not np.isfinite(column).any():
        return []
    if raw:
        return [f"mean of {width} steps, each step pale"]
    return ["each the mean over a fiftieth of its steps"]


def _draw_marks(axes: "Axes", record: RunRecord, x_axis: XAxis) -> None:
    """Mark along the lower edge where a run was interrupted, warned or failed."""

    def mark(x: Column, *, marker: str, colour: str, size: int, legend: str) -> None:
        axes.plot(
            x,
            np.full(len(x), _MARKS_AT),
            linestyle="none",
            marker=marker,
            color=COLOURS[colour],
            markersize=size,
            label=legend,
            transform=axes.get_xaxis_transform(),
            clip_on=False,
        )

    for kind, (marker, colour, legend) in _MARKS.items():
        events = [event for event in record.notable if event.kind == kind][-_MAX_MARKS:]
        if events:
            x = x_axis.at(record, _steps(events))
            mark(x, marker=marker, colour=colour, size=6, legend=legend)
    _draw_interruptions(axes, record, x_axis)
    skipped = x_axis.values(record)[record.column("skipped") > 0][-_MAX_MARKS:]
    if len(skipped):
        mark(skipped, marker="s", colour="bad", size=4, legend="update left out")


def _draw_interruptions(axes: "Axes", record: RunRecord, x_axis: XAxis) -> None:
    """Draw a vertical line where new processes, maybe on other devices, resumed the run."""
    events = [event for event in record.notable if event.kind in {"resumed", "restarted"}]
    for x in x_axis.at(record, _steps(events[-_MAX_MARKS:])):
        axes.axvline(x, color=COLOURS["ink"], linewidth=0.6, linestyle=":")


def _clip_outliers(axes: "Axes", drawn: Sequence[Column]) -> list[str]:
    """Cut off a few numbers that lie far above all others and would flatten the curve.

    Returns a note that says so.
    """
    if not drawn:
        return []
    numbers = np.concatenate([column[np.isfinite(column)] for column in drawn])
    if len(numbers) < 50:
        return []
    low, high = float(np.quantile(numbers, 0.01)), float(np.quantile(numbers, 0.99))
    most = float(numbers.max())
    if most <= high + 5 * (high - low) or high <= low:
        return []
    top = high + (high - low)
    axes.set_ylim(top=top, bottom=float(numbers.min()) - 0.05 * (high - low))
    return [f"{int((numbers > top).sum())} above the picture, up to {show_count(most)}"]


def finish_chart(
    figure: "Figure", axes: "Axes", *, x_label: str, name: str, title: str, notes: Sequence[str]
) -> Picture:
    """Add labels and legend, and save both files. notes: repeated notes are shown once."""
    axes.set_xlabel(x_label)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(lambda value, _: _show_tick(value))
    handles, labels = axes.get_legend_handles_labels()
    if handles:
        columns = 1 if max(map(len, labels)) > 14 else 2
        axes.legend(handles, labels, ncols=columns, loc="best")
    return save_picture(figure, name, title, "; ".join(dict.fromkeys(notes)))


def _show_tick(value: float) -> str:
    if abs(value) < 1e4:
        return f"{value:.4g}"
    return show_count(value)
