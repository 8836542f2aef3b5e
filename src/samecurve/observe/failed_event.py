"""Lines of a journal that a process beside the loop writes at the first rank's present step."""

from contextlib import suppress
from pathlib import Path
from typing import Any

from samecurve.core.events import Event, Kind
from samecurve.errors import SamecurveError
from samecurve.observe import append_event, read_beat


def record_failure(journal: Path, logs: Path, failure: SamecurveError) -> None:
    """Write why the run failed, as the journal's last line."""
    record_beside(journal, logs, "failed", cause=failure.cause, remedy=failure.remedy)


def record_beside(journal: Path, logs: Path, kind: Kind, **values: Any) -> None:
    """Write a line. On a full disk nothing is written: the run itself, or the terminal, says so."""
    beat = read_beat(logs / "heartbeat-0")
    with suppress(OSError):
        append_event(journal, Event(kind, beat.step if beat else 0, values))
