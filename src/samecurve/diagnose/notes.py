"""Failure notes: a small file in which a failing rank says why, for the process that reports it."""

import json
import os
import shutil
import tempfile
import time
import traceback
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from samecurve.core.system import explain_os_error
from samecurve.errors import RunError, SamecurveError, message_of
from samecurve.terminal import shorten

_MOST_CAUSE = 1600  # characters


@dataclass(frozen=True, kw_only=True)
class FailureNote:
    """A rank's own account of its failure."""

    rank: int
    time: float  # seconds since 1970
    cause: str
    remedy: str = ""
    where: str = ""
    trace: str = ""  # the traceback as Python prints it; '' if the error explains itself
    exit_code: int
    again: bool = False  # starting again may help, as far as the error itself knows


def note_of(rank: int, error: BaseException, home: Path | None = None) -> FailureNote:
    """The note for an error.

    home: the run directory: an OSError about a file in it is explained as such
    """
    if home and isinstance(error, OSError) and (path := _path_in(error, home)):
        error = RunError(*explain_os_error(error, path))
    if isinstance(error, SamecurveError):
        return FailureNote(
            rank=rank,
            time=time.time(),
            cause=error.cause,
            remedy=error.remedy,
            where=error.where,
            exit_code=error.exit_code,
            again=isinstance(error, RunError) and error.again,
        )
    return FailureNote(
        rank=rank,
        time=time.time(),
        cause=shorten(f"{type(error).__name__}: {message_of(error)}".strip(), _MOST_CAUSE),
        trace="".join(traceback.format_exception(error)),
        exit_code=1,
    )


def write_note(logs: Path, attempt: str, note: FailureNote) -> None:
    """Write a note into the run's logs, or elsewhere if there is no room: the disk may be full."""
    text = json.dumps(asdict(note))
    name = f"failure-{note.rank}.json"
    try:
        (logs / name).write_text(text)
    except OSError:
        with suppress(OSError):  # half of it; on a disk that is read-only by now, nothing of it
            (logs / name).unlink()
        elsewhere = _directory_elsewhere(attempt)
        elsewhere.mkdir(exist_ok=True)
        (elsewhere / name).write_text(text)


def read_note(logs: Path, rank: int) -> FailureNote | None:
    """The note of one rank in the run's logs; None: there is none, or not all of it yet."""
    return _read(logs / f"failure-{rank}.json")


def _read(path: Path) -> FailureNote | None:
    try:
        return FailureNote(**json.loads(path.read_text()))
    except (OSError, ValueError):
        return None


def read_notes(logs: Path, attempt: str) -> list[FailureNote]:
    """All notes, in the order in which the ranks failed."""
    elsewhere = _directory_elsewhere(attempt)
    notes = [
        note
        for directory in (logs, elsewhere)
        for path in directory.glob("failure-*.json")
        if (note := _read(path))
    ]
    shutil.rmtree(elsewhere, ignore_errors=True)
    return sorted(notes, key=lambda note: note.time)


def _path_in(error: OSError, home: Path) -> Path | None:
    """The file of the run that the error names; None: it names another file, or none."""
    if not isinstance(error.filename, str | bytes):
        return None
    path = Path(os.fsdecode(error.filename))
    return path if path.absolute().is_relative_to(home.absolute()) else None


def _directory_elsewhere(attempt: str) -> Path:
    return Path(tempfile.gettempdir()) / f"samecurve-{attempt}"
