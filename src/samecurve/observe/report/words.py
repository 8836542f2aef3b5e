"""Numbers as people read them: the rows of a summary, moments, values of a config."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from samecurve.units import show_bytes, show_count, show_seconds

Summary = Mapping[str, Any]  # of one run, see summary.py
Words = Callable[[Summary], str]


@dataclass(frozen=True)
class Row:
    """A line of the summary."""

    title: str
    value: Words  # '' for none
    more: Words | None = None  # what else is worth saying

    def show(self, run: Summary) -> tuple[str, str]:
        """Value and what else is worth saying, of one run."""
        return self.value(run), self.more(run) if self.more else ""


def _if_known(value: Any, show: Callable[[Any], str]) -> str:
    return "" if value is None else show(value)


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
    if value is None:
        text = "(none)"
    elif isinstance(value, str):
        text = value
    else:
        text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 400 else f"{text[:397]}..."


def _plural(count: int, word: str) -> str:
    return f"{count} {word}" if count == 1 else f"{count} {word}s"


def _memory_of_estimate(run: Summary) -> str:
    estimate, largest = run["memory_estimate_bytes"], run["memory_bytes"]
    if largest is None:
        return ""
    if not estimate:
        return "no estimate"
    return f"{largest / estimate:.0%} of {show_bytes(estimate)} estimated"


def _last_metrics(run: Summary) -> str:
    metrics = {name: value for name, value in run["evaluated"].items() if name != "loss"}
    return "  ".join(f"{name} {show_number(value)}" for name, value in metrics.items())


def _mean_of_steps(run: Summary) -> str:
    count = run["loss_mean_steps"]
    return f"mean of the last {count} steps" if count > 1 else "the last step's"


def _samples_per_second(run: Summary) -> str:
    return _if_known(run["samples_per_second"], lambda rate: f"{show_count(rate)} samples/s")


def _throughput(run: Summary) -> str:
    tokens = _if_known(run["tokens_per_second"], lambda rate: f"{show_count(rate)} tok/s")
    return tokens or _samples_per_second(run)


def _most_celsius(run: Summary) -> str:
    degrees = "\N{DEGREE SIGN}C"
    most = _if_known(run["celsius_max"], lambda celsius: f"; at most {celsius:.0f} {degrees}")
    return f"all devices, mean{most}"


def _engine_and_strategy(run: Summary) -> str:
    words = [str(run[name]) for name in ("engine", "strategy", "precision") if run[name]]
    return " ".join([*words, "exact"] if run["exact"] else words)


def _backend(run: Summary) -> str:
    backend = run["backend"]
    if backend is None or backend == "none":
        return ""
    return f"over {backend}"


def _accumulation(run: Summary) -> str:
    if not run["micro"]:
        return ""
    return f"{run['micro']} at once, {_plural(run['rounds'], 'round')}"


# The summary: on one run's page as cards, on several runs' page as rows.
SUMMARY_ROWS = (
    Row(
        "training loss",
        lambda run: show_number(run["loss_mean"]) if run["step"] else "",
        _mean_of_steps,
    ),
    Row(
        "best validation loss",
        lambda run: _if_known(run["best_loss"], show_number),
        lambda run: _if_known(run["best_step"], lambda step: f"at step {step}"),
    ),
    Row(
        "last validation",
        lambda run: _if_known(run["evaluated"].get("loss"), show_number),
        _last_metrics,
    ),
    Row(
        "steps",
        lambda run: f"{run['step']} of {run['steps']}" if run["steps"] else f"{run['step']}",
        lambda run: f"{show_count(run['samples_seen'])} samples" if run["samples_seen"] else "",
    ),
    Row(
        "training time",
        lambda run: show_seconds(run["training_seconds"]) if run["step"] else "",
        lambda run: _if_known(
            run["step_seconds"], lambda seconds: f"median step {show_seconds(seconds)}"
        ),
    ),
    Row(
        "goodput",
        lambda run: _if_known(run["goodput"], lambda share: f"{share:.0%}"),
        lambda run: f"of {show_seconds(run['wall_seconds'])} in {_plural(run['starts'], 'start')}",
    ),
    Row(
        "throughput",
        _throughput,
        lambda run: f"{_samples_per_second(run)}; medians" if _samples_per_second(run) else "",
    ),
    Row("MFU", lambda run: _if_known(run["mfu"], lambda share: f"{share:.1%}")),
    Row(
        "waiting for data",
        lambda run: _if_known(run["wait_share"], lambda share: f"{share:.1%}"),
        lambda _run: "of a step, median",
    ),
    Row(
        "memory of a device",
        lambda run: _if_known(run["memory_bytes"], show_bytes),
        _memory_of_estimate,
    ),
    Row(
        "utilisation",
        lambda run: _if_known(run["utilisation_mean"], lambda mean: f"{mean:.0%}"),
        lambda _run: "mean of the devices' readings",
    ),
    Row(
        "power",
        lambda run: _if_known(run["power_watts_mean"], lambda mean: f"{mean:.0f} W"),
        _most_celsius,
    ),
    Row(
        "devices",
        lambda run: f"{run['world']}" if run["world"] else "",
        lambda run: ", ".join(f"{count} x {name}" for name, count in run["devices"].items()),
    ),
    Row("how", _engine_and_strategy, _backend),
    Row("batch", lambda run: _if_known(run["batch"], str), _accumulation),
    Row(
        "peak learning rate",
        lambda run: _if_known(run["lr"], lambda rate: f"{rate:.3g}"),
    ),
    Row(
        "steps done again",
        lambda run: str(run["voided_steps"] or ""),
        lambda _run: "after being gone on with from a save",
    ),
    Row(
        "updates left out",
        lambda run: str(run["skipped"] or ""),
        lambda _run: "their gradient was not finite",
    ),
    Row("warnings", lambda run: str(run["warnings"] or "")),
)
