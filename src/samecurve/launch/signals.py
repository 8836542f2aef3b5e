"""Signals belong to whoever launched: the first asks the run to stop, the second kills.

And a rank as a child that is told so.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import psutil

if TYPE_CHECKING:  # pydantic is not imported for `samecurve run`
    from samecurve.run.attempt import Attempt
from samecurve.system import LAUNCHER, STOP_SIGNAL

# seconds in which signals are one: a parent of several threads leaves its children its death signal
# once for each
_ONCE = 0.2
STOPPING = b"\nstopping at the end of this step, after saving; once more to leave at once\n"


class Signals:
    """SIGINT and SIGTERM, from when this is entered. received: the number of the first one."""

    def __init__(self, first: Callable[[], None], second: Callable[[], None]) -> None:
        self._first, self._second = first, second
        self.received: int | None = None
        self._at = 0.0
        self._old: dict[int, Any] = {}

    def __enter__(self) -> "Signals":
        self._old = {
            number: signal.signal(number, self._on) for number in (signal.SIGINT, signal.SIGTERM)
        }
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._old.items():
            signal.signal(number, handler)

    def _on(self, number: int, _: object) -> None:
        if self.received is None:
            self.received, self._at = number, time.monotonic()
            self._first()
            return
        if time.monotonic() - self._at < _ONCE:
            return
        self._second()
        os._exit(128 + number)


def leave_at_once() -> None:
    for child in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):
            child.kill()
    if sys.stdout.isatty():
        os.write(1, b"\x1b[?25h")  # the cursor, which the progress bar had hidden


def run_child(attempt: "Attempt") -> int:
    """The rank that the environment describes, in a process of its own: its library may abort it
    when it loses a peer, and somebody must be left to say so.

    Its exit code, negative for a signal that ended it; 128 + the signal that asked it to stop,
    which it then did in order.
    """
    child = subprocess.Popen(
        [sys.executable, "-u", "-m", "samecurve.worker.main", attempt.to_json()],
        env={**os.environ, LAUNCHER: str(os.getpid())},
    )

    def stop() -> None:
        child.send_signal(STOP_SIGNAL)
        os.write(2, STOPPING)

    with Signals(stop, leave_at_once) as signals:
        while child.poll() is None:
            time.sleep(0.1)
    return 128 + signals.received if signals.received and not child.returncode else child.returncode
