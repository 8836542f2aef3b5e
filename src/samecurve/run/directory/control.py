"""Requests to a live run: whole lines in control.jsonl that name the attempt, read by one rank."""

import json
import os
import time

from samecurve.core.events import REQUESTS, Request
from samecurve.core.system.files import regular_only, write_all
from samecurve.run.directory.run_directory import Run

_LOOK = 0.05  # seconds between two looks at the file


def ask(run: Run, attempt: str, request: Request) -> None:
    """A request to a live attempt: one whole line."""
    line = json.dumps({"time": time.time(), "attempt": attempt, "request": request})
    with open(run.control, "ab", buffering=0, opener=regular_only) as file:
        write_all(file, f"{line}\n".encode())


class ControlFile:
    """The requests of this attempt, read by one rank.

    It is asked each step, and looks twenty times a second at most.
    """

    def __init__(self, run: Run, attempt: str) -> None:
        self._path, self._attempt, self._position = run.control, attempt, 0
        self._next_look = 0.0

    def pending(self) -> list[int]:
        """How many new ones there are of each of events.REQUESTS."""
        counts = [0] * len(REQUESTS)
        now = time.monotonic()
        if now < self._next_look:
            return counts
        self._next_look = now + _LOOK
        try:
            if os.stat(self._path).st_size <= self._position:
                return counts
        except FileNotFoundError:
            return counts
        with open(self._path, "rb", opener=regular_only) as file:
            file.seek(self._position)
            for line in file:
                if not line.endswith(b"\n"):
                    break
                self._position += len(line)
                request = _read_request(line, self._attempt)
                if request is not None:
                    counts[REQUESTS.index(request)] += 1
        return counts


def _read_request(line: bytes, attempt: str) -> Request | None:
    """None: another attempt's line, or one that is no request."""
    try:
        values = json.loads(line)
    except ValueError:
        return None
    if not isinstance(values, dict) or values.get("attempt") != attempt:
        return None
    return next((name for name in REQUESTS if name == values.get("request")), None)
