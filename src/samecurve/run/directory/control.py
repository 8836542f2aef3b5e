"""Requests to a live run: lines of control.jsonl that name the attempt, which one rank reads, and
signals, which every rank may get.
"""

import json
import math
import os
import signal
import time
from collections.abc import Sequence

from samecurve.core.events import REQUESTS, Request
from samecurve.core.system import regular_only, write_all
from samecurve.run.directory import Run

_MOST_SAVING = 0.01  # share of the time in which training may stand still for saves by the clock
_LOOK = 0.05  # seconds between two looks at the file
# the launcher sends it where the control file can't be written, or is not its own
STOP_SIGNAL = signal.SIGUSR1
_NOTHING = (0,) * len(REQUESTS)


def ask(run: Run, attempt: str, request: Request) -> None:
    """Send a request to a live attempt: one whole line."""
    line = json.dumps({"time": time.time(), "attempt": attempt, "request": request})
    with open(run.control, "ab", buffering=0, opener=regular_only) as file:
        write_all(file, f"{line}\n".encode())


class Requests:
    """The requests to this rank, from the control file, from signals and from the clock.

    control: None: another rank reads the control file.
    """

    def __init__(self, control: "ControlFile | None") -> None:
        self._control = control
        self._stops = self._stops_seen = 0  # signals that asked for a stop; those passed on
        self._kept = _NOTHING  # requests that were looked at, and not passed on
        self.signal: int | None = None  # the one that came last, where no launcher hears them

    def stop(self) -> None:
        self._stops += 1

    def saved(self, blocked: float) -> None:
        """Count the time until the next save from now on.

        blocked: seconds in which training stood still for the last save
        """
        if self._control is not None:
            self._control.saved(blocked)

    @property
    def has_stop_signal(self) -> bool:
        """Whether a signal to this process has asked for a stop, passed on or not."""
        return self._stops > 0

    def is_stop_asked(self) -> bool:
        """Whether a stop was asked for. All requests stay for pending()."""
        self._kept = tuple(self.pending())
        return bool(self._kept[REQUESTS.index("stop")])

    def pending(self) -> Sequence[int]:
        """How many new requests there are of each of events.REQUESTS."""
        kept, self._kept = self._kept, _NOTHING
        counts = _NOTHING if self._control is None else self._control.pending()
        if kept is not _NOTHING:
            counts = [before + new for before, new in zip(kept, counts, strict=True)]
        if self._stops > self._stops_seen:  # a signal may come between any two lines of this
            new = self._stops - self._stops_seen
            self._stops_seen += new
            counts = [*counts]
            counts[REQUESTS.index("stop")] += new
        return counts


class ControlFile:
    """The requests to this attempt, read by one rank, and saves that go by the clock.

    Asked in each step, it looks at the file and the clock twenty times a second at most. All ranks
    agree on the step of a save as they do where somebody asks for one.

    save_seconds: between saves; 0: none goes by the clock
    """

    def __init__(self, run: Run, attempt: str, save_seconds: float = 0.0) -> None:
        self._path, self._attempt, self._position = str(run.control), attempt, 0
        self._next_look = 0.0
        self._save_seconds = save_seconds
        self._next_save = time.monotonic() + save_seconds if save_seconds else math.inf

    def saved(self, blocked: float) -> None:
        """Count the time until the next save by the clock from now on, as Requests.saved() does."""
        if self._save_seconds:
            gap = max(self._save_seconds, blocked / _MOST_SAVING)
            self._next_save = time.monotonic() + gap

    def pending(self) -> Sequence[int]:
        """How many new requests there are of each of events.REQUESTS."""
        now = time.monotonic()
        if now < self._next_look:
            return _NOTHING
        self._next_look = now + _LOOK
        counts = self._read()
        if now >= self._next_save:
            self._next_save = math.inf  # until the save is published
            counts = [*counts]
            counts[REQUESTS.index("save")] += 1
        return counts

    def _read(self) -> Sequence[int]:
        """The new requests in the file."""
        try:
            if os.stat(self._path).st_size <= self._position:
                return _NOTHING
        except FileNotFoundError:
            return _NOTHING
        counts = [0] * len(REQUESTS)
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
    """The request of a line; None: it is for another attempt, or no request."""
    try:
        values = json.loads(line)
    except ValueError:
        return None
    if not isinstance(values, dict) or values.get("attempt") != attempt:
        return None
    return next((name for name in REQUESTS if name == values.get("request")), None)
