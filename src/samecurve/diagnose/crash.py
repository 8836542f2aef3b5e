"""Explain why the ranks of a run failed: one error for the failure that came first.

The error has the cause, the place in the code, a remedy, and the log with the rest.
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from samecurve.diagnose.known_failures import Diagnosis
from samecurve.diagnose.notes import FailureNote
from samecurve.diagnose.rank_failure import (
    MAX_LINES,
    RankFailure,
    collect_failures,
    find_first_failure,
)
from samecurve.diagnose.tracebacks import Traceback, clip
from samecurve.errors import (
    FAULTY_DEVICE,
    FaultyDeviceError,
    RunError,
    SamecurveError,
    UserError,
)
from samecurve.units import some

# the remedy if one rank has ended before the others
SAME_CALLS = (
    "every rank must take the same number of steps and make the same calls: look for data of"
    " unequal length (drop_last, a sampler for each rank), or an exit that depends on the rank"
)
# the remedy for a fault of this program's own, which goes on with what else to send
_REPORT = (
    "no line of your own led there, so it may be a fault of Samecurve: report it where you have"
    " Samecurve from, with the command, `samecurve --version`,"
)
_MAX_FRAMES = 11  # lines of an unknown failure's traceback
_MAX_FRAMES_KNOWN = 7  # lines of a known failure's traceback
_MAX_CAUSE = 400  # characters
_MAX_RANKS = 8  # ranks that are named one by one
_USER_LINE = re.compile(r"\.py:\d+$")  # a place in the user's own code
# errors that a machine or another process causes
_FROM_OUTSIDE = re.compile(
    r"(?:\w+\.)*(?:\w*OSError|Connection\w*Error|Dist\w+Error|TimeoutError|PermissionError"
    r"|FileNotFoundError|BlockingIOError|MemoryError|OutOfMemoryError|AcceleratorError)\b"
)
_SAME_COMMAND = "the same command again goes on from the last save, where there is one"
_RUN_AGAIN = "run it again; with --max-restarts N that happens by itself, for a script that resumes"
_SIGNAL_MEANS = {
    "SIGABRT": "; a library did so: its last words are below, if it had any",
    "SIGSEGV": ": native code failed",
    "SIGBUS": ": a file that it had mapped lost its room, often in /dev/shm, or was cut",
    "SIGILL": ": a library was built for another CPU",
}


# what helps where the same command would end in the same way
_SIGNAL_REMEDIES = {
    "SIGSEGV": "PYTHONFAULTHANDLER=1 before the same command: the log then has the line of Python"
    " that called the native code",
    "SIGBUS": "see `df -h /dev/shm` and `df -h`; a container gets more by docker run --shm-size=8g;"
    " data files may not change while a run reads them",
    "SIGILL": "install torch, and other packages with native code, as built for this CPU (`lscpu`)",
}


def explain(
    notes: Sequence[FailureNote],
    exits: Mapping[int, int],
    logs: Path,
    *,
    oom_kills: int | None = None,
    world_size: int = 0,
    left_early: Sequence[int] = (),
    exit_places: Mapping[int, str] | None = None,
    resumes: bool = True,
) -> SamecurveError:
    """The error to show for a run whose ranks failed.

    notes: what the failing ranks wrote down, by time
    exits: rank -> exit code, negative for a signal, of the ranks that did not end well, the first
        one first
    oom_kills: processes that the kernel ended since the start because memory ran out; None: not
        known
    world_size: to name the ranks that did not fail; 0: not known
    left_early: ranks that had ended with 0, and that nobody had told to end
    exit_places: rank -> where its own code ended it by sys.exit(), of ranks that left so
    resumes: the same command goes on from a save
    """
    failures = collect_failures(notes, exits, logs)
    if not failures:
        cause = "the ranks failed and left no message"
        return RunError(cause, "their logs may say why", again=True, log=str(logs))
    first = find_first_failure(failures)
    if left_early and first.symptom:
        others = _describe_others(left_early[0], failures, world_size)
        error: SamecurveError = _explain_left_early(left_early, others, logs)
    else:
        others = _describe_others(first.rank, failures, world_size)
        all_noted = len(notes) >= world_size
        is_common = all_noted and len({note.cause for note in notes}) <= 1
        error = _explain_first(
            first,
            others=others,
            log=logs / f"rank-{first.rank}.log",
            oom_kills=oom_kills,
            name_rank=world_size > 1 and not is_common,
            exit_place=(exit_places or {}).get(first.rank, ""),
        )
        error.rank = first.rank
    if not resumes:
        error.remedy = error.remedy.replace(_SAME_COMMAND, _RUN_AGAIN)
    return error


def _explain_left_early(left_early: Sequence[int], others: str, logs: Path) -> RunError:
    """Explain ranks that left too early: data of unequal length is the usual reason."""
    return RunError(
        f"{_name_ranks(left_early)} left with exit code 0 before the others were done",
        SAME_CALLS,
        trace=others,
        log=str(logs / f"rank-{left_early[0]}.log"),
    )


def _explain_first(
    first: RankFailure,
    *,
    others: str,
    log: Path,
    oom_kills: int | None,
    name_rank: bool,
    exit_place: str,
) -> SamecurveError:
    """Explain the rank that failed first.

    others: a line on the other ranks, or ''
    name_rank: not all ranks failed in the same way
    exit_place: where the rank's own code called sys.exit(), or ''
    """
    has_log = log.exists()  # a lone process has none: it wrote to the terminal
    if first.note and not first.note.trace:
        own_error = _explain_own_error(first.note, name_rank=name_rank)
        if isinstance(own_error, UserError):
            return own_error
        error, has_log = own_error, has_log and bool(_USER_LINE.search(first.note.where))
    elif first.diagnosis:
        error = _explain_known(first, first.diagnosis)
    elif first.signal_name:
        cause, remedy, again = _explain_signal(first.rank, first.signal_name, oom_kills)
        lines = _join_lines(*map(clip, first.last_lines))
        error = RunError(cause, remedy, again=again, trace=lines)
    elif first.traceback:
        error = _explain_unknown(first.rank, first.traceback)
    else:
        error = _explain_exit(first, exit_place)
    error.trace = _join_lines(*error.trace.splitlines(), others)
    error.log = str(log) if has_log else ""
    return error


def _explain_own_error(note: FailureNote, *, name_rank: bool) -> UserError | RunError:
    """Pass on an error of ours, whose words explain it."""
    cause, where = note.cause, note.where
    if name_rank and _USER_LINE.search(note.where):
        cause, where = f"rank {note.rank}: {note.where}: {note.cause}", ""
    if note.exit_code == UserError.exit_code:
        return UserError(cause, note.remedy, where)
    if note.exit_code == FAULTY_DEVICE:
        return FaultyDeviceError(cause, note.remedy, where)
    return RunError(cause, note.remedy, where, again=note.again)


def _explain_exit(failure: RankFailure, exit_place: str) -> RunError:
    """Explain a rank of which no more is known than how it left, and what it printed last."""
    rank, code, remedy = failure.rank, failure.exit_code, _SAME_COMMAND
    if failure.note:
        cause = f"rank {rank}: {clip(failure.note.cause, _MAX_CAUSE)}"
    elif exit_place:
        cause = f"rank {rank} left by sys.exit({code}), at {exit_place}"
        remedy = "the code there says why it ends so; its log has what it printed before"
    else:
        missing = "traceback" if failure.last_lines else "message"
        cause = f"rank {rank} left with exit code {code} and no {missing}"
    lines = _join_lines(*map(clip, failure.last_lines))
    return RunError(cause, remedy, again=True, trace=lines)


def _explain_known(failure: RankFailure, diagnosis: Diagnosis) -> RunError:
    if failure.traceback:
        frames = failure.traceback.show_frames(_MAX_FRAMES_KNOWN)
        lines = [*frames, *map(clip, failure.traceback.error.splitlines()[:1])]
    else:
        lines = [*map(clip, failure.last_lines)]
    return RunError(
        f"rank {failure.rank}: {clip(diagnosis.cause, _MAX_CAUSE)}",
        diagnosis.remedy,
        again=diagnosis.known.again,
        trace=_join_lines(*lines),
    )


def _explain_unknown(rank: int, traceback: Traceback) -> RunError:
    """Explain an unknown failure by its traceback and the user's own line in the traceback."""
    message, *more = traceback.error.splitlines()
    more_lines = [line for line in more if line.strip()][: MAX_LINES - 1]
    remedy = remedy_of(traceback, "this text, the log, config.yaml and plan.json of the run")
    if remedy.startswith(_REPORT):
        remedy += f"; {_SAME_COMMAND}"
    return RunError(
        f"rank {rank}: {clip(message, _MAX_CAUSE)}",
        remedy or _SAME_COMMAND,
        again=True,
        trace=_join_lines(*traceback.show_frames(_MAX_FRAMES), *map(clip, more_lines)),
    )


