"""What a failing rank leaves behind for whoever tells the failure: one small file a rank."""

import json
import shutil
import tempfile
import time
import traceback
from dataclasses import asdict, dataclass
from pathlib import Path

from samecurve.errors import RunError, SamecurveError


@dataclass(frozen=True)
class FailureNote:
    """trace: the traceback as Python prints it; '' where the error explains itself.

    again: starting again may help, as far as the error itself knows.
    """

    rank: int
    time: float
    cause: str
    remedy: str
    where: str
    trace: str
    exit_code: int
    again: bool = False


def note_of(rank: int, error: BaseException) -> FailureNote:
    if isinstance(error, SamecurveError):
        return FailureNote(
            rank,
            time.time(),
            error.cause,
            error.remedy,
            error.where,
            "",
            error.exit_code,
            isinstance(error, RunError) and error.again,
        )
    return FailureNote(
        rank,
        time.time(),
        f"{type(error).__name__}: {error}".strip(),
        "",
        "",
        "".join(traceback.format_exception(error)),
        1,
    )


def write_note(logs: Path, attempt: str, note: FailureNote) -> None:
    """Into the run's logs; elsewhere if there is no room, since a full disk may be what has failed."""
    text = json.dumps(asdict(note))
    try:
        (logs / f"failure-{note.rank}.json").write_text(text)
    except OSError:
        (logs / f"failure-{note.rank}.json").unlink(missing_ok=True)
        spare = _spare(attempt)
        spare.mkdir(exist_ok=True)
        (spare / f"failure-{note.rank}.json").write_text(text)


def read_note(logs: Path, rank: int) -> FailureNote | None:
    """Of one rank, in the run's logs; None: it has written none, or not all of it yet."""
    try:
        return FailureNote(**json.loads((logs / f"failure-{rank}.json").read_text()))
    except (OSError, ValueError):
        return None


def read_notes(logs: Path, attempt: str) -> list[FailureNote]:
    """In the order in which the ranks failed."""
    spare = _spare(attempt)
    found = [
        FailureNote(**json.loads(path.read_text()))
        for home in (logs, spare)
        for path in home.glob("failure-*.json")
    ]
    shutil.rmtree(spare, ignore_errors=True)
    return sorted(found, key=lambda note: note.time)


def _spare(attempt: str) -> Path:
    return Path(tempfile.gettempdir()) / f"samecurve-{attempt}"
