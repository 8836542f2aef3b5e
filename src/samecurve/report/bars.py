"""The bars of a page: memory of devices against what they have, and where the time went."""

from collections.abc import Sequence

import numpy as np

from samecurve.report.blocks import Bar, Block, Colour, Part, bars
from samecurve.report.plan_blocks import memory_parts
from samecurve.report.record import RunRecord
from samecurve.report.summary import summary, where_time_went

_MAX_DEVICES = 16  # that have a row each
_USES: dict[str, Colour] = {
    "training": 0,
    "waiting for data": 1,
    "steps done again": "bad",
    "evaluating": 2,
    "saving": 4,
    "starting": 5,
    "other": "quiet",
}


def memory_bars(records: Sequence[RunRecord], names: Sequence[str]) -> Block | None:
    """Memory bars. One run: the plan's terms against a device's memory, and each device's peak.

    Several runs: the largest peak of each run, and its plan's estimate. None: nothing is known.
    """
    runs = [summary(record) for record in records]
    estimates = [run["memory_estimate_bytes"] for run in runs]
    if not any(
        run["memory_bytes"] or estimate for run, estimate in zip(runs, estimates, strict=True)
    ):
        return None
    note = ""
    if not all(estimates):
        note = "no estimate: what the model keeps for its backward pass is not known"
    rows: list[Bar] = []
    if len(records) == 1:
        rows = _device_rows(records[0], runs[0]["memory_bytes_by_device"], runs[0]["memory_bytes"])
        return bars("memory", "Memory of each device", rows, form="bytes", note=note)
    for name, run, estimate in zip(names, runs, estimates, strict=True):
        row: Bar = {"label": name, "parts": [_peak(run["memory_bytes"] or 0, 0)]}
        if estimate:
            row["marks"] = [{"label": "plan's estimate", "value": estimate}]
        rows.append(row)
    return bars("memory", "Memory of the largest device", rows, form="bytes", note=note)


def _device_rows(record: RunRecord, peaks: Sequence[int], largest: int | None) -> list[Bar]:
    """The plan's row, and a row for each device's measured peak."""
    devices = record.plan.layout.devices if record.plan else ()
    limits = [device.memory for device in devices]
    rows: list[Bar] = []
    if record.plan:
        parts = memory_parts(record.plan.memory, on_cpu=devices[0].kind == "cpu")
        rows.append({"label": "plan, each device", "parts": parts, "limit": min(limits)})
    labels = [f"device {index}, peak" for index in range(len(peaks))]
    if not peaks and largest:
        peaks, labels = [largest], ["largest device, peak"]
    for index, (label, peak) in enumerate(zip(labels, peaks, strict=True)):
        row: Bar = {"label": label, "parts": [_peak(peak, 7)]}
        if index < len(limits):
            row["limit"] = limits[index]
        rows.append(row)
    return rows[: 1 + _MAX_DEVICES]


def _peak(peak: int, colour: int) -> Part:
    return {"label": "measured peak", "value": peak, "colour": colour}


def time_bars(records: Sequence[RunRecord], names: Sequence[str]) -> Block | None:
    """A bar for each run: seconds of all its starts, by use. None: no start is known."""
    runs = [where_time_went(record) for record in records]
    if not any(sum(uses.values()) for uses in runs):
        return None
    rows: list[Bar] = []
    for name, uses in zip(names, runs, strict=True):
        total = sum(uses.values())
        parts: list[Part] = []
        for use, colour in _USES.items():
            label = f"{use} {uses[use] / total:.0%}" if len(runs) == 1 and total else use
            if np.isfinite(uses[use]) and uses[use] > 0:
                parts.append({"label": label, "value": uses[use], "colour": colour})
        rows.append({"label": name, "parts": parts})
    note = "seconds in which processes ran, all starts"
    return bars("time", "Where time went", rows, form="seconds", note=note)
