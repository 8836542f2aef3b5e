"""The verdicts of `samecurve verify` in words and as JSON."""

import json
from collections.abc import Sequence
from dataclasses import asdict

import numpy as np

from samecurve.experiments.layout_runner import LayoutRunner
from samecurve.experiments.layouts import Layout
from samecurve.experiments.verify.verdicts import Verdict
from samecurve.units import show_seconds

# what a comparison over a few steps can't show, and what helps
_ROUNDING = (
    "note   in f32 and below, last digits follow the layout, and long training carries them on:"
    " --exact keeps every bit (docs/guarantees.md#why)"
)


def head(runner: LayoutRunner, layouts: Sequence[Layout], tolerance: float) -> str:
    devices = "the CPU" if runner.kind == "cpu" else "GPUs"
    what = (
        f"verify {runner.steps} steps of {runner.global_batch_size} samples in"
        f" {runner.config.train.precision} on {devices}"
    )
    title = f"       {'layout':<{column_width(layouts)}}"
    if runner.exact:
        return (
            f"{what}; losses, norms, parameters and optimizer state, bit for bit against one"
            " device\n"
            f"{title} hash of the last state   first step  verdict"
        )
    return (
        f"{what}; largest relative difference to one device, tolerance"
        f" {tolerance:g}\n"
        f"{title} {'loss':>9} {'grad norm':>10} {'parameters':>11}   first step  verdict"
    )


def column_width(layouts: Sequence[Layout]) -> int:
    return max(18, *(len(str(layout)) for layout in layouts))


def row(verdict: Verdict, width: int, *, exact: bool) -> str:
    """A line of the table, with one below that names the culprit, if there is one."""
    first = "-" if verdict.first_step is None else str(verdict.first_step)
    if exact:
        cells = f"{verdict.hash[:16]:<22}"
    else:
        cells = f"{verdict.loss:>9.1e} {verdict.grad_norm:>10.1e} {verdict.parameters:>11.1e}"
    line = (
        f"       {verdict.layout:<{width}} {cells}   {first:>10}  {verdict.verdict}  "
        f" ({show_seconds(verdict.seconds)})"
    )
    if verdict.culprit:
        line += f"\n         {verdict.culprit}"
    return line


def conclusion(verdicts: Sequence[Verdict], *, exact: bool) -> str:
    failed = [verdict.layout for verdict in verdicts if verdict.verdict != "PASS"]
    if failed:
        return (
            f"FAIL   {len(failed)} of {len(verdicts)} layouts differ from one device:"
            f" {', '.join(failed)}"
        )
    if exact:
        return f"PASS   all {len(verdicts)} layouts give the bits of one device"
    worst = max(verdict.worst for verdict in verdicts)
    return (
        f"PASS   all {len(verdicts)} layouts give one device's result; largest difference"
        f" {worst:.1e}\n{_ROUNDING}"
    )


def as_json(
    runner: LayoutRunner, tolerance: float, verdicts: Sequence[Verdict], left_out: Sequence[str]
) -> str:
    values = {
        "reference": "single",
        "steps": runner.steps,
        "batch": runner.global_batch_size,
        "dtype": runner.config.train.precision,
        "bits": runner.exact,
        "tolerance": tolerance,
        "layouts": [_verdict_json(verdict) for verdict in verdicts],
        "left_out": list(left_out),
        "passed": all(verdict.verdict == "PASS" for verdict in verdicts),
    }
    return json.dumps(values, indent=1)


def _verdict_json(verdict: Verdict) -> dict[str, object]:
    """JSON has no infinities: null."""
    return {
        key: None if isinstance(value, float) and not np.isfinite(value) else value
        for key, value in asdict(verdict).items()
    }
