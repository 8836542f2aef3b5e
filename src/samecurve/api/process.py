"""Run a verb of the command line in a process of its own, and follow the process until it ends.

The config is loaded in that process alone. A user's class declares the fields of its config, so
loading it here would run the user's file, and import torch, in the script or notebook that calls.
"""

import io
import itertools
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from subprocess import PIPE
from typing import IO

from samecurve.api.live_view import NotebookView, notebook_output
from samecurve.core.planning.plan import Plan
from samecurve.errors import RunError, SamecurveError, UserError
from samecurve.observe import event_of
from samecurve.observe.console import PlainView, View
from samecurve.processes import Call, start_process


def run_verb(
    verb: str, arguments: list[str], on_line: Callable[[str], None], show: IO[str] | None
) -> tuple[int, list[str]]:
    """Run a verb until it ends. Returns its exit code, and the lines that it wrote to stderr.

    on_line: is called with each line that it writes to stdout
    show: where its lines on stderr are shown as they come, without its error; None: nowhere

    KeyboardInterrupt: an interrupt came. The first lets the process save, the second ends it.
    """
    call = Call(
        "samecurve.cli.entry",
        (verb, *arguments),
        "run_words",
        new_session=True,  # a Ctrl-C reaches it through us, once
        ended_by=signal.SIGTERM,
        unbuffered=True,
    )
    process = start_process(call, stdout=PIPE, stderr=PIPE)
    lines: list[str] = []
    interrupted = False
    assert process.stdout is not None
    assert process.stderr is not None
    with io.TextIOWrapper(process.stdout) as output, io.TextIOWrapper(process.stderr) as words:
        errors = threading.Thread(target=_collect, args=(words, lines, show), name="errors")
        errors.start()
        try:
            while process.returncode is None:
                try:
                    for line in output:
                        on_line(line)
                    process.wait()
                except KeyboardInterrupt:
                    interrupted = True
                    process.send_signal(signal.SIGINT)
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGINT)
                process.send_signal(signal.SIGINT)
            errors.join()
    code = process.wait()
    if interrupted:
        raise KeyboardInterrupt
    return code, lines


def _collect(stream: IO[str], lines: list[str], show: IO[str] | None) -> None:
    """Collect every line of a stream, and show those that are no error when they come."""
    for line in stream:
        lines.append(line)
        if show is not None and not line.startswith(("error: ", "  remedy: ")):
            print(line, end="", file=show)


def error_of(lines: list[str], code: int) -> SamecurveError:
    """The exception of the process, read from the last lines that it wrote."""
    not_errors = itertools.takewhile(lambda line: not line.startswith("error: "), lines)
    first = len(list(not_errors))
    text = "".join(lines[first:]).strip().removeprefix("error: ")
    kind = UserError if code == UserError.exit_code else RunError
    if "\nerror: " in text or not text:
        return kind(text or f"the run left with exit code {code} and no word")
    cause, _, remedy = text.partition("\n  remedy: ")
    return kind(cause, remedy)


class Progress:
    """Shows the lines of a headless run as a person reads them: in a notebook with a live curve."""

    def __init__(self, *, quiet: bool) -> None:
        self.directory: Path | None = None  # of the run, once it has named it
        self._quiet = quiet
        self._view: View | None = None

    def show(self, line: str) -> None:
        event = event_of(line.encode())
        if event is None:
            print(line, end="")  # what the user's own code prints
            return
        if event.kind == "planned":
            self.directory = Path(event.values["run"])
            if not self._quiet:
                self._view = _view(Plan.from_json(event.values["plan"]), self.directory)
        if self._view:
            self._view.show(event)

    def close(self) -> None:
        if self._view:
            self._view.close()


def _view(plan: Plan, run: Path) -> View:
    output = notebook_output()
    return NotebookView(plan, run, output) if output else PlainView(plan, run)
