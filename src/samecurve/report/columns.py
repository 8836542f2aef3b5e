"""The columns of a run as a page holds them: what its charts draw, all or what is new."""

import base64
from collections.abc import Mapping
from typing import TypedDict

import numpy as np

from samecurve.report.blocks import Array
from samecurve.report.record import RunRecord
from samecurve.report.steps import MEANS, Column

# columns that are drawn
_DRAWN = (
    "loss",
    "grad_norm",
    "lr",
    "samples_per_second",
    "tokens_per_second",
    "wait_percent",
    "memory_bytes",
    "mfu",
    "scale",
)


class Columns(TypedDict):
    generation: str  # of another one every point may differ
    start: int  # the point at which the arrays begin
    count: int  # of points in all
    steps_per_point: int
    arrays: Mapping[str, Array]


def columns_of(record: RunRecord, since: tuple[str, int] | None = None) -> Columns:
    """The columns of a run, a number for each point.

    since: generation and number of the points that the reader has; then only what follows is
        given, and the last point again if it was not full
    """
    steps = record.steps
    generation = f"{record.identity[:16]}.{steps.generation}"
    count, start = len(steps.points), 0
    if since and since[0] == generation and 0 < since[1] <= count:
        start = since[1] if steps.each == 1 else since[1] - 1
    arrays: dict[str, Array] = {}
    if start < count:
        arrays = {name: _double(x[start:]) for name, x in axes_of(record).items()}
        for name in (*_DRAWN, *(MEANS + name for name in steps.means), "seconds"):
            shown = "seconds_per_step" if name == "seconds" else name
            arrays |= _drawn(record, name, shown, start)
    return {
        "generation": generation,
        "start": start,
        "count": count,
        "steps_per_point": steps.each,
        "arrays": arrays,
    }


def axes_of(record: RunRecord) -> dict[str, Column]:
    """The x axes: for each point where its last step lies."""
    steps = record.steps
    began = record.starts[0].time if record.starts else 0.0
    axes = {
        "step": steps.high("step"),
        "seconds": np.cumsum(steps.sums("seconds")),
        "samples": np.cumsum(steps.sums("samples")),
        "tokens": np.cumsum(steps.sums("tokens")),
        "wall": steps.high("time") - began,
    }
    if not steps.has_values("tokens_per_second"):
        del axes["tokens"]
    return axes


def _drawn(record: RunRecord, name: str, shown: str, start: int) -> dict[str, Array]:
    steps = record.steps
    if not steps.has_values(name):
        return {}
    arrays = {shown: single(steps.mean(name)[start:])}
    if steps.each > 1:
        arrays[f"{shown}/low"] = single(steps.low(name)[start:])
        arrays[f"{shown}/high"] = single(steps.high(name)[start:])
    return arrays


@np.errstate(all="ignore")
def single(values: Column) -> Array:
    """Numbers in 4 bytes each; nan where a number is too large for that."""
    narrow = values.astype("<f4")
    narrow[~np.isfinite(narrow)] = np.nan
    return {"f32": base64.b64encode(narrow.tobytes()).decode()}


def _double(values: Column) -> Array:
    wide = np.where(np.isfinite(values), values, np.nan).astype("<f8")
    return {"f64": base64.b64encode(wide.tobytes()).decode()}


def plain(values: Column) -> Array:
    """A few numbers as they are; None: a gap."""
    return [float(value) if np.isfinite(value) else None for value in values]
