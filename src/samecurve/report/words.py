"""Numbers as text for readers: the rows of a summary, dates, values of a config."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TypeVar

from samecurve.report.summary import Summary
from samecurve.units import counted, show_bytes, show_count, show_seconds

Words = Callable[[Summary], str]
T = TypeVar("T")


@dataclass(frozen=True)
class Row:
    """A line of the summary."""

    title: str
    value: Words  # '' for none
    more: Words | None = None  # a further remark

    def show(self, run: Summary) -> tuple[str, str]:
        """The row's value for one run, with its remark."""
        if self.more is None:
            return self.value(run), ""
        return self.value(run), self.more(run)


def _if_known(value: T | None, show: Callable[[T], str]) -> str:
    return "" if value is None else show(value)


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


def _loss_mean(run: Summary) -> str:
    if not run["step"]:
        return ""
    return show_number(run["loss_mean"])


def _mean_of_steps(run: Summary) -> str:
    if run["loss_mean_steps"] <= 1:
        return "the last step's"
    return f"mean of the last {run['loss_mean_steps']:,} steps"


def _steps(run: Summary) -> str:
    planned = run["steps"]
    if not isinstance(planned, int):
        return f"{run['step']:,}"
    return f"{run['step']:,} of {planned:,}"


def _training_time(run: Summary) -> str:
    if not run["step"]:
        return ""
    return show_seconds(run["training_seconds"])


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
    words = [str(word) for word in (run["engine"], run["strategy"], run["precision"]) if word]
    if run["exact"]:
        words.append("exact")
    return " ".join(words)


def _backend(run: Summary) -> str:
    backend = run["backend"]
    if backend is None or backend == "none":
        return ""
    return f"over {backend}"


def _accumulation(run: Summary) -> str:
    micro, rounds = run["micro"], run["rounds"]
    if not isinstance(micro, int) or not isinstance(rounds, int):
        return ""
    return f"{micro} at once, {counted(rounds, 'round')}"


# The summary: on one run's page as cards, on several runs' page as rows.
SUMMARY_ROWS = (
    Row("training loss", _loss_mean, _mean_of_steps),
    Row(
        "best validation loss",
        lambda run: _if_known(run["best_loss"], show_number),
        lambda run: _if_known(run["best_step"], lambda step: f"at step {step:,}"),
    ),
    Row(
        "last validation",
        lambda run: _if_known(run["evaluated"].get("loss"), show_number),
        _last_metrics,
    ),
    Row(
        "steps",
        _steps,
        lambda run: _if_known(
            run["samples_seen"] or None, lambda samples: f"{show_count(samples)} samples"
        ),
    ),
    Row(
        "training time",
        _training_time,
        lambda run: _if_known(
            run["step_seconds"], lambda seconds: f"median step {show_seconds(seconds)}"
        ),
    ),
    Row(
        "goodput",
        lambda run: _if_known(run["goodput"], lambda share: f"{share:.0%}"),
        lambda run: f"of {show_seconds(run['wall_seconds'])} in {counted(run['starts'], 'start')}",
    ),
    Row(
        "throughput",
        _throughput,
        lambda run: _if_known(_samples_per_second(run) or None, "{}; medians".format),
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
        lambda run: str(run["world"] or ""),
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
