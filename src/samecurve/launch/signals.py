"""Signals belong to whoever launched: the first asks the run to stop, the second kills."""

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import psutil

# seconds in which signals are one: a parent of several threads leaves its children its death signal
# once for each
_ONCE = 0.2
# processes of libraries that end with this one, and serve it until then
_ENDING = ("multiprocessing.resource_tracker", "multiprocessing.forkserver", "compile_worker")
STOPPING = b"\nstopping at the end of this step, after saving; once more to leave at once\n"


class Signals:
    """SIGINT and SIGTERM, from when this is entered."""

    def __init__(self, first: Callable[[], None], second: Callable[[], None]) -> None:
        """first, second: called for the first signal, and for the next one, which ends us."""
        self._first, self._second = first, second
        self.received: int | None = None  # the number of the first one
        self._received_at = 0.0
        self._old_handlers: dict[int, Any] = {}

    def __enter__(self) -> "Signals":
        for number in (signal.SIGINT, signal.SIGTERM):
            self._old_handlers[number] = signal.signal(number, self._on)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._old_handlers.items():
            signal.signal(number, handler)

    def _on(self, number: int, _: object) -> None:
        if self.received is None:
            self.received, self._received_at = number, time.monotonic()
            self._first()
            return
        if time.monotonic() - self._received_at < _ONCE:
            return
        self._second()
        os._exit(128 + number)


@contextmanager
def children_ended() -> Iterator[None]:
    """What has been started inside of the block is not left behind by it."""
    before = set(psutil.Process().children(recursive=True))
    try:
        yield
    finally:
        for child in psutil.Process().children(recursive=True):
            with suppress(psutil.Error):
                if child not in before and not any(map(" ".join(child.cmdline()).count, _ENDING)):
                    child.kill()


def kill_children() -> None:
    """All that this process has started, and what they have; the terminal is left in order."""
    for child in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):
            child.kill()
    if sys.stdout.isatty():
        os.write(1, b"\x1b[?25h")  # the cursor, which the progress bar had hidden
