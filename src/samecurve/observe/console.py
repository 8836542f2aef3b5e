"""What a person sees of a run: sentences with numbers, made from the journal's events.

On a terminal a progress bar carries the latest step; redirected, one plain flushed line every
`log_every` steps or thirty seconds; headless, the journal's own lines and nothing else.
"""

import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Protocol

from rich.console import Console as Terminal
from rich.console import RenderableType
from rich.progress import BarColumn, Progress, TextColumn
from rich.text import Text

from samecurve.core.events import Event
from samecurve.core.planning.plan import Plan
from samecurve.observe.journal import follow
from samecurve.observe.pictures import pictures
from samecurve.observe.plan_text import banner
from samecurve.observe.sensors import load_line
from samecurve.units import show_bytes, show_count, show_seconds

_AT_LEAST_EVERY = 30.0
_BAR = 16
_SLOW_START = 30.0  # seconds


class View(Protocol):
    def show(self, event: Event) -> None: ...
    def close(self) -> None: ...


class JsonLines:
    """JSON lines on stdout."""

    def show(self, event: Event) -> None:
        sys.stdout.write(event.line())
        sys.stdout.flush()

    def close(self) -> None:
        pass


class Pace:
    """Seconds a step, and seconds of them waited for data, smoothed over some twenty steps: one
    alone says little where the device runs ahead of what is read of it.
    """

    def __init__(self) -> None:
        self.seconds: float | None = None
        self.waited = 0.0
        self._started = False

    def add(self, event: Event) -> None:
        if event.kind == "step" and not self._started:
            self._started = (
                True  # the first step also warms up, and would say too much of the others
            )
        elif event.kind == "step":
            new, waited = float(event.values["seconds"]), float(event.values["wait_seconds"])
            self.seconds, self.waited = (
                (new, waited)
                if self.seconds is None
                else (0.95 * self.seconds + 0.05 * new, 0.95 * self.waited + 0.05 * waited)
            )


class PlainView:
    """One line for what is worth one. write: takes a line."""

    def __init__(self, plan: Plan, run: Path, write: Callable[[str], None] | None = None) -> None:
        self._plan, self._run = plan, run
        self._write = write or (lambda line: print(line, flush=True))
        self._last = self._sensed = time.monotonic()
        self._pace = Pace()

    def show(self, event: Event) -> None:
        self._pace.add(event)
        if event.kind == "step":
            if (
                event.step % self._plan.every.log
                and event.step != self._plan.steps
                and time.monotonic() - self._last < _AT_LEAST_EVERY
            ):
                return
            self._last = time.monotonic()
        if event.kind == "sensors":
            if time.monotonic() - self._sensed < _AT_LEAST_EVERY:
                return
            self._sensed = time.monotonic()
        for line in console_lines(event, self._plan, self._run, self._pace):
            self._write(line)

    def close(self) -> None:
        pass


class Bar(Progress):
    """below: a line under the bar."""

    below = ""

    def get_renderables(self) -> Iterable[RenderableType]:
        yield self.make_tasks_table(self.tasks)
        if self.below:
            yield Text(self.below, no_wrap=True, overflow="ellipsis")


class RichView:
    """A bar with the latest step's figures, the sensors' under it; other events scroll above it."""

    def __init__(self, plan: Plan, run: Path) -> None:
        self._terminal = Terminal(highlight=False, soft_wrap=True)
        self._plain = PlainView(plan, run, lambda line: self._terminal.print(line, markup=False))
        self._plan, self._run = plan, run
        self._pace = Pace()
        self._bar = Bar(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=_BAR),
            console=self._terminal,
            transient=True,
            refresh_per_second=4,
        )
        self._task = self._bar.add_task("starting", total=plan.steps)
        self._bar.start()

    def show(self, event: Event) -> None:
        self._pace.add(event)
        if event.kind == "step":
            self._bar.update(self._task, completed=event.step, description=self._fitting(event))
            if event.step % (self._plan.every.log * 10) == 0 or event.values.get("skipped"):
                self._plain.show(event)
        elif event.kind == "sensors":
            self._bar.below = load_line(event)
        else:
            self._plain.show(event)

    def _fitting(self, event: Event) -> str:
        """As many of the step's figures as the line has room for beside the bar, the most wanted
        first.
        """
        parts = step_parts(event.step, event.values, self._plan, self._pace)
        room = self._terminal.width - _BAR - 3
        kept: set[str] = set()
        for name in (
            "step",
            "loss",
            "left",
            "rate",
            "compute",
            "grad",
            "memory",
            "lr",
            "wait",
            "skipped",
        ):
            if (
                name in parts
                and len("  ".join(parts[n] for n in parts if n in kept | {name})) <= room
            ):
                kept.add(name)
        return "  ".join(text for name, text in parts.items() if name in kept)

    def close(self) -> None:
        self._bar.stop()


