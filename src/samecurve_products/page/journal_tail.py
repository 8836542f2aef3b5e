"""The last lines of a run's journal, as the list of runs needs them, and the name of its attempt.

A journal may have hundreds of megabytes: only its last block is read, and only when it has grown.
"""

import json
import math
import mmap
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from samecurve.seam import Event, event_of, regular_only
from samecurve_products.report.steps import number

_TAIL, _LONG_TAIL = 1 << 16, 1 << 20  # bytes; the longer one where a single line fills the shorter
_BEGINNINGS = {"planned", "restarted", "resumed"}
_ENDS = {"finished", "stopped", "failed"}
_RATES = (("tokens_per_second", "tokens/s"), ("samples_per_second", "samples/s"))
_MOST_RATES = 20  # steps over which the rate is taken


@dataclass(frozen=True)
class Tail:
    """The facts that the end of a journal gives."""

    step: int = 0
    loss: float | None = None
    rate: tuple[float, str] | None = None  # and its unit
    end: str = ""  # finished, stopped or failed; '': no line says it
    cause: str = ""  # of a failure
    trains: bool = False  # a step was trained since the last start
    start_time: float | None = None  # of the last start; None: it lies further back
    first_time: float | None = None  # of the journal's first line
    last_time: float | None = None
    seconds: float | None = None  # of the last start, as its last line has them


def read_tail(path: Path) -> Tail:
    """Read the end of a journal. OSError: it can't be read."""
    with open(path, "rb", opener=regular_only) as file:
        first = file.readline(1 << 22)
        size = file.seek(0, os.SEEK_END)
        for most in (_TAIL, _LONG_TAIL):
            file.seek(max(0, size - most))
            lines = file.read(most).split(b"\n")
            # the first one may be cut, and the last one is being written
            events = [event for line in lines[:-1] if (event := event_of(line))]
            if events or size <= most:
                break
    began = event_of(first)
    return _tail_of(events, None if began is None else began.time)


def _tail_of(events: Sequence[Event], first_time: float | None) -> Tail:
    step, loss, end, cause = 0, None, "", ""
    trains, start_time, seconds = False, None, None
    recent: list[Event] = []
    for event in events:
        if event.kind in _BEGINNINGS:
            end, cause, trains, seconds = "", "", False, None
            recent.clear()
            step = event.step
            if event.kind == "planned":
                start_time = event.time
        elif event.kind == "step":
            step, loss, trains = event.step, _number(event.values.get("loss")), True
            end = ""
            recent.append(event)
        elif event.kind in _ENDS:
            end, cause = event.kind, str(event.values.get("cause") or "")
            seconds = _number(event.values.get("seconds"))
        step = max(step, event.step) if event.kind in {"evaluated", "saved", "sensors"} else step
    return Tail(
        step=step,
        loss=loss,
        rate=_rate(recent[-_MOST_RATES:]),
        end=end,
        cause=cause,
        trains=trains,
        start_time=start_time,
        first_time=first_time,
        last_time=events[-1].time if events else None,
        seconds=seconds,
    )


def _rate(steps: Sequence[Event]) -> tuple[float, str] | None:
    """The median rate of the last steps, and its unit."""
    for name, unit in _RATES:
        values = sorted(
            value for event in steps if (value := _number(event.values.get(name))) is not None
        )
        if values:
            return values[len(values) // 2], unit
    return None


def _number(value: object) -> float | None:
    as_float = number(value)
    return None if math.isnan(as_float) else as_float


def live_attempt(path: Path) -> str | None:
    """The name of the attempt that writes the journal now. None: the journal names none.

    The lines that begin a start name it. They are searched from the end, in the mapped file.
    """
    with open(path, "rb", opener=regular_only) as file:
        if not file.seek(0, os.SEEK_END):
            return None
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            end = content.rfind(b"\n") + 1
            # in a text of a line the quotes would have backslashes before them
            while (place := content.rfind(b'"attempt": "', 0, end)) >= 0:
                begin = content.rfind(b"\n", 0, place) + 1
                name = _attempt_of(content[begin : content.find(b"\n", place)])
                if name:
                    return name
                end = begin
    return None


def _attempt_of(line: bytes) -> str | None:
    try:
        values = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(values, dict) or values.get("kind") not in _BEGINNINGS:
        return None
    name = values.get("attempt")
    return name if isinstance(name, str) else None
