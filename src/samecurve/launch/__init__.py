"""Signals to a command: the first signal asks it to stop, the second ends it at once.

cli/main.py surrounds every verb with Signals. Work that stops in a way of its own, such as a run
that saves first, puts its own Signals around itself.
"""

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from samecurve.core.events import stop_signals
from samecurve.terminal import width_of, wrapped

# seconds in which several signals count as one: a parent with several threads sends its children
# the signal of its death once for each thread
_ONCE = 0.2
# processes of libraries, which serve this process until it ends
_ENDING = ("multiprocessing.resource_tracker", "multiprocessing.forkserver", "compile_worker")
_STOPPING = "stopping at the end of this step, after saving; once more to leave at once"


def stopping() -> bytes:
    """The answer to a first signal, as it fits the terminal of stderr."""
    width = width_of(sys.stderr)
    return f"\n{wrapped(_STOPPING, width) if width else _STOPPING}\n".encode()


class Signals:
    """Handles SIGINT, SIGTERM and SIGHUP (a closed terminal) while its block runs."""

    def __init__(self, first: Callable[[], None], second: Callable[[], None]) -> None:
        """first: called for the first signal. second: called for the second, before this exits."""
        self._first, self._second = first, second
        self.received: int | None = None  # the number of the first signal
        self._received_at = 0.0
        self._old_handlers: dict[int, Any] = {}

    def __enter__(self) -> "Signals":
        for number in stop_signals():
            self._old_handlers[number] = signal.signal(number, self._on)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._old_handlers.items():
            signal.signal(number, handler)

    def _on(self, number: int, _: object) -> None:
        if number == signal.SIGHUP:
            _leave_closed_terminal()
        if self.received is None:
            self.received, self._received_at = number, time.monotonic()
            self._first()
            return
        if time.monotonic() - self._received_at < _ONCE:
            return
        self._second()
        os._exit(128 + number)


def _leave_closed_terminal() -> None:
    """Send output to a closed terminal nowhere: an error would hide why this process ends."""
    for descriptor in (1, 2):
        try:
            os.write(descriptor, b"")
        except OSError:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, descriptor)
            os.close(nowhere)


@contextmanager
def children_ended() -> Iterator[None]:
    """Kill the processes that were started in the block, when the block ends."""
    import psutil

    before = set(psutil.Process().children(recursive=True))
    try:
        yield
    finally:
        for child in psutil.Process().children(recursive=True):
            with suppress(psutil.Error):
                if child not in before and not any(map(" ".join(child.cmdline()).count, _ENDING)):
                    child.kill()


def kill_children() -> None:
    """Kill all descendants of this process, and leave the terminal in order."""
    import psutil  # 15 ms, which a command that only shows its help need not wait for

    for child in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):
            child.kill()
    if sys.stdout.isatty():
        with suppress(OSError):
            os.write(1, b"\x1b[?25h")  # show the cursor, which the progress bar hides
