"""A run's events as sentences with numbers, one line each, for the console and other readers."""

from collections.abc import Callable, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from samecurve.core.events import BESIDE_METRICS, Event
from samecurve.core.planning.plan import Plan
from samecurve.observe.plan_text import banner
from samecurve.units import counted, show_bytes, show_count, show_seconds

_SLOW_START = 30.0  # seconds
_LEAST_FLOPS = 0.5e9  # FLOP/s: less would be shown as 0.000 TFLOP/s
_SENTENCES = {  # of simple events, with their values filled in
    "hashed": "hash   step {step}  {hash:.16}",
    "resumed": "resume step {step}  {text}",
    "prepared": "ready  {text}",
    "warned": "warn   {text}",
    "slow": "slow   {text}",
    "restarted": "again  {text}",
}
MEAN = "mean "  # prefix of the means that the loss returns beside the loss value


class Pace:
    """Seconds of a step, and of its wait for data, smoothed over about twenty steps.

    The duration of a single step says little, since its metrics are read one step late.
    """

    def __init__(self) -> None:
        self.seconds: float | None = None  # None: at most one step so far
        self.waited = 0.0
        self._started = False

    def add(self, event: Event) -> None:
        if event.kind != "step":
            return
        if not self._started:
            self._started = True  # the first step includes the warm-up
            return
        seconds, waited = float(event.values["seconds"]), float(event.values["wait_seconds"])
        if self.seconds is None:
            self.seconds, self.waited = seconds, waited
        else:
            self.seconds = 0.95 * self.seconds + 0.05 * seconds
            self.waited = 0.95 * self.waited + 0.05 * waited


def console_lines(event: Event, plan: Plan, run: Path, pace: Pace | None = None) -> list[str]:
    """An event as lines for the console. pace: the pace of the steps so far."""
    step, values = event.step, event.values
    match event.kind:
        case "planned":
            return [*banner(plan), f"run    {run}"]
        case "step":
            return ["  ".join(step_parts(step, values, plan, pace or Pace()).values())]
        case "evaluated" | "tested":
            return [_evaluated(event)]
        case "saved" | "uploaded":
            return [_saved(event)]
        case "sampled":
            texts = [["sample", *(f"  | {row}" for row in t.splitlines())] for t in values["texts"]]
            return [*chain(*texts), *_sampled_pictures(event, run)]
        case "stopped":
            where = f"step {step} of {plan.steps}; --resume {run} goes on from here"
            return [f"stop   {values.get('text', where)}"]
        case "finished":
            return [_finished(event, plan, run), _memory(event)]
        case "started":
            return _slow_start(event)
        case "sensors":
            return [load_line(event)]
        case _:
            return _sentence(event)


def _sentence(event: Event) -> list[str]:
    """The sentence of a simple event; [] for an event that is not shown or shown elsewhere."""
    if event.kind == "recovered":
        seconds = show_seconds(event.values["seconds"])
        return [f"again  step {event.step} was trained {seconds} after the failure was found"]
    if event.kind == "hashed" and "hash" not in event.values:  # comparisons speak of differences
        return []
    sentence = _SENTENCES.get(event.kind)
    values = {"text": "", **event.values, "step": event.step}
    return [sentence.format_map(values)] if sentence else []


def _saved(event: Event) -> str:
    """A checkpoint in the run directory, or in the store that mirrors it."""
    values = event.values
    size, seconds = show_bytes(values["bytes"]), show_seconds(values["seconds"])
    if event.kind == "saved":
        blocked = show_seconds(values["blocked_seconds"])
        return (
            f"saved  step {event.step}  {size} in {seconds} (blocked {blocked})  {values['path']}"
        )
    line = f"upload step {event.step}  {size} in {seconds}  {values['path']}"
    if values.get("skipped"):
        steps = ", ".join(map(str, values["skipped"]))
        line += f"; the store is slower than the saves, and got nothing of step {steps}"
    return line


def _evaluated(event: Event) -> str:
    step, values = event.step, event.values
    best, best_step = "", values.get("best_step")
    if best_step == step:
        best = "  best so far"
    elif best_step is not None:
        value = values["best_loss" if "best_loss" in values else "best_value"]
        best = f"  best {value:.4f} at step {best_step}"
    word = "test" if event.kind == "tested" else "eval"
    return f"{word}   step {step}  {_numbers(event)}{best}  ({show_seconds(values['seconds'])})"


def _numbers(event: Event) -> str:
    """The numbers of an evaluation, without its arrays."""
    return "  ".join(
        f"{name} {_show_finite(value, '.4f')}"
        for name, value in event.values.items()
        if name not in BESIDE_METRICS and not isinstance(value, list)
    )


def _sampled_pictures(event: Event, run: Path) -> list[str]:
    if not event.values.get("pictures"):
        return []
    from samecurve.observe.pictures import pictures

    names = pictures(event)
    if len(names) == 1:
        return [f"sample step {event.step}  1 picture  {run / names[0]}"]
    last = Path(names[-1]).name
    return [f"sample step {event.step}  {len(names)} pictures  {run / names[0]} to {last}"]


