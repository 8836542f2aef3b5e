"""What a failing rank leaves behind for whoever tells the failure: one small file a rank."""

import json
import shutil
import tempfile
import time
import traceback
from dataclasses import asdict, dataclass
from pathlib import Path

from samecurve.errors import RunError, SamecurveError, message_of
from samecurve.terminal import shorten

_MOST_CAUSE = 1600  # characters


@dataclass(frozen=True, kw_only=True)
class FailureNote:
    """What one rank says of its own failure."""

    rank: int
    time: float  # seconds since 1970
    cause: str
    remedy: str
    where: str
    trace: str  # the traceback as Python prints it; '' where the error explains itself
    exit_code: int
    again: bool = False  # starting again may help, as far as the error itself knows


def note_of(rank: int, error: BaseException) -> FailureNote:
    if isinstance(error, SamecurveError):
        return FailureNote(
            rank=rank,
            time=time.time(),
            cause=error.cause,
            remedy=error.remedy,
            where=error.where,
            trace="",
            exit_code=error.exit_code,
            again=isinstance(error, RunError) and error.again,
        )
    return FailureNote(
        rank=rank,
        time=time.time(),
        cause=shorten(f"{type(error).__name__}: {message_of(error)}".strip(), _MOST_CAUSE),
        remedy="",
        where="",
        trace="".join(traceback.format_exception(error)),
        exit_code=1,
    )


def write_note(logs: Path, attempt: str, note: FailureNote) -> None:
    """Into the run's logs; elsewhere if there is no room: a full disk may be what has failed."""
    text = json.dumps(asdict(note))
    name = f"failure-{note.rank}.json"
    try:
        (logs / name).write_text(text)
    except OSError:
        (logs / name).unlink(missing_ok=True)
        elsewhere = _directory_elsewhere(attempt)
        elsewhere.mkdir(exist_ok=True)
        (elsewhere / name).write_text(text)


def read_note(logs: Path, rank: int) -> FailureNote | None:
    """Of one rank, in the run's logs; None: it has written none, or not all of it yet."""
    try:
        return FailureNote(**json.loads((logs / f"failure-{rank}.json").read_text()))
    except (OSError, ValueError):
        return None


def read_notes(logs: Path, attempt: str) -> list[FailureNote]:
    """In the order in which the ranks failed."""
    elsewhere = _directory_elsewhere(attempt)
    notes = [
        FailureNote(**json.loads(path.read_text()))
        for directory in (logs, elsewhere)
        for path in directory.glob("failure-*.json")
    ]
    shutil.rmtree(elsewhere, ignore_errors=True)
    return sorted(notes, key=lambda note: note.time)


def _directory_elsewhere(attempt: str) -> Path:
    return Path(tempfile.gettempdir()) / f"samecurve-{attempt}"
