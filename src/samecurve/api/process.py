"""Start the command line in a process of its own, and follow that process until it ends.

An interrupt here stops the process in order. The process runs child.py.
"""

import contextlib
import itertools
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from samecurve.core.planning.plan import Plan
from samecurve.errors import RunError, SamecurveError, UserError
from samecurve.observe.console import PlainView
from samecurve.observe.journal import event_of


@contextlib.contextmanager
def verb_process(verb: str, arguments: list[str]) -> Iterator["subprocess.Popen[str]"]:
    """Start the verb's process, which ends with the block."""
    process = subprocess.Popen(
        [sys.executable, "-u", "-m", "samecurve.api.child", str(os.getpid()), verb, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # not of our terminal's group: a Ctrl-C reaches it through us, once
        start_new_session=True,
    )
    with process, contextlib.ExitStack() as cleaning:
        cleaning.callback(_kill, process)
        yield process


def read_answer(process: "subprocess.Popen[str]", *, quiet: bool) -> tuple[str, list[str]]:
    """The answer of verify, and the lines that it wrote meanwhile, each shown when it came."""
    assert process.stdout is not None
    assert process.stderr is not None
    lines: list[str] = []
    show = None if quiet else sys.stdout
    table = threading.Thread(target=_collect, args=(process.stderr, lines, show), name="table")
    table.start()
    try:
        answer = process.stdout.read()
        process.wait()
    except KeyboardInterrupt:
        process.send_signal(signal.SIGINT)
        process.wait()
        raise
    finally:
        table.join()
    return answer, lines


def follow(process: "subprocess.Popen[str]", *, quiet: bool) -> Path | None:
    """Show what the process writes until it ends. Returns the run directory, if it named one."""
    assert process.stdout is not None
    assert process.stderr is not None
    error_lines: list[str] = []
    arguments = (process.stderr, error_lines, sys.stderr)
    errors = threading.Thread(target=_collect, args=arguments, name="errors")
    errors.start()
    display = _Display(quiet=quiet)
    interrupted = False
    while True:
        try:
            for line in process.stdout:
                display.show(line)
            process.wait()
            break
        except KeyboardInterrupt:
            # the first lets it save, the second ends it: the launcher owns signals
            interrupted = True
            process.send_signal(signal.SIGINT)
    errors.join()
    if interrupted:
        if display.directory is None:
            raise KeyboardInterrupt("stopped before anything was trained")
        raise KeyboardInterrupt(
            f"stopped; {display.directory} holds what was trained, and the same call goes on"
        )
    if 0 < process.returncode < 128 or process.returncode < 0:
        raise error_of(error_lines, process.returncode)
    return display.directory


class _Display:
    """Shows the lines of a headless run as a person reads them."""

    def __init__(self, *, quiet: bool) -> None:
        self.directory: Path | None = None
        self._quiet = quiet
        self._view: PlainView | None = None

    def show(self, line: str) -> None:
        event = event_of(line.encode())
        if event is None:
            print(line, end="")  # what the user's own code prints
            return
        if event.kind == "planned":
            self.directory = Path(event.values["run"])
            self._view = PlainView(Plan.from_json(event.values["plan"]), self.directory)
        if self._view and not self._quiet:
            self._view.show(event)


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


def _kill(process: "subprocess.Popen[str]") -> None:
    """End the process if it still runs."""
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
        process.send_signal(signal.SIGINT)