def remedy_of(traceback: Traceback, to_send: str) -> str:
    """The remedy for an unknown failure: the user's own line, or a report; '': neither helps.

    to_send: what belongs to a report
    """
    frame = traceback.user_frame
    if frame is None:
        of_ours = any(frame.is_ours for frame in traceback.frames)
        from_outside = _FROM_OUTSIDE.match(traceback.error)
        return f"{_REPORT} {to_send}" if of_ours and not from_outside else ""
    place = f"{frame.path}:{frame.line}"
    if frame.function:
        place += f", in {frame.function},"
    if frame is traceback.frames[-1]:
        return f"{place} is the line to correct"
    return f"{place} is where your own code led there"


def _explain_signal(rank: int, signal_name: str, oom_kills: int | None) -> tuple[str, str, bool]:
    """The cause and the remedy of an end by a signal, and whether starting again may help."""
    cause = f"rank {rank} was ended by {signal_name}"
    if signal_name == "SIGTERM":
        return cause, f"{_SAME_COMMAND}; to stop a run, signal its launcher", True
    if signal_name != "SIGKILL":
        remedy = _SIGNAL_REMEDIES.get(signal_name, _SAME_COMMAND)
        return cause + _SIGNAL_MEANS.get(signal_name, ""), remedy, True
    if oom_kills is None:
        return f"{cause}; the kernel does so when memory runs out", _SAME_COMMAND, True
    if oom_kills == 0:
        cause += "; memory had not run out: a person or a scheduler sent it"
        return cause, _SAME_COMMAND, True
    processes = "1 process" if oom_kills == 1 else f"{oom_kills} processes"
    return (
        f"{cause}: memory ran out, and the kernel ended {processes}",
        "fewer samples at once, or fewer data workers; `dmesg` and the container's limit say how"
        " much there was",
        False,
    )


