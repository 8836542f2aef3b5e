"""Figures as people read them: the rows of a summary, moments, plain values."""

import json
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any

from samecurve.units import show_bytes, show_count, show_seconds

Row = Callable[[Mapping[str, Any]], tuple[str, str, str]]


def _row(
    title: str,
    shown: Callable[[Mapping[str, Any]], str],
    more: Callable[[Mapping[str, Any]], str] = lambda run: "",
) -> Row:
    return lambda run: (title, shown(run), more(run))


def _if(value: Any, form: Callable[[Any], str]) -> str:
    return "" if value is None else form(value)


def show_number(value: float | None) -> str:
    """Six digits: a loss."""
    return "not finite" if value is None else f"{value:.6g}"


def show_moment(seconds: float) -> str:
    """Seconds since 1970 as a date, in UTC; a number that is no date as it is."""
    try:
        return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    except (ValueError, OverflowError, OSError):
        return f"{seconds:g}"


def show_value(value: Any, name: str = "") -> str:
    """A value of a config, plan or environment, as one would write it; long ones cut."""
    if name.endswith("_bytes") and isinstance(value, int):
        return show_bytes(value)
    text = (
        "(none)"
        if value is None
        else value
        if isinstance(value, str)
        else json.dumps(value, ensure_ascii=False, default=str)
    )
    return text if len(text) <= 400 else f"{text[:397]}..."


def _memory(run: Mapping[str, Any]) -> str:
    estimate, largest = run["memory_estimate_bytes"], run["memory_bytes"]
    return (
        ""
        if largest is None
        else (
            "no estimate"
            if not estimate
            else f"{largest / estimate:.0%} of {show_bytes(estimate)} estimated"
        )
    )


def _shape(run: Mapping[str, Any]) -> str:
    return " ".join(str(run[name]) for name in ("engine", "strategy", "precision") if run[name]) + (
        " exact" if run["exact"] else ""
    )


def _rounds(run: Mapping[str, Any]) -> str:
    return (
        f"{run['micro']} at once, {run['rounds']} round{'' if run['rounds'] == 1 else 's'}"
        if run["micro"]
        else ""
    )


# The summary: on one run's page as cards, on several runs' page as rows. Each gives a title, a
# value ('' for none) and what else is worth saying.
SUMMARY_ROWS: Mapping[str, Row] = {
    "loss": _row(
        "training loss",
        lambda run: show_number(run["loss_mean"]) if run["step"] else "",
        lambda run: (
            f"mean of the last {run['loss_mean_steps']} steps"
            if run["loss_mean_steps"] > 1
            else "the last step's"
        ),
    ),
    "best": _row(
        "best validation loss",
        lambda run: _if(run["best_loss"], show_number),
        lambda run: _if(run["best_step"], lambda step: f"at step {step}"),
    ),
    "evaluated": _row(
        "last validation",
        lambda run: _if(run["evaluated"].get("loss"), show_number),
        lambda run: "  ".join(
            f"{name} {show_number(value)}"
            for name, value in run["evaluated"].items()
            if name != "loss"
        ),
    ),
    "steps": _row(
        "steps",
        lambda run: f"{run['step']}" + (f" of {run['steps']}" if run["steps"] else ""),
        lambda run: f"{show_count(run['samples_seen'])} samples" if run["samples_seen"] else "",
    ),
    "time": _row(
        "training time",
        lambda run: show_seconds(run["training_seconds"]) if run["step"] else "",
        lambda run: _if(
            run["step_seconds"], lambda seconds: f"median step {show_seconds(seconds)}"
        ),
    ),
    "goodput": _row(
        "goodput",
        lambda run: _if(run["goodput"], lambda share: f"{share:.0%}"),
        lambda run: (
            f"of {show_seconds(run['wall_seconds'])} in {run['starts']}"
            f" start{'' if run['starts'] == 1 else 's'}"
        ),
    ),
    "throughput": _row(
        "throughput",
        lambda run: (
            _if(run["tokens_per_second"], lambda rate: f"{show_count(rate)} tok/s")
            or _if(run["samples_per_second"], lambda rate: f"{show_count(rate)} samples/s")
        ),
        lambda run: _if(
            run["samples_per_second"], lambda rate: f"{show_count(rate)} samples/s; medians"
        ),
    ),
    "mfu": _row("MFU", lambda run: _if(run["mfu"], lambda share: f"{share:.1%}")),
    "wait": _row(
        "waiting for data",
        lambda run: _if(run["wait_share"], lambda share: f"{share:.1%}"),
        lambda run: "of a step, median",
    ),
    "memory": _row("memory of a device", lambda run: _if(run["memory_bytes"], show_bytes), _memory),
    "utilisation": _row(
        "utilisation",
        lambda run: _if(run["utilisation_mean"], lambda mean: f"{mean:.0%}"),
        lambda run: "mean of the devices' readings",
    ),
    "power": _row(
        "power",
        lambda run: _if(run["power_watts_mean"], lambda mean: f"{mean:.0f} W"),
        lambda run: (
            "all devices, mean"
            + _if(run["celsius_max"], lambda most: f"; at most {most:.0f} \N{DEGREE SIGN}C")
        ),
    ),
    "devices": _row(
        "devices",
        lambda run: f"{run['world']}" if run["world"] else "",
        lambda run: ", ".join(f"{count} x {name}" for name, count in run["devices"].items()),
    ),
    "shape": _row(
        "how",
        _shape,
        lambda run: _if(
            run["backend"], lambda backend: "" if backend == "none" else f"over {backend}"
        ),
    ),
    "batch": _row("batch", lambda run: _if(run["batch"], str), _rounds),
    "lr": _row("peak learning rate", lambda run: _if(run["lr"], lambda rate: f"{rate:.3g}")),
    "again": _row(
        "steps done again",
        lambda run: str(run["voided_steps"] or ""),
        lambda run: "after being gone on with from a save",
    ),
    "skipped": _row(
        "updates left out",
        lambda run: str(run["skipped"] or ""),
        lambda run: "their gradient was not finite",
    ),
    "warnings": _row("warnings", lambda run: str(run["warnings"] or "")),
}
