"""Requests to a live run: whole lines in control.jsonl that name the attempt, read by one rank."""

import json
import os
import time

from samecurve.core.events import REQUESTS, Request
from samecurve.run.directory import _LOOK, Run, _request


def ask(run: Run, attempt: str, request: Request) -> None:
    """A request to a live attempt: one whole line."""
    with open(run.control, "ab", buffering=0) as file:
        file.write(
            (
                json.dumps({"time": time.time(), "attempt": attempt, "request": request}) + "\n"
            ).encode()
        )


class ControlFile:
    """The requests of this attempt, read by one rank: pending() gives the new ones, by
    events.REQUESTS. It is asked each step, and looks twenty times a second at most.
    """

    def __init__(self, run: Run, attempt: str) -> None:
        self._path, self._attempt, self._position = run.control, attempt, 0
        self._next = 0.0

    def pending(self) -> list[int]:
        counts = [0] * len(REQUESTS)
        now = time.monotonic()
        if now < self._next:
            return counts
        self._next = now + _LOOK
        try:
            if os.stat(self._path).st_size <= self._position:
                return counts
        except FileNotFoundError:
            return counts
        with open(self._path, "rb") as file:
            file.seek(self._position)
            for line in file:
                if not line.endswith(b"\n"):
                    break
                self._position += len(line)
                request = _request(line, self._attempt)
                if request is not None:
                    counts[REQUESTS.index(request)] += 1
        return counts
