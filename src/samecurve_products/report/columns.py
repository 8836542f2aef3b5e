"""The columns of a run as a page holds them: what its charts draw, all or what is new."""

import base64
import math
from collections.abc import Iterable, Mapping
from typing import TypedDict

import numpy as np

from samecurve_products.report.blocks import Array
from samecurve_products.report.record import RunRecord
from samecurve_products.report.steps import MEANS, Column

ENCODINGS = {"f32": "<f4", "f64": "<f8"}  # of an array in base64
_DRAWN = (
    *("loss", "grad_norm", "lr", "samples_per_second", "tokens_per_second", "wait_percent"),
    *("memory_bytes", "mfu", "scale", "seconds"),
)
_SHOWN_AS = {"seconds": "seconds_per_step"}  # `seconds` is the x axis


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
        arrays = {name: _encoded(x[start:], "f64") for name, x in _axes(record).items()}
        for name in (*_DRAWN, *(MEANS + name for name in steps.means)):
            if steps.has_values(name):
                shown = _SHOWN_AS.get(name, name)
                arrays[shown] = _encoded(steps.mean(name)[start:], "f32")
                if steps.each > 1:
                    arrays[f"{shown}/low"] = _encoded(steps.low(name)[start:], "f32")
                    arrays[f"{shown}/high"] = _encoded(steps.high(name)[start:], "f32")
    return {
        "generation": generation,
        "start": start,
        "count": count,
        "steps_per_point": steps.each,
        "arrays": arrays,
    }


def _axes(record: RunRecord) -> dict[str, Column]:
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


@np.errstate(all="ignore")
def _encoded(values: Column, form: str) -> Array:
    """The numbers as little-endian floats in base64; nan where one is too large for the form."""
    floats = values.astype(ENCODINGS[form])
    floats[~np.isfinite(floats)] = np.nan
    return {form: base64.b64encode(floats.tobytes()).decode()}


def plain(values: Iterable[float]) -> Array:
    """A few numbers as they are; None: a gap."""
    return [float(value) if math.isfinite(value) else None for value in values]
