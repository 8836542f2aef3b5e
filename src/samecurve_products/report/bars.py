"""The bars of a page: memory of devices against what they have, and where the time went."""

from collections.abc import Sequence

import numpy as np

from samecurve_products.report.blocks import Bar, Block, Colour, Part, bars
from samecurve_products.report.plan_blocks import memory_parts, peak_bar
from samecurve_products.report.record import RunRecord
from samecurve_products.report.summary import Summary, summary, where_time_went

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
    if not any(run["memory_bytes"] or run["memory_estimate_bytes"] for run in runs):
        return None
    note = ""
    if not all(run["memory_estimate_bytes"] for run in runs):
        note = "no estimate: what the model keeps for its backward pass is not known"
    if len(records) == 1:
        title, rows = "Memory of each device", _device_rows(records[0], runs[0])
    else:
        title = "Memory of the largest device"
        rows = [
            peak_bar(name, run["memory_bytes"] or 0, run["memory_estimate_bytes"])
            for name, run in zip(names, runs, strict=True)
        ]
    return bars("memory", title, rows, form="bytes", note=note)


def _device_rows(record: RunRecord, run: Summary) -> list[Bar]:
    """The plan's row, and a row for each device's measured peak."""
    devices = record.plan.layout.devices if record.plan else ()
    limits = [device.memory for device in devices]
    rows = []
    if record.plan:
        parts = memory_parts(record.plan.memory, on_cpu=devices[0].kind == "cpu")
        rows.append(Bar("plan, each device", parts, min(limits)))
    peaks = {f"device {i}, peak": peak for i, peak in enumerate(run["memory_bytes_by_device"])}
    if not peaks and run["memory_bytes"]:
        peaks = {"largest device, peak": run["memory_bytes"]}
    for index, (label, peak) in enumerate(peaks.items()):
        limit = limits[index] if index < len(limits) else None
        rows.append(Bar(label, [("measured peak", peak, 7)], limit))
    return rows[: 1 + _MAX_DEVICES]


def time_bars(records: Sequence[RunRecord], names: Sequence[str]) -> Block | None:
    """A bar for each run: seconds of all its starts, by use. None: no start is known."""
    runs = [where_time_went(record) for record in records]
    if not any(sum(uses.values()) for uses in runs):
        return None
    rows = []
    for name, uses in zip(names, runs, strict=True):
        total = sum(uses.values())
        parts: list[Part] = []
        for use, colour in _USES.items():
            if np.isfinite(uses[use]) and uses[use] > 0:
                share = f" {uses[use] / total:.0%}" if len(runs) == 1 else ""
                parts.append((use + share, uses[use], colour))
        rows.append(Bar(name, parts))
    note = "seconds in which processes ran, all starts"
    return bars("time", "Where time went", rows, form="seconds", note=note)