def _describe_others(rank: int, failures: Sequence[RankFailure], world_size: int) -> str:
    """A line on what all ranks but this one were doing; '' if there are no others."""
    others = [failure for failure in failures if failure.rank != rank]
    lost = [other.rank for other in others if other.symptom == "lost"]
    waited = [other.rank for other in others if other.symptom == "waited"]
    ended = [other.rank for other in others if other.signal_name in {"SIGTERM", "SIGKILL"}]
    failed_too = [other.rank for other in others if other.rank not in {*lost, *waited, *ended}]
    not_failed = set(range(world_size)) - {rank} - {failure.rank for failure in failures}
    groups = (
        (lost, "lost its peer", "lost their peer"),
        (waited, "waited in vain", "waited in vain"),
        (ended, "was ended", "were ended"),
        (failed_too, "failed too", "failed too"),
        (sorted(not_failed), "had not failed", "had not failed"),
    )
    parts = [
        f"{_name_ranks(ranks)} {one if len(ranks) == 1 else many}"
        for ranks, one, many in groups
        if ranks
    ]
    if not parts:
        return ""
    return f"others: {'; '.join(parts)}"


def _name_ranks(ranks: Sequence[int]) -> str:
    """Ranks in words: 'rank 3', 'ranks 1, 2' or 'ranks 0, ..., 7 and 5 more'."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    return f"ranks {some(list(map(str, sorted(ranks))), _MAX_RANKS)}"


def _join_lines(*lines: str) -> str:
    return "\n".join(line for line in lines if line)
