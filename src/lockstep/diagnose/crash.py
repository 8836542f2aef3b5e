"""A failed world -> the one failure that began it, with its cause and remedy."""

import json
import shutil
import signal
import tempfile
import time
import traceback
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from lockstep.errors import LockstepError, RunError, UserError

# What a rank says when it lost another one: a consequence, never the cause.
_PEER_LOST = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "Connection refused", "remote process exited", "Socket closed", "NCCL communicator was aborted")


@dataclass(frozen=True)
class Note:
    """What a failing rank left behind. trace: its traceback; '' where the error explains itself."""

    rank: int
    time: float
    cause: str
    remedy: str
    where: str
    trace: str
    exit_code: int


def note_of(rank: int, error: BaseException) -> Note:
    if isinstance(error, LockstepError):
        return Note(rank, time.time(), error.cause, error.remedy, error.where, "", error.exit_code)
    return Note(rank, time.time(), f"{type(error).__name__}: {error}".strip(), "", "", "".join(traceback.format_exception(error)), 1)


def write_note(logs: Path, attempt: str, note: Note) -> None:
    """Into the run's logs; elsewhere if there is no room, since a full disk may be what has failed."""
    text = json.dumps(asdict(note))
    try:
        (logs / f"failure-{note.rank}.json").write_text(text)
    except OSError:
        (logs / f"failure-{note.rank}.json").unlink(missing_ok=True)
        spare = _spare(attempt)
        spare.mkdir(exist_ok=True)
        (spare / f"failure-{note.rank}.json").write_text(text)


def read_notes(logs: Path, attempt: str) -> list[Note]:
    """In the order in which the ranks failed."""
    spare = _spare(attempt)
    found = [Note(**json.loads(path.read_text())) for home in (logs, spare) for path in home.glob("failure-*.json")]
    shutil.rmtree(spare, ignore_errors=True)
    return sorted(found, key=lambda note: note.time)


def _spare(attempt: str) -> Path:
    return Path(tempfile.gettempdir()) / f"lockstep-{attempt}"


def explain(notes: list[Note], exits: Mapping[int, int], logs: Path) -> LockstepError:
    """notes: by time. exits: rank -> exit code, negative for a signal, of the ranks that did not end well."""
    known = [note for note in notes if not note.trace]
    causes = [note for note in notes if not any(sign in note.cause for sign in _PEER_LOST)]
    killed = [rank for rank, code in exits.items() if code < 0 and code != -signal.SIGTERM and rank not in {note.rank for note in notes}]
    if known:
        return _error(known[0], logs)
    if causes:
        return _error(causes[0], logs)
    if killed:
        name = signal.Signals(-exits[killed[0]]).name
        why = {"SIGKILL": "; the kernel does so when memory runs out", "SIGABRT": "; jax and NCCL do so when another rank is lost"}.get(name, "")
        return RunError(f"rank {killed[0]} was ended by {name}{why}", "run the same command again: it goes on from the last save; the log says more", str(logs / f"rank-{killed[0]}.log"))
    told = [rank for rank, code in exits.items() if code == -signal.SIGTERM and rank not in {note.rank for note in notes}]
    if notes and told:  # those left have only lost a peer, so the one that somebody ended came first
        return RunError(f"rank {told[0]} was ended by SIGTERM", "run the same command again: it goes on from the last save; to stop a run, signal its launcher")
    if notes:
        first = notes[0]
        said = first.cause.splitlines()[0][:200]
        remedy = "what ended that one stands in its log, or on its host's terminal; the same command again goes on from the last save"
        return RunError(f"rank {first.rank} lost another rank: {said}", remedy, str(logs / f"rank-{first.rank}.log"))
    rank, code = next(iter(exits.items()), (0, 1))
    return RunError(f"rank {rank} left with exit code {code} and no word", "its log may say why", str(logs / f"rank-{rank}.log"))


def _error(note: Note, logs: Path) -> LockstepError:
    kind = UserError if note.exit_code == UserError.exit_code else RunError
    log = logs / f"rank-{note.rank}.log"  # a lone process has none: what it says stands on the terminal
    trace = f"{note.trace.rstrip()}\n" if note.trace else ""
    return kind(f"{trace}rank {note.rank}: {note.cause}" if trace else note.cause, note.remedy or (f"{log} has more" if log.exists() else ""), note.where)
