"""The console's view of a live run: its events in the words of event_lines.py.

On a terminal a progress bar shows the latest step. Redirected output has a plain line every
`log_every` steps or thirty seconds. Headless output is the journal's own lines.
"""

import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Protocol

from rich.console import Console as Terminal
from rich.console import ConsoleDimensions, RenderableType
from rich.progress import BarColumn, Progress, TextColumn
from rich.text import Text

from samecurve.core.events import Event
from samecurve.core.planning.plan import Plan
from samecurve.observe import follow, line_of
from samecurve.observe.event_lines import (
    MEAN,
    Pace,
    console_lines,
    join_parts,
    load_line,
    step_parts,
)
from samecurve.terminal import cut_line, printable, width_of, wrapped

_AT_LEAST_EVERY = 30.0  # seconds between lines of a kind
_BAR_WIDTH = 16

_MOST_WANTED = (
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
)


class View(Protocol):
    """Shows a run's events to a person or a program."""

    def show(self, event: Event) -> None: ...
    def close(self) -> None: ...


class WarningsAlone:
    """Shows a run's warnings, and nothing else.

    say: shows a line.
    """

    def __init__(self, plan: Plan, home: Path, say: Callable[[str], None]) -> None:
        self._plan, self._home, self._say = plan, home, say

    def show(self, event: Event) -> None:
        if event.kind == "warned":
            for line in console_lines(event, self._plan, self._home):
                self._say(line)

    def close(self) -> None:
        pass


class JsonLines:
    """JSON lines on stdout."""

    def show(self, event: Event) -> None:
        sys.stdout.write(line_of(event))
        sys.stdout.flush()

    def close(self) -> None:
        pass


class PlainView:
    """A view that writes plain lines. write: writes one line."""

    def __init__(self, plan: Plan, run: Path, write: Callable[[str], None] | None = None) -> None:
        self._plan, self._run = plan, run
        self._write = write or (lambda line: print(line, flush=True))
        self._last_step = self._last_sensors = time.monotonic()  # of the last lines shown
        self._pace = Pace()

    def show(self, event: Event) -> None:
        self._pace.add(event)
        now = time.monotonic()
        if event.kind == "step":
            is_due = not event.step % self._plan.every.log or event.step == self._plan.steps
            if not is_due and now - self._last_step < _AT_LEAST_EVERY:
                return
            self._last_step = now
        if event.kind == "sensors":
            if now - self._last_sensors < _AT_LEAST_EVERY:
                return
            self._last_sensors = now
        for line in console_lines(event, self._plan, self._run, self._pace):
            self._write(printable(line))

    def close(self) -> None:
        pass


class _Screen(Terminal):
    """A terminal as wide as it is now. rich alone prefers COLUMNS, which a shell or a program may
    have exported before the window changed: a bar of that width leaves its old lines behind.
    """

    @property  # type: ignore[misc]  # nothing sets it
    def size(self) -> ConsoleDimensions:
        width, height = super().size
        return ConsoleDimensions(width_of(self.file) or width, height)


class BarAndLine(Progress):
    below = ""  # a line under the bar

    def get_renderables(self) -> Iterable[RenderableType]:
        yield self.make_tasks_table(self.tasks)
        if self.below:
            yield Text(cut_line(self.below, self.console.width), no_wrap=True)


class RichView:
    """A progress bar with the latest step's metrics and, below it, a line of sensor readings.

    Other events scroll above the bar.
    """

    def __init__(self, plan: Plan, run: Path, terminal: Terminal | None = None) -> None:
        self._terminal = terminal or _Screen(highlight=False, soft_wrap=True)
        self._plain = PlainView(plan, run, self._print)
        self._plan, self._run = plan, run
        self._pace = Pace()
        self._column = BarColumn(bar_width=_BAR_WIDTH)
        self._bar = BarAndLine(
            TextColumn("{task.description}", markup=False),
            self._column,
            console=self._terminal,
            transient=True,
            refresh_per_second=4,
        )
        self._task = self._bar.add_task("starting", total=plan.steps)
        self._bar.start()

    def show(self, event: Event) -> None:
        self._pace.add(event)
        if event.kind == "step":
            self._bar.update(
                self._task, completed=event.step, description=self._fit_to_width(event)
            )
            if event.step % (self._plan.every.log * 10) == 0 or event.values.get("skipped"):
                self._plain.show(event)
        elif event.kind == "sensors":
            self._bar.below = load_line(event)
        else:
            self._plain.show(event)

    def _print(self, line: str) -> None:
        self._terminal.print(wrapped(line, self._terminal.width), markup=False)

    def _fit_to_width(self, event: Event) -> str:
        """A step's line with as many metrics as fit into the terminal, the most wanted first.

        Where the step, the loss and the bar don't fit, the bar is shorter, and then the names are
        left out, the bar, the step, and at last the loss.
        """
        parts = step_parts(event.step, event.values, self._plan, self._pace)
        width = self._terminal.width - 1  # a space lies before the bar
        always = join_parts(parts, {"step", "loss"})
        if len(always) + 1 > width:
            loss = parts["loss"].removeprefix("loss ")
            forms = [f"{event.step}/{self._plan.steps} {loss}", loss, ""]
            shown_form = next(form for form in forms if len(form) <= max(width, 0))
            self._column.bar_width = max(1, min(_BAR_WIDTH, width - len(shown_form)))
            return shown_form
        self._column.bar_width = min(_BAR_WIDTH, width - len(always))
        room = width - self._column.bar_width
        shown = {"step", "loss"}
        means = [name for name in parts if name.startswith(MEAN)]
        for name in [*_MOST_WANTED[2:4], *means, *_MOST_WANTED[4:]]:
            if name in parts and len(join_parts(parts, shown | {name})) <= room:
                shown.add(name)
        return join_parts(parts, shown)

    def close(self) -> None:
        self._bar.stop()


def make_view(plan: Plan, run: Path, *, headless: bool) -> View:
    if headless:
        return JsonLines()
    if sys.stdout.isatty():
        return RichView(plan, run)
    return PlainView(plan, run)


@contextmanager
def show_journal(view: View, journal: Path, start: int) -> Iterator[None]:
    """Show a journal's events in a thread until the block ends, and then the remaining ones.

    start: the byte of the journal at which to begin
    """
    stop = threading.Event()

    def work() -> None:
        try:
            for event in follow(journal, stop, start):
                view.show(event)
        except OSError as error:  # nobody reads the output any more
            text = (
                f"warn   nothing more is shown here: {error.strerror}; the run goes on, and"
                f" {journal} has everything\n"
            )
            with suppress(OSError):  # a closed terminal
                os.write(2, text.encode())

    thread = threading.Thread(target=work, name="console", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
        with suppress(OSError):
            view.close()
