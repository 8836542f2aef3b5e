"""The charts that are bars.

Each device's peak of memory beside what the plan expected, and what the seconds of a run were spent
on.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from samecurve.core.planning.plan import Plan
from samecurve.report.canvas import (
    COLOURS,
    SERIES,
    Picture,
    canvas,
    legend_label,
    save_picture,
)
from samecurve.report.record import RunRecord
from samecurve.report.summary import Summary, summary, where_time_went

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_UNITS = ((1 << 30, "GiB"), (1 << 20, "MiB"), (1, "bytes"))
_USES = {
    "training": "s0",
    "waiting for data": "s1",
    "steps done again": "bad",
    "evaluating": "s2",
    "saving": "s4",
    "starting": "s5",
    "other": "s7",
}
_MAX_NAMED_ROWS = 16


def time_unit(longest: float) -> tuple[str, float]:
    """The unit in which a duration is shown, and the seconds of that unit."""
    if longest < 300:
        return "seconds", 1.0
    if longest < 3 * 3600:
        return "minutes", 60.0
    return "hours", 3600.0


def memory_bars(records: Sequence[RunRecord], names: Sequence[str]) -> Picture | None:
    """Draw memory bars. One run: the plan's terms, and below them each device's peak.

    Several runs: the largest peak of each run, and its plan's estimate. None: nothing is known.
    """
    runs = [summary(record) for record in records]
    largest = max(max(run["memory_bytes"] or 0, run["memory_estimate_bytes"] or 0) for run in runs)
    if not largest:
        return None
    unit_bytes, unit = next(pair for pair in _UNITS if largest >= pair[0])
    with canvas() as (figure, axes):
        if len(runs) == 1:
            title = "Memory, peak of each device"
            _draw_plan(axes, records[0].plan, unit_bytes)
            num_rows = _draw_device_peaks(axes, runs[0], unit_bytes)
            _draw_estimate(axes, runs[0], unit_bytes, rows=(0, num_rows - 1))
        else:
            title = "Memory, peak of the largest device"
            _draw_peaks(axes, [run["memory_bytes"] or 0 for run in runs], 0, unit_bytes)
            _name_rows(axes, [legend_label(name, 20) for name in names], "run")
            for row, run in enumerate(runs):
                _draw_estimate(axes, run, unit_bytes, rows=(row, row))
        axes.invert_yaxis()
        axes.grid(axis="y", visible=False)
        axes.set_xlabel(f"{unit} of one device")
        figure.legend(*axes.get_legend_handles_labels(), loc="outside upper center", ncols=4)
        note = ""
        if any(run["memory_estimate_bytes"] is None for run in runs):
            note = "no estimate: what the model keeps for its backward pass is not known"
        return save_picture(figure, "memory", title, note)


def _draw_device_peaks(axes: "Axes", run: Summary, unit_bytes: int) -> int:
    """Draw a row for each device below the plan's row; return the number of rows."""
    peaks = run["memory_bytes_by_device"]
    legends = [f"device {index}" for index in range(len(peaks))]
    if not peaks:
        peaks, legends = [run["memory_bytes"] or 0], ["largest device"]
    _draw_peaks(axes, peaks, 1, unit_bytes)
    _name_rows(axes, ["plan", *legends], "device")
    return 1 + len(peaks)


def _draw_peaks(axes: "Axes", peaks: Sequence[int], first_row: int, unit_bytes: int) -> None:
    axes.barh(
        range(first_row, first_row + len(peaks)),
        [peak / unit_bytes for peak in peaks],
        height=0.6,
        color=SERIES[5],
        label="measured peak",
    )


def _draw_estimate(axes: "Axes", run: Summary, unit_bytes: int, *, rows: tuple[int, int]) -> None:
    """Draw the plan's estimate as a line from the first row to the last, once in the legend."""
    estimate = run["memory_estimate_bytes"]
    if estimate:
        first, last = rows
        axes.plot(
            [estimate / unit_bytes] * 2,
            [first - 0.4, last + 0.4],
            color=COLOURS["ink"],
            linewidth=1.2,
            linestyle=":",
            label="_" if first else "plan's estimate",
        )


def _name_rows(axes: "Axes", names: Sequence[str], kind: str) -> None:
    """Name the rows. kind: the axis label, where there are too many rows to name each."""
    if len(names) <= _MAX_NAMED_ROWS:
        axes.set_yticks(range(len(names)), names)
    else:
        axes.set_ylabel(kind)


def _draw_plan(axes: "Axes", plan: Plan | None, unit_bytes: int) -> None:
    """Draw the plan's terms, one after the other, in the first row."""
    if plan is None:
        return
    left = 0.0
    counts_process = plan.layout.devices[0].kind == "cpu"
    terms = [term for term in plan.memory if term.bytes]
    if not counts_process:
        terms = [term for term in terms if term.name != "process"]
    for index, term in enumerate(terms):
        width = term.bytes / unit_bytes
        axes.barh(
            [0],
            [width],
            left=left,
            height=0.6,
            color=SERIES[index % len(SERIES)],
            label=legend_label(term.name, 16),
        )
        left += width


def time_bars(records: Sequence[RunRecord], names: Sequence[str]) -> Picture | None:
    """Draw a bar for each run: seconds of all its starts, by use. None: no start is known."""
    runs = [where_time_went(record) for record in records]
    totals = [sum(uses.values()) for uses in runs]
    if not any(totals):
        return None
    unit, unit_seconds = time_unit(max(totals))
    with canvas() as (figure, axes):
        left = [0.0] * len(runs)
        for use, colour in _USES.items():
            widths = [uses[use] / unit_seconds for uses in runs]
            label = use
            if len(runs) == 1:
                label = f"{use} {runs[0][use] / totals[0]:.0%}"
            if any(widths):
                axes.barh(
                    range(len(runs)),
                    widths,
                    left=left,
                    height=0.6,
                    color=COLOURS[colour],
                    label=label,
                )
            left = [before + width for before, width in zip(left, widths, strict=True)]
        if 1 < len(runs) <= _MAX_NAMED_ROWS:
            axes.set_yticks(range(len(runs)), [legend_label(name, 20) for name in names])
        else:
            axes.set_yticks([])
        axes.set_ylim(len(runs), -1)
        axes.grid(axis="y", visible=False)
        axes.set_xlabel(f"{unit} in which processes ran, all starts")
        figure.legend(*axes.get_legend_handles_labels(), loc="outside upper center", ncols=3)
        return save_picture(figure, "time", "Where time went", "")
