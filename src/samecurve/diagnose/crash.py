"""A failed world -> the one failure that began it: its cause first, where it came about, a remedy,
and the log that has the rest.

A rank that only lost another one, or waited for it in vain, is never the cause while some rank
failed for a reason of its own.
"""

import re
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from samecurve.diagnose.known_failures import KnownFailure, find_known_failure
from samecurve.diagnose.notes import FailureNote
from samecurve.diagnose.tracebacks import Traceback, clip, last_traceback, read_tail
from samecurve.errors import RunError, SamecurveError, UserError

_FRAMES, _FEWER = 11, 7  # lines of an unknown failure's traceback, and of a known one's
_CAUSE = 400  # characters
_WORDS = 4  # further lines of an error, or of a log that has no traceback
_SPEECH = 40  # lines of a log's end in which a process without a traceback may have said why
_SILENT = re.compile(
    r"^pre-flight: .* did not end within "
)  # what a rank says that waits for one which has failed
_AGAIN = "the same command again goes on from the last save, where there is one"
_ANEW = "run it again; with --max-restarts N that happens by itself, for a script that resumes"
_LINE = re.compile(r"\.py:\d+$")  # a line of the user's own
_HOW = {
    "SIGABRT": "; a library did so: its last words are below, if it had any",
    "SIGSEGV": ": native code failed; PYTHONFAULTHANDLER=1 shows where it was called",
    "SIGBUS": ": a file that it had mapped lost its room, often /dev/shm",
    "SIGILL": ": a library was built for another CPU",
}


@dataclass(frozen=True)
class _Failed:
    """What is known of one rank's end.

    known: it fits the table, with these words. follows: "" , "lost" a peer, or "waited" for one.
    """

    rank: int
    code: int
    note: FailureNote | None
    trace: Traceback | None
    words: tuple[str, ...]
    known: KnownFailure | None = None
    said: tuple[str, str] = ("", "")
    follows: str = ""

    @property
    def signal(self) -> str:
        """That ended it, and nothing else is known; '' for another end."""
        return (
            signal.Signals(-self.code).name
            if self.code < 0 and not self.known and not self.trace
            else ""
        )


def explain(
    notes: list[FailureNote],
    exits: Mapping[int, int],
    logs: Path,
    *,
    oom_kills: int | None = None,
    world_size: int = 0,
    left_early: Sequence[int] = (),
    resumes: bool = True,
) -> SamecurveError:
    """notes: by time.

    exits: rank -> exit code, negative for a signal, of the ranks that did not end well, the first
    first.

    starved: processes that the kernel ended since the start for want of memory; None: not known.
    world: all ranks, to tell of those that did not fail. left: ranks that had ended with 0 when the
    first one failed. resumes: the same command goes on from a save.
    """
    noted = {note.rank for note in notes}
    failed = [
        *(_of_note(note, exits.get(note.rank, note.exit_code)) for note in notes),
        *(_of_log(rank, code, logs) for rank, code in exits.items() if rank not in noted),
    ]
    if not failed:
        return RunError(
            "the ranks failed without a word", "their logs may say why", again=True, log=str(logs)
        )
    first = _first(failed)
    early = bool(left_early and first.follows)
    others = _others(left_early[0] if early else first.rank, failed, world_size)
    error = (
        _left_early(left_early, others, logs)
        if early
        else _error(
            first,
            logs,
            oom_kills,
            others,
            world_size > 1 and (len(notes) < world_size or len({note.cause for note in notes}) > 1),
        )
    )
    error.rank = None if early else first.rank
    error.remedy = error.remedy if resumes else error.remedy.replace(_AGAIN, _ANEW)
    return error


def _left_early(left: Sequence[int], others: str, logs: Path) -> RunError:
    """The others lost it, or waited for it: data of unequal length is the usual reason."""
    return RunError(
        f"{_named(left)} left with exit code 0 before the others were done",
        "every rank must take the same number of steps and make the same calls: look for data of"
        " unequal length (drop_last, a sampler for each rank), or an exit that depends on the rank",
        trace=others,
        log=str(logs / f"rank-{left[0]}.log"),
    )


def _of_note(note: FailureNote, code: int) -> _Failed:
    if not note.trace:
        return _Failed(
            note.rank,
            abs(code),
            note,
            None,
            (),
            follows="waited" if _SILENT.search(note.cause) else "",
        )
    trace = last_traceback(note.trace)
    return _looked_up(note.rank, abs(code), note, trace, trace.error if trace else note.cause, ())


def _of_log(rank: int, code: int, logs: Path) -> _Failed:
    """A rank that was killed left no word, though its log may hold old ones."""
    text = (
        "" if code in {-signal.SIGKILL, -signal.SIGTERM} else read_tail(logs / f"rank-{rank}.log")
    )
    trace = last_traceback(text)
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("frame #")]
    said = trace.error if trace else "\n".join(lines[-_SPEECH:])
    if trace and trace.error.startswith("KeyboardInterrupt"):
        return _Failed(rank, -signal.SIGTERM, None, None, ())
    return _looked_up(rank, code, None, trace, said, tuple(lines[-_WORDS:]) if not trace else ())


def _looked_up(
    rank: int,
    code: int,
    note: FailureNote | None,
    trace: Traceback | None,
    said: str,
    words: tuple[str, ...],
) -> _Failed:
    found = find_known_failure(said)
    if not found:
        return _Failed(rank, code, note, trace, words)
    return _Failed(
        rank, code, note, trace, words, found[0], found[0].explain(found[1]), found[0].symptom
    )