def step_parts(step: int, values: dict[str, Any], plan: Plan, pace: Pace) -> dict[str, str]:
    """A step's metrics as texts, by name, in the order in which they are shown.

    Rates are computed from the pace of the steps so far.
    """
    seconds, waited = values["seconds"], values["wait_seconds"]
    if pace.seconds:
        seconds, waited = pace.seconds, pace.waited
    faster = values["seconds"] / seconds  # from this step's rate to the rate at the pace
    parts = {
        "step": f"step   {step}/{plan.steps}",
        "loss": f"loss {_show_finite(values.get('loss'), '.4f')}",
        **{
            MEAN + name: f"{name} {_show_finite(mean, '.4f')}"
            for name, mean in values.get("metrics", {}).items()
        },
        "grad": f"grad {_show_finite(values.get('grad_norm'), '.3f')}",
        "lr": f"lr {values['lr']:.2e}",
    }
    if values.get("tokens_per_second"):
        parts["rate"] = f"{show_count(values['tokens_per_second'] * faster)} tok/s"
    else:
        parts["rate"] = f"{show_count(values['samples_per_second'] * faster)} samples/s"
    if "mfu" in values:
        parts["compute"] = f"MFU {values['mfu'] * faster:.1%}"
    elif values.get("flops_per_second", 0) * faster >= _LEAST_FLOPS:
        parts["compute"] = f"{values['flops_per_second'] * faster / 1e12:.3f} TFLOP/s"
    parts["wait"] = f"wait {min(1.0, waited / seconds):.1%}"
    parts["memory"] = f"mem {show_bytes(values['memory_bytes'])}"
    parts["left"] = f"left {show_seconds((plan.steps - step) * seconds)}"
    if values.get("skipped"):
        parts["skipped"] = "update left out"
    return parts


def join_parts(parts: dict[str, str], names: set[str]) -> str:
    return "  ".join(text for name, text in parts.items() if name in names)


def _show_finite(value: float | None, form: str) -> str:
    if value is None:
        return "not finite"
    return format(value, form)


def _slow_start(event: Event) -> list[str]:
    """The phases of a start that took long."""
    seconds = {
        name.removesuffix("_seconds"): float(value)
        for name, value in event.values.items()
        if name.endswith("_seconds")
    }
    total = sum(seconds.values())
    if total < _SLOW_START:
        return []
    parts = ", ".join(f"{name} {show_seconds(value)}" for name, value in seconds.items())
    text = f"slow   the start took {show_seconds(total)} ({parts})"
    if seconds.get("import", 0.0) < max(seconds.values()):
        text += "; the other ranks began later, or reach this one slowly"
    if "load" in event.values:
        load, cores = event.values["load"], event.values["cores"]
        text += f"; load average {load:.1f} on {counted(cores, 'core')}"
        if load > cores:
            text += ", more than they can run at once"
    return [text]


def _finished(event: Event, plan: Plan, run: Path) -> str:
    values = event.values
    parts = [
        f"done   {_last_step(event)}",
        f"{values['steps']} steps in {show_seconds(values['seconds'])}",
        f"goodput {values['goodput']:.0%}{_recoveries(event)}",
    ]
    if "loss" in values:
        loss = f"validation loss {_show_finite(values['loss'], '.4f')}"
        entropy = plan.data.reference.get("unigram_entropy")
        if entropy:
            loss += f" nats (single-token entropy of the corpus {entropy:.4f})"
        parts.append(loss)
    if values["skipped"]:
        parts.append(f"{values['skipped']} updates left out")
    return "  ".join([*parts, str(run)])


def _last_step(event: Event) -> str:
    early = event.values.get("early_stop")
    if not early:
        return f"step {event.step}"
    since = "at all" if early["best_step"] is None else f"since step {early['best_step']}"
    return (
        f"stopped early at step {event.step}: no better {early['metric']} {since},"
        f" {counted(early['evaluations'], 'evaluation')} ago"
    )


def _recoveries(event: Event) -> str:
    recoveries = event.values.get("recoveries", [])
    if not recoveries:
        return ""
    seconds = ", ".join(map(show_seconds, recoveries))
    return f" over {len(recoveries) + 1} starts, again in {seconds}"


def _memory(event: Event) -> str:
    """The measured peak of memory and the plan's estimate; by device if the peaks differ."""
    peaks = event.values["memory_bytes_by_device"]
    estimate = event.values["memory_estimate_bytes"]
    if min(peaks) > 0.98 * max(peaks):
        measured = show_bytes(max(peaks))
    else:
        measured = ", ".join(map(show_bytes, peaks))
    if estimate is None:
        return f"memory {measured} a device at most; the plan had no estimate of activations"
    share = max(peaks) / estimate
    return f"memory {measured} a device at most of {show_bytes(estimate)} estimated ({share:.0%})"


def load_line(event: Event) -> str:
    """A line for all devices: lowest, mean and highest value if they differ."""
    values = event.values
    memory_bytes = values.get("memory_bytes_by_device") or values.get("memory_bytes_by_process")
    parts = {
        "use": _spread(values.get("utilisation_by_device"), lambda value: f"{value:.0%}"),
        "mem": _spread(memory_bytes, show_bytes),
        "power": _spread(values.get("power_watts_by_device"), lambda value: f"{value:.0f} W"),
        "temp": _spread(values.get("celsius_by_device"), lambda value: f"{value:.0f} C"),
        "cores": _spread(values.get("cores_by_process"), lambda value: f"{value:.1f}"),
        "host": _spread([values.get("host_utilisation")], lambda value: f"{value:.0%}"),
    }
    shown = [f"{name} {text}" for name, text in parts.items() if text]
    return "  ".join([f"load   step {event.step}", *shown])


def _spread(values: Sequence[float | None] | None, show: Callable[[float], str]) -> str:
    """The text '97%', or '0% .. 24% .. 97%' and the number of devices; '': nothing is known."""
    known = [value for value in values or () if value is not None]
    if not known:
        return ""
    low, mean, high = (show(value) for value in (min(known), sum(known) / len(known), max(known)))
    if low == mean == high:
        return high
    return f"{low} .. {mean} .. {high}"
