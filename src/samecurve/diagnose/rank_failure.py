"""The failures of single ranks, from their notes and logs, and which of them came first.

A rank that only lost another rank, or waited for it in vain, is never the first failure while some
rank failed by itself.
"""

import re
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from samecurve.diagnose.known_failures import Diagnosis, Symptom, diagnose
from samecurve.diagnose.notes import FailureNote
from samecurve.diagnose.tracebacks import Traceback, last_traceback, read_tail

MAX_LINES = 4  # lines that are shown of an error, or of a log without a traceback
_END_OF_LOG = 40  # lines in which a process without a traceback may have said why
_PREFLIGHT_TIMEOUT = re.compile(r"^pre-flight: .* did not end within ")  # waits for a failed rank


@dataclass(frozen=True, kw_only=True)
class RankFailure:
    """Everything known about how one rank ended."""

    rank: int
    exit_code: int  # negative: ended by that signal
    note: FailureNote | None = None  # the rank's own account of its failure
    traceback: Traceback | None = None  # from the note, or from the log
    last_lines: tuple[str, ...] = ()  # the log's last lines, if the log has no traceback
    diagnosis: Diagnosis | None = None  # None: the failure is not a known one
    symptom: Symptom = ""  # "lost" another rank, or "waited" for one

    @property
    def signal_name(self) -> str:
        """The signal that ended the rank, where nothing else is known; '' for another end."""
        if self.exit_code >= 0 or self.diagnosis or self.traceback:
            return ""
        return signal.Signals(-self.exit_code).name


def collect_failures(
    notes: Sequence[FailureNote], exits: Mapping[int, int], logs: Path
) -> list[RankFailure]:
    """All failures: those with a note, by time; then those with only a log or an exit code."""
    with_note = {note.rank for note in notes}
    return [
        *(_failure_from_note(note, exits.get(note.rank, note.exit_code)) for note in notes),
        *(
            _failure_from_log(rank, exit_code, logs)
            for rank, exit_code in exits.items()
            if rank not in with_note
        ),
    ]


def _failure_from_note(note: FailureNote, exit_code: int) -> RankFailure:
    failure = RankFailure(rank=note.rank, exit_code=abs(exit_code), note=note)
    if not note.trace:
        if _PREFLIGHT_TIMEOUT.search(note.cause):
            return replace(failure, symptom="waited")
        return failure
    traceback = last_traceback(note.trace)
    if traceback is None:
        return _with_diagnosis(failure, note.cause)
    return _with_diagnosis(replace(failure, traceback=traceback), traceback.error)


def _failure_from_log(rank: int, exit_code: int, logs: Path) -> RankFailure:
    """The failure of a rank without a note; a killed rank's log may hold older errors, so it isn't
    read.
    """
    text = ""
    if exit_code not in {-signal.SIGKILL, -signal.SIGTERM}:
        text = read_tail(logs / f"rank-{rank}.log")
    traceback = last_traceback(text)
    if traceback is not None:
        if traceback.error.startswith("KeyboardInterrupt"):
            return RankFailure(rank=rank, exit_code=-signal.SIGTERM)
        failure = RankFailure(rank=rank, exit_code=exit_code, traceback=traceback)
        return _with_diagnosis(failure, traceback.error)
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("frame #")]
    failure = RankFailure(rank=rank, exit_code=exit_code, last_lines=tuple(lines[-MAX_LINES:]))
    return _with_diagnosis(failure, "\n".join(lines[-_END_OF_LOG:]))


def _with_diagnosis(failure: RankFailure, text: str) -> RankFailure:
    """The failure with the known failure that the text shows, if it shows one."""
    diagnosis = diagnose(text)
    if diagnosis is None:
        return failure
    return replace(failure, diagnosis=diagnosis, symptom=diagnosis.known.symptom)


def find_first_failure(failures: Sequence[RankFailure]) -> RankFailure:
    """The failure that made the others fail.

    Ranks mostly get a SIGTERM after another rank failed. A SIGTERM before any rank lost a peer came
    from outside, and so did a SIGKILL, unless some rank was only late.
    """
    some_lost = any(failure.symptom == "lost" for failure in failures)
    some_waited = any(failure.symptom == "waited" for failure in failures)
    earliest = failures[0]

    def failed_by_itself(failure: RankFailure) -> bool:
        if failure.signal_name == "SIGKILL":
            return some_lost or not some_waited or failure is earliest
        return not failure.symptom and failure.signal_name != "SIGTERM"

    def was_ended_from_outside(failure: RankFailure) -> bool:
        return failure.signal_name == "SIGTERM" and (some_lost or failure is earliest)

    likeliest_first = (
        failed_by_itself,
        was_ended_from_outside,
        lambda failure: failure.symptom == "lost",
        lambda failure: failure.symptom == "waited",
    )
    for is_cause in likeliest_first:
        for failure in failures:
            if is_cause(failure):
                return failure
    return earliest