def _first(failed: Sequence[_Failed]) -> _Failed:
    """The one that began it.

    A SIGTERM is mostly what the others get; one that came before a peer was lost came from outside,
    and so did a SIGKILL unless a rank was only late.
    """
    lost = any(one.follows == "lost" for one in failed)
    waited = any(one.follows == "waited" for one in failed)
    own = [one for one in failed if not one.follows and one.signal not in {"SIGTERM", "SIGKILL"}]
    killed = [
        one
        for one in failed
        if one.signal == "SIGKILL" and (lost or not waited or one is failed[0])
    ]
    ended = [one for one in failed if one.signal == "SIGTERM" and (lost or one is failed[0])]
    mine = [one for one in failed if one in own or one in killed]
    return next(
        iter(
            [
                *mine,
                *ended,
                *(one for one in failed if one.follows == "lost"),
                *(one for one in failed if one.follows),
                *failed,
            ]
        )
    )


def _error(
    first: _Failed, logs: Path, starved: int | None, others: str, alone: bool
) -> SamecurveError:
    """alone: not all ranks failed with the same word."""
    log = (
        logs / f"rank-{first.rank}.log"
    )  # a lone process has none: what it says stands on the terminal
    where = str(log) if log.exists() else ""
    below = [others] if others else []
    if first.note and not first.note.trace:
        own = bool(_LINE.search(first.note.where))
        cause, at = (
            (f"rank {first.rank}: {first.note.where}: {first.note.cause}", "")
            if own and alone
            else (first.note.cause, first.note.where)
        )
        if first.note.exit_code == UserError.exit_code:
            return UserError(cause, first.note.remedy, at)
        return RunError(
            cause,
            first.note.remedy,
            at,
            again=first.note.again,
            trace="\n".join(below),
            log=where if own else "",
        )
    if first.known:
        lines = [
            *(first.trace.show_frames(_FEWER) if first.trace else []),
            *(
                clip(line)
                for line in (first.trace.error.splitlines()[:1] if first.trace else first.words)
            ),
        ]
        return RunError(
            f"rank {first.rank}: {clip(first.said[0], _CAUSE)}",
            first.said[1],
            again=first.known.again,
            trace="\n".join([*lines, *below]),
            log=where,
        )
    if first.signal:
        cause, remedy, again = _killed(first, starved)
        return RunError(
            cause,
            remedy,
            again=again,
            trace="\n".join([*map(clip, first.words), *below]),
            log=where,
        )
    if first.trace:
        return _unknown(first.rank, first.trace, below, where)
    if first.note:
        return RunError(
            f"rank {first.rank}: {clip(first.note.cause, _CAUSE)}",
            _AGAIN,
            again=True,
            trace="\n".join(below),
            log=where,
        )
    words = [*map(clip, first.words), *below]
    return RunError(
        f"rank {first.rank} left with exit code {first.code} and no"
        f" {'traceback' if first.words else 'word'}",
        _AGAIN,
        again=True,
        trace="\n".join(words),
        log=where,
    )


def _unknown(rank: int, trace: Traceback, below: list[str], where: str) -> RunError:
    said, *more = trace.error.splitlines()
    own = trace.user_frame
    inner = own is not None and own is not trace.frames[-1]
    remedy = (
        f"{own.path}:{own.line}{f', in {own.function},' if own.function else ''} is"
        f" {'where your own code led there' if inner else 'the line to mend'}"
        if own
        else _AGAIN
    )
    lines = [
        *trace.show_frames(_FRAMES),
        *map(clip, [line for line in more if line.strip()][: _WORDS - 1]),
        *below,
    ]
    return RunError(
        f"rank {rank}: {clip(said, _CAUSE)}",
        remedy,
        again=True,
        trace="\n".join(lines),
        log=where,
    )


def _killed(first: _Failed, starved: int | None) -> tuple[str, str, bool]:
    said = f"rank {first.rank} was ended by {first.signal}"
    if first.signal == "SIGKILL" and starved:
        count = f"{starved} process{'es' if starved > 1 else ''}"
        return (
            f"{said}: memory ran out, and the kernel ended {count}",
            (
                "fewer samples at once, or fewer data workers; `dmesg` and the container's limit"
                " say how much there was"
            ),
            False,
        )
    if first.signal == "SIGKILL":
        return (
            said
            + (
                "; the kernel does so when memory runs out"
                if starved is None
                else "; not for want of memory: somebody, or a scheduler, did"
            ),
            _AGAIN,
            True,
        )
    if first.signal == "SIGTERM":
        return said, f"{_AGAIN}; to stop a run, signal its launcher", True
    return said + _HOW.get(first.signal, ""), _AGAIN, True


def _others(told: int, failed: Sequence[_Failed], world: int) -> str:
    """What the ranks other than the one that is told of were doing, in one line; '' if there are
    none.
    """
    rest = [one for one in failed if one.rank != told]
    groups = {
        "lost their peer": [one.rank for one in rest if one.follows == "lost"],
        "waited in vain": [one.rank for one in rest if one.follows == "waited"],
        "were ended": [one.rank for one in rest if one.signal in {"SIGTERM", "SIGKILL"}],
        "failed too": [
            one.rank for one in rest if not one.follows and one.signal not in {"SIGTERM", "SIGKILL"}
        ],
        "had not failed": (
            sorted(set(range(world)) - {told} - {one.rank for one in failed}) if world > 1 else []
        ),
    }
    words = [
        f"{_named(ranks)}"
        f" {how if len(ranks) > 1 else how.replace('their', 'its').replace('were', 'was')}"
        for how, ranks in groups.items()
        if ranks
    ]
    return f"others: {'; '.join(words)}" if words else ""


def _named(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, sorted(ranks)[:8])) + (
        f" and {len(ranks) - 8} more" if len(ranks) > 8 else ""
    )
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}"
