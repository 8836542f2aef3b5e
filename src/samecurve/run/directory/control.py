"""Requests to a live run: lines of control.jsonl that name the attempt. One rank reads them."""

import json
import os
import time

from samecurve.core.events import REQUESTS, Request
from samecurve.core.system.files import regular_only, write_all
from samecurve.run.directory.run_directory import Run

_LOOK = 0.05  # seconds between two looks at the file


def ask(run: Run, attempt: str, request: Request) -> None:
    """Write a request to a live attempt, as one whole line."""
    line = json.dumps({"time": time.time(), "attempt": attempt, "request": request})
    with open(run.control, "ab", buffering=0, opener=regular_only) as file:
        write_all(file, f"{line}\n".encode())


class ControlFile:
    """Reads the requests to this attempt. The file is looked at 20 times a second at most."""

    def __init__(self, run: Run, attempt: str) -> None:
        self._path, self._attempt, self._position = run.control, attempt, 0
        self._next_look = 0.0

    def pending(self) -> list[int]:
        """How many new requests there are of each of events.REQUESTS."""
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
    """The request in a line; None: it is to another attempt, or no request."""
    try:
        values = json.loads(line)
    except ValueError:
        return None
    if not isinstance(values, dict) or values.get("attempt") != attempt:
        return None
    return next((name for name in REQUESTS if name == values.get("request")), None)
