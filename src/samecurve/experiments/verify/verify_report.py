"""The verdicts of `samecurve verify` in words and as JSON."""

import json
from collections.abc import Sequence
from dataclasses import asdict

import numpy as np

from samecurve.errors import ASK_SAME_BITS
from samecurve.experiments.layout_runner import LayoutRunner
from samecurve.experiments.layouts import Layout
from samecurve.experiments.verify.rounding import Rounding, rounding_json
from samecurve.experiments.verify.verdicts import Verdict
from samecurve.observe.text_table import Column, table_text
from samecurve.units import show_seconds

# a limit of comparisons over a few steps, and its remedy
_ROUNDING = (
    "note   in f32 and below, layouts differ in the last digits, more after long training:"
    f" {ASK_SAME_BITS} keeps every bit (docs/guarantees.md#why)"
)


def head(runner: LayoutRunner, layouts: Sequence[Layout], tolerance: float) -> str:
    devices = "the CPU" if runner.kind == "cpu" else "GPUs"
    what = (
        f"verify {runner.steps} steps of {runner.global_batch_size} samples in"
        f" {runner.config.train.precision} on {devices}"
    )
    if runner.same_bits:
        compared = "losses, norms, parameters and optimizer state, bit for bit against one device"
    else:
        compared = f"largest relative difference to one device, tolerance {tolerance:g}"
    titles = table_text(columns(layouts, bits=runner.same_bits), [])
    return f"{what}; {compared}\n{titles}".rstrip()


def columns(layouts: Sequence[Layout], *, bits: bool) -> list[Column]:
    """The columns of the table. Their widths are fixed, since rows are shown as they come."""
    if bits:
        compared = [Column("hash of the last state")]
    else:
        compared = [
            Column("loss", right=True, width=7),
            Column("grad norm", right=True),
            Column("parameters", right=True),
        ]
    return [
        Column("layout", width=max(len(str(layout)) for layout in layouts)),
        *compared,
        Column("first step", right=True),
        Column("verdict"),
    ]


def row(verdict: Verdict, columns: Sequence[Column], *, bits: bool) -> str:
    """A row of the table, with a line below it that names the culprit, if there is one."""
    first = "-" if verdict.first_step is None else str(verdict.first_step)
    if bits:
        compared = [verdict.hash[:16]]
    else:
        differences = (verdict.loss, verdict.grad_norm, verdict.parameters)
        compared = [f"{difference:.1e}" for difference in differences]
    verdict_text = f"{verdict.verdict} ({show_seconds(verdict.seconds)})"
    text = table_text(columns, [[verdict.layout, *compared, first, verdict_text]], titles=False)
    if verdict.culprit:
        text += f"\n    {verdict.culprit}"
    return text


def conclusion(verdicts: Sequence[Verdict], *, bits: bool) -> str:
    failed = [verdict.layout for verdict in verdicts if verdict.verdict != "PASS"]
    if failed:
        return (
            f"FAIL   {len(failed)} of {len(verdicts)} layouts differ from one device:"
            f" {', '.join(failed)}"
        )
    if bits:
        return f"PASS   all {len(verdicts)} layouts give the bits of one device"
    worst = max(verdict.worst for verdict in verdicts)
    as_rounded = ", as float32 rounds" if any(verdict.culprit for verdict in verdicts) else ""
    return (
        f"PASS   all {len(verdicts)} layouts give one device's result; largest difference"
        f" {worst:.1e}{as_rounded}\n{_ROUNDING}"
    )


def as_json(
    runner: LayoutRunner,
    tolerance: float,
    verdicts: Sequence[Verdict],
    left_out: Sequence[str],
    rounding: Rounding | None = None,
) -> str:
    values = {
        "reference": "single",
        "steps": runner.steps,
        "batch": runner.global_batch_size,
        "dtype": runner.config.train.precision,
        "bits": runner.same_bits,
        "tolerance": tolerance,
        "layouts": [_verdict_json(verdict) for verdict in verdicts],
        "left_out": list(left_out),
        "passed": all(verdict.verdict == "PASS" for verdict in verdicts),
        **({"rounding": rounding_json(rounding)} if rounding else {}),
    }
    return json.dumps(values, indent=1)


def _verdict_json(verdict: Verdict) -> dict[str, object]:
    """A verdict as JSON. Infinities become null, since JSON has none."""
    return {
        key: None if isinstance(value, float) and not np.isfinite(value) else value
        for key, value in asdict(verdict).items()
    }
