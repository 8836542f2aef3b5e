"""The charts that are bars.

Each device's peak of memory beside what the plan expected, and what the seconds of a run were spent
on.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from samecurve.core.planning.plan import Plan
from samecurve.observe.report.canvas import (
    COLOURS,
    SERIES,
    Picture,
    canvas,
    legend_label,
    save_picture,
)
from samecurve.observe.report.reading import RunRecord
from samecurve.observe.report.summary import summary, where_time_went

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
    """The unit in which so many seconds are shown, and its seconds."""
    if longest < 300:
        return "seconds", 1.0
    if longest < 3 * 3600:
        return "minutes", 60.0
    return "hours", 3600.0


def memory_bars(records: Sequence[RunRecord], names: Sequence[str]) -> Picture | None:
    """One run: the plan's terms, and below them each device's peak.

    Several: the largest device of each, and its plan's estimate. None: nothing is known.
    """
    runs = [summary(record) for record in records]
    largest = max(max(run["memory_bytes"] or 0, run["memory_estimate_bytes"] or 0) for run in runs)
    if not largest:
        return None
    unit_bytes, unit = next(pair for pair in _UNITS if largest >= pair[0])
    alone = len(runs) == 1
    if alone:
        title = "Memory, peak of each device"
        peaks = runs[0]["memory_bytes_by_device"]
        legends = [f"device {index}" for index in range(len(peaks))]
        if not peaks:
            peaks, legends = [runs[0]["memory_bytes"] or 0], ["largest device"]
        legends = ["plan", *legends]
    else:
        title = "Memory, peak of the largest device"
        peaks = [run["memory_bytes"] or 0 for run in runs]
        legends = [legend_label(name, 20) for name in names]
    with canvas() as (figure, axes):
        if alone:
            _draw_plan(axes, records[0].plan, unit_bytes)
        axes.barh(
            range(len(legends) - len(peaks), len(legends)),
            [peak / unit_bytes for peak in peaks],
            height=0.6,
            color=SERIES[5],
            label="measured peak",
        )
        for row, run in enumerate(runs):
            if run["memory_estimate_bytes"]:
                rows = [-0.4, len(legends) - 0.6] if alone else [row - 0.4, row + 0.4]
                axes.plot(
                    [run["memory_estimate_bytes"] / unit_bytes] * 2,
                    rows,
                    color=COLOURS["ink"],
                    linewidth=1.2,
                    linestyle=":",
                    label="_" if row else "plan's estimate",
                )
        if len(legends) <= _MAX_NAMED_ROWS:
            axes.set_yticks(range(len(legends)), legends)
        else:
            axes.set_ylabel("device" if alone else "run")
        axes.invert_yaxis()
        axes.grid(axis="y", visible=False)
        axes.set_xlabel(f"{unit} of one device")
        figure.legend(*axes.get_legend_handles_labels(), loc="outside upper center", ncols=4)
        note = ""
        if any(run["memory_estimate_bytes"] is None for run in runs):
            note = "no estimate: what the model keeps for its backward pass is not known"
        return save_picture(figure, "memory", title, note)


def _draw_plan(axes: "Axes", plan: Plan | None, unit_bytes: int) -> None:
    """The plan's terms, one after the other, in the first row."""
    if plan is None:
        return
    left = 0.0
    counts_process = plan.devices[0].kind == "cpu"
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
    """One bar a run: seconds of all its starts, by what they went to. None: there are none."""
    runs = [where_time_went(record) for record in records]
    totals = [sum(uses.values()) for uses in runs]
    if not any(totals):
        return None
    unit, unit_seconds = time_unit(max(totals))
    with canvas() as (figure, axes):
        left = [0.0] * len(runs)
        for use, colour in _USES.items():
            widths = [uses[use] / unit_seconds for uses in runs]
            share = f" {runs[0][use] / totals[0]:.0%}" if len(runs) == 1 else ""
            if any(widths):
                axes.barh(
                    range(len(runs)),
                    widths,
                    left=left,
                    height=0.6,
                    color=COLOURS[colour],
                    label=f"{use}{share}",
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
