"""The `failed` line of a journal, written by a process that is not the loop."""

from contextlib import suppress
from pathlib import Path

from samecurve.core.events import Event
from samecurve.errors import SamecurveError
from samecurve.observe.heartbeat import read_beat
from samecurve.observe.journal import append_event


def record_failure(journal: Path, logs: Path, failure: SamecurveError) -> None:
    """Write why the run failed, at the first rank's step, as the journal's last line."""
    beat = read_beat(logs / "heartbeat-0")
    values = {"cause": failure.cause, "remedy": failure.remedy}
    with suppress(OSError):  # the cause may be a full disk; the terminal shows it too
        append_event(journal, Event("failed", beat.step if beat else 0, values))
