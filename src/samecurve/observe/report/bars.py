"""The figures that are bars: each device's peak of memory beside what the plan expected, and what
the seconds of a run were spent on.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

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
_NAMED_ROWS = 16


def time_unit(longest: float) -> tuple[str, float]:
    """The unit in which so many seconds are shown, and its seconds."""
    return (
        ("seconds", 1.0)
        if longest < 300
        else ("minutes", 60.0)
        if longest < 3 * 3600
        else ("hours", 3600.0)
    )


def memory_bars(records: Sequence[RunRecord], names: Sequence[str]) -> Picture | None:
    """One run: the plan's terms, and below them each device's peak.

    Several: the largest device of each, and its plan's estimate.
    """
    found = [summary(record) for record in records]
    if not any(run["memory_bytes"] or run["memory_estimate_bytes"] for run in found):
        return None
    size, unit = next(
        pair
        for pair in _UNITS
        if max(max(run["memory_bytes"] or 0, run["memory_estimate_bytes"] or 0) for run in found)
        >= pair[0]
    )
    alone = len(records) == 1
    measured = (
        (found[0]["memory_bytes_by_device"] or [found[0]["memory_bytes"] or 0])
        if alone
        else [run["memory_bytes"] or 0 for run in found]
    )
    legends = (
        [f"device {index}" for index in range(len(measured))]
        if alone
        else [legend_label(name, 20) for name in names]
    )
    if alone and not found[0]["memory_bytes_by_device"]:
        legends = ["largest device"]
    with canvas() as (figure, axes):
        first = 1 if alone else 0
        if alone:
            legends = ["plan", *legends]
            _terms(axes, records[0], size)
        axes.barh(
            range(first, first + len(measured)),
            [peak / size for peak in measured],
            height=0.6,
            color=SERIES[5],
            label="measured peak",
        )
        for row, run in enumerate(found):
            if run["memory_estimate_bytes"]:
                reach = [-0.4, len(legends) - 0.6] if alone else [row - 0.4, row + 0.4]
                axes.plot(
                    [run["memory_estimate_bytes"] / size] * 2,
                    reach,
                    color=COLOURS["ink"],
                    linewidth=1.2,
                    linestyle=":",
                    label="_" if row else "plan's estimate",
                )
        (
            axes.set_yticks(range(len(legends)), legends)
            if len(legends) <= _NAMED_ROWS
            else axes.set_ylabel("device" if alone else "run")
        )
        axes.invert_yaxis()
        axes.grid(axis="y", visible=False)
        axes.set_xlabel(f"{unit} of one device")
        figure.legend(*axes.get_legend_handles_labels(), loc="outside upper center", ncols=4)
        note = (
            "no estimate: what the model keeps for its backward pass is not known"
            if any(run["memory_estimate_bytes"] is None for run in found)
            else ""
        )
        return save_picture(
            figure,
            "memory",
            "Memory, peak of each device" if alone else "Memory, peak of the largest device",
            note,
        )


def _terms(axes: "Axes", record: RunRecord, size: int) -> None:
    """The plan's terms, one after the other."""
    if record.plan is None:
        return
    left = 0.0
    counted = [
        term
        for term in record.plan.memory
        if term.bytes and (term.name != "process" or record.plan.devices[0].kind == "cpu")
    ]
    for index, term in enumerate(counted):
        axes.barh(
            [0],
            [term.bytes / size],
            left=left,
            height=0.6,
            color=SERIES[index % len(SERIES)],
            label=legend_label(term.name, 16),
        )
        left += term.bytes / size


def time_bars(records: Sequence[RunRecord], names: Sequence[str]) -> Picture | None:
    """One bar a run: seconds of all its starts, by what they went to."""
    spent = [where_time_went(record) for record in records]
    if not any(sum(uses.values()) for uses in spent):
        return None
    unit, size = time_unit(max(sum(uses.values()) for uses in spent))
    with canvas() as (figure, axes):
        left = [0.0] * len(spent)
        for use, colour in _USES.items():
            widths = [uses[use] / size for uses in spent]
            if any(widths):
                axes.barh(
                    range(len(spent)),
                    widths,
                    left=left,
                    height=0.6,
                    color=COLOURS[colour],
                    label=(
                        f"{use} {spent[0][use] / sum(spent[0].values()):.0%}"
                        if len(spent) == 1
                        else use
                    ),
                )
            left = [before + width for before, width in zip(left, widths, strict=True)]
        (
            axes.set_yticks(range(len(spent)), [legend_label(name, 20) for name in names])
            if 1 < len(spent) <= _NAMED_ROWS
            else axes.set_yticks([])
        )
        axes.set_ylim(len(spent), -1)
        axes.grid(axis="y", visible=False)
        axes.set_xlabel(f"{unit} in which processes ran, all starts")
        figure.legend(*axes.get_legend_handles_labels(), loc="outside upper center", ncols=3)
        return save_picture(figure, "time", "Where time went", "")