def console_lines(event: Event, plan: Plan, run: Path, pace: Pace | None = None) -> list[str]:
    """An event as console lines. pace: of the steps so far."""
    values = event.values
    if event.kind == "planned":
        return [*banner(plan), f"run    {run}"]
    if event.kind == "step":
        return ["  ".join(step_parts(event.step, values, plan, pace or Pace()).values())]
    if event.kind == "evaluated":
        shown = "  ".join(
            f"{name} {_figure(value, '.4f')}"
            for name, value in values.items()
            if name not in {"seconds", "best_loss", "best_step"} and not isinstance(value, list)
        )
        best = ""
        if values["best_step"] is not None:
            best = (
                "  best so far"
                if values["best_step"] == event.step
                else f"  best {values['best_loss']:.4f} at step {values['best_step']}"
            )
        return [f"eval   step {event.step}  {shown}{best}  ({show_seconds(values['seconds'])})"]
    if event.kind == "saved":
        return [
            f"saved  step {event.step}  {show_bytes(values['bytes'])} in"
            f" {show_seconds(values['seconds'])} (blocked"
            f" {show_seconds(values['blocked_seconds'])})  {values['path']}"
        ]
    if event.kind == "sampled":
        texts = [
            line
            for text in values["texts"]
            for line in ["sample", *(f"  | {row}" for row in printable(text).splitlines())]
        ]
        return [*texts, *_pictures_line(event, run)]
    if event.kind == "hashed":
        return [f"hash   step {event.step}  {values['hash'][:16]}"]
    if event.kind == "resumed":
        return [f"resume step {event.step}  {values['text']}"]
    if event.kind == "stopped":
        return [f"stop   step {event.step} of {plan.steps}; --resume {run} goes on from here"]
    if event.kind == "finished":
        return _finished(event, plan, run)
    if event.kind == "sensors":
        return [load_line(event)]
    if event.kind == "started":
        return _slow_start(values)
    return _word(event)


def _pictures_line(event: Event, run: Path) -> list[str]:
    names = pictures(event)
    if not names:
        return []
    count = f"{len(names)} pictures" if len(names) > 1 else "1 picture"
    last = f" to {Path(names[-1]).name}" if len(names) > 1 else ""
    return [f"sample step {event.step}  {count}  {run / names[0]}{last}"]


def _word(event: Event) -> list[str]:
    if event.kind == "recovered":
        return [
            f"again  step {event.step} was trained {show_seconds(event.values['seconds'])} after"
            " the failure was found"
        ]
    marks = {"warned": "warn  ", "slow": "slow  ", "restarted": "again "}
    return [f"{marks[event.kind]} {event.values.get('text', '')}"] if event.kind in marks else []


