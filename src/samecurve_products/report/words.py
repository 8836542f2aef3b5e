"""Numbers as text for readers: the rows of a summary, dates, values of a config."""

import json
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

from samecurve.seam import counted, show_bytes, show_count, show_seconds
from samecurve_products.report.record import show_devices
from samecurve_products.report.summary import Summary

_CELSIUS = "\N{DEGREE SIGN}C"


def show_number(value: float | None) -> str:
    """A loss with six digits."""
    return "not finite" if value is None else f"{value:.6g}"


def show_moment(seconds: float) -> str:
    """Seconds since 1970 as a date in UTC; a number that is no valid date is shown unchanged."""
    try:
        return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    except (ValueError, OverflowError, OSError):
        return f"{seconds:g}"


def show_value(value: object, name: str = "") -> str:
    """A value of a config, plan or environment as it is written in YAML; long values are cut."""
    if name.endswith("_bytes") and isinstance(value, int):
        return show_bytes(value)
    if value is None:
        text = "(none)"
    elif isinstance(value, str):
        text = value
    else:
        text = json.dumps(value, ensure_ascii=False, default=str)
    if len(text) > 400:
        return f"{text[:397]}..."
    return text


def _if_known(value: Any, show: Callable[[Any], str]) -> str:
    return "" if value is None else show(value)


def summary_rows(run: Summary) -> dict[str, tuple[str, str]]:
    """The rows of a summary by title, each a value and a note; '' where there is none.

    One run's page shows them as cards, several runs' page as a table.
    """
    step, planned = run["step"], run["steps"]
    evaluated = dict(run["evaluated"])
    last_loss = _if_known(evaluated.pop("loss", None), show_number)
    metrics = "  ".join(f"{name} {show_number(value)}" for name, value in evaluated.items())
    loss_of = f"mean of the last {run['loss_mean_steps']:,} steps"
    if run["loss_mean_steps"] <= 1:
        loss_of = "the last step's"
    steps = f"{step:,} of {planned:,}" if isinstance(planned, int) else f"{step:,}"
    samples = _if_known(run["samples_seen"] or None, lambda seen: f"{show_count(seen)} samples")
    wall = f"of {show_seconds(run['wall_seconds'])} in {counted(run['starts'], 'start')}"
    rate = _if_known(run["samples_per_second"], lambda rate: f"{show_count(rate)} samples/s")
    tokens = _if_known(run["tokens_per_second"], lambda rate: f"{show_count(rate)} tok/s")
    return {
        "training loss": (show_number(run["loss_mean"]) if step else "", loss_of),
        "best validation loss": (
            _if_known(run["best_loss"], show_number),
            _if_known(run["best_step"], "at step {:,}".format),
        ),
        "last validation": (last_loss, metrics),
        "steps": (steps, samples),
        "training time": (
            show_seconds(run["training_seconds"]) if step else "",
            _if_known(run["step_seconds"], lambda median: f"median step {show_seconds(median)}"),
        ),
        "goodput": (_if_known(run["goodput"], "{:.0%}".format), wall),
        "throughput": (tokens or rate, f"{rate}; medians" if rate else ""),
        "MFU": (_if_known(run["mfu"], "{:.1%}".format), ""),
        "waiting for data": (_if_known(run["wait_share"], "{:.1%}".format), "of a step, median"),
        **_rows_of_devices(run),
        "devices": (str(run["world"] or ""), show_devices(run["devices"])),
        "how": _how(run),
        "batch": (_if_known(run["batch"], str), _accumulation(run)),
        "peak learning rate": (_if_known(run["lr"], "{:.3g}".format), ""),
        "steps done again": (
            str(run["voided_steps"] or ""),
            "after being gone on with from a save",
        ),
        "updates left out": (str(run["skipped"] or ""), "their gradient was not finite"),
        "warnings": (str(run["warnings"] or ""), ""),
    }


def _rows_of_devices(run: Summary) -> dict[str, tuple[str, str]]:
    """What sensors have read during the run."""
    memory, utilisation = run["memory_bytes"], run["utilisation_mean"]
    celsius = _if_known(run["celsius_max"], f"; at most {{:.0f}} {_CELSIUS}".format)
    watts = _if_known(run["power_watts_mean"], "{:.0f} W".format)
    return {
        "memory of a device": (_if_known(memory, show_bytes), _of_estimate(run)),
        "utilisation": (
            _if_known(utilisation, "{:.0%}".format),
            "mean of the devices' readings",
        ),
        "power": (watts, f"all devices, mean{celsius}"),
    }


def _of_estimate(run: Summary) -> str:
    estimate, largest = run["memory_estimate_bytes"], run["memory_bytes"]
    if largest is None:
        return ""
    if not estimate:
        return "no estimate"
    return f"{largest / estimate:.0%} of {show_bytes(estimate)} estimated"


def _how(run: Summary) -> tuple[str, str]:
    words = [run["engine"], run["strategy"], run["precision"], "exact" if run["exact"] else None]
    backend = run["backend"]
    over = "" if backend is None or backend == "none" else f"over {backend}"
    return " ".join(str(word) for word in words if word), over


def _accumulation(run: Summary) -> str:
    micro, rounds = run["micro"], run["rounds"]
    if not isinstance(micro, int) or not isinstance(rounds, int):
        return ""
    return f"{micro} at once, {counted(rounds, 'round')}"