def step_parts(step: int, values: dict[str, Any], plan: Plan, pace: Pace) -> dict[str, str]:
    """A step's figures as texts, by name, in the order in which they are shown; rates at the pace
    of the steps so far.
    """
    seconds, waited = (
        (pace.seconds, pace.waited) if pace.seconds else (values["seconds"], values["wait_seconds"])
    )
    values = {
        name: (
            value * values["seconds"] / seconds
            if name.endswith("_per_second") or name == "mfu"
            else value
        )
        for name, value in values.items()
    }
    rate = values.get("tokens_per_second")
    parts = {
        "step": f"step   {step}/{plan.steps}",
        "loss": f"loss {_figure(values.get('loss'), '.4f')}",
        "grad": f"grad {_figure(values.get('grad_norm'), '.3f')}",
        "lr": f"lr {values['lr']:.2e}",
        "rate": (
            f"{show_count(rate)} tok/s"
            if rate
            else f"{show_count(values['samples_per_second'])} samples/s"
        ),
    }
    if "mfu" in values:
        parts["compute"] = f"MFU {values['mfu']:.1%}"
    elif "flops_per_second" in values:
        parts["compute"] = f"{values['flops_per_second'] / 1e12:.3f} TFLOP/s"
    parts["wait"] = f"wait {min(1.0, waited / seconds):.1%}"
    parts["memory"] = f"mem {show_bytes(values['memory_bytes'])}"
    parts["left"] = f"left {show_seconds((plan.steps - step) * seconds)}"
    return parts | ({"skipped": "update left out"} if values.get("skipped") else {})


def _figure(value: float | None, form: str) -> str:
    return "not finite" if value is None else format(value, form)


def _slow_start(values: dict[str, Any]) -> list[str]:
    """A start that took long says what took it."""
    parts = {
        name.removesuffix("_seconds"): float(value)
        for name, value in values.items()
        if name.endswith("_seconds")
    }
    if sum(parts.values()) < _SLOW_START:
        return []
    told = ", ".join(f"{name} {show_seconds(value)}" for name, value in parts.items())
    remedy = (
        "its files may come over a network: a copy of the environment on a local disk starts sooner"
        if parts.get("import", 0.0) == max(parts.values())
        else "the other ranks began later, or reach this one slowly"
    )
    return [f"slow   the start took {show_seconds(sum(parts.values()))} ({told}); {remedy}"]


def _finished(event: Event, plan: Plan, run: Path) -> list[str]:
    values = event.values
    entropy = plan.reference.get("unigram_entropy")
    loss = ""
    if "loss" in values:
        loss = f"  validation loss {_figure(values['loss'], '.4f')} nats" + (
            f" (single-token entropy of the corpus {entropy:.4f})" if entropy else ""
        )
    skipped = f"  {values['skipped']} updates left out" if values["skipped"] else ""
    return [
        (
            f"done   step {event.step}  {values['steps']} steps in"
            f" {show_seconds(values['seconds'])}  goodput"
            f" {values['goodput']:.0%}{_recoveries(values)}{loss}{skipped}  {run}"
        ),
        *_memory(values),
    ]


def _recoveries(values: dict[str, Any]) -> str:
    found = values.get("recoveries", [])
    return (
        f" over {len(found) + 1} starts, again in {', '.join(map(show_seconds, found))}"
        if found
        else ""
    )


def _memory(values: dict[str, Any]) -> list[str]:
    """The measured peak beside the plan's estimate; by device where they differ."""
    peaks, estimate = values["memory_bytes_by_device"], values["memory_estimate_bytes"]
    shown = (
        show_bytes(max(peaks))
        if min(peaks) > 0.98 * max(peaks)
        else ", ".join(map(show_bytes, peaks))
    )
    against = (
        "; the plan had no estimate"
        if estimate is None
        else f" of {show_bytes(estimate)} estimated ({max(peaks) / estimate:.0%})"
    )
    return [f"memory {shown} a device at most{against}"]


def printable(text: str) -> str:
    """A model's text without what would move a terminal's cursor or colour it."""
    return "".join(
        c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in text
    )


def make_view(plan: Plan, run: Path, headless: bool) -> View:
    if headless:
        return JsonLines()
    return RichView(plan, run) if sys.stdout.isatty() else PlainView(plan, run)


@contextmanager
def show_journal(chosen: View, journal: Path, start: int) -> Iterator[None]:
    """Show a journal's events from byte `start` on, in a thread, until the block ends; then the
    rest of it.
    """
    stop = threading.Event()

    def work() -> None:
        try:
            for event in follow(journal, stop, start):
                chosen.show(event)
        except OSError as error:  # nobody reads us any more
            os.write(
                2,
                f"warn   nothing more is shown here: {error.strerror}; the run goes on, and"
                f" {journal} has everything\n".encode(),
            )

    thread = threading.Thread(target=work, name="console", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
        with suppress(OSError):
            chosen.close()
