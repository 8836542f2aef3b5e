"""What a rehearsed command's failure is: its kind, its line, what to do."""

import re
import signal
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

from samecurve.api.process import error_of
from samecurve.diagnose.tracebacks import Traceback, last_traceback
from samecurve.seam import SamecurveError
from samecurve_products.rehearse.child import Ended
from samecurve_products.rehearse.rehearsal import Finding
from samecurve_products.rehearse.report_files import shown

_MOST_TEXT = 600  # characters of an exception
_PLACE = re.compile(r"(?:rank \d+: )?(?P<place>[^\s:]+\.py:\d+): (?P<text>.+)", re.DOTALL)
_FILE_AND_LINE = re.compile(r"[^/\s]+\.py:\d+")
_EMULATORS = "/samecurve_products/rehearse/emulated_cuda/"
_RANK = re.compile(r"\[rank\d+\]:")
_HEAD = "Traceback (most recent call last):"
_KINDS = {
    "device": re.compile(r"tensors? .*to be on the same device|No backend type associated"),
    "out of memory": re.compile(r"out of memory|OutOfMemoryError|needs? [\d.]+ \w+ on each device"),
    "not_deterministic": re.compile(r"does not have a deterministic implementation"),
}


def error_of_run(ended: Ended) -> SamecurveError:
    """The error with which `samecurve train` has ended."""
    return error_of(ended.errors.splitlines(keepends=True), ended.code)


def failure_of_run(ended: Ended, step: int) -> Finding:
    """The failure of `samecurve train`, as its last lines say it. step: the one that failed"""
    error = error_of_run(ended)
    match = _PLACE.match(error.cause)
    place, text = (match["place"], match["text"]) if match else ("", error.cause)
    return Finding(
        kind=_kind(text), text=text, remedy=error.remedy, place=place or error.where, step=step
    )


def failure_of_script(ended: Ended, step: int) -> Finding:
    """The failure of a script, as its last traceback says it. step: the one that failed"""
    traceback = _first_of_a_user(ended.errors)
    if traceback is None:
        text = f"it left with exit code {ended.code}, and no traceback"
        if ended.code < 0:
            text = f"it was ended by {signal.Signals(-ended.code).name}, and left no traceback"
        return Finding(kind="failed", text=text, remedy="look at its own output above", step=step)
    user = traceback.user_frame
    inner = traceback.frames[-1] if traceback.frames else None
    return Finding(
        kind=_kind(traceback.error),
        text=traceback.error[:_MOST_TEXT],
        place=shown(user or inner),
        inside="" if user is None or inner == user else shown(inner),
        step=step,
    )


def with_failure(failure: Finding, findings: Sequence[Finding]) -> list[Finding]:
    """The failure, and what else was found: the emulator may have seen the failure itself too.

    A traceback that ends in a backward pass has no line but that of the call; the emulator knows
    the forward line. A rank that waits for one that has failed is no finding beside that failure.
    """
    if failure.place:
        findings = [finding for finding in findings if finding.kind != "hang"]
    seen = [finding for finding in findings if finding.kind == failure.kind and finding.place]
    if seen and _line(failure.place) not in [_line(finding.place) for finding in seen]:
        failure = replace(failure, place=seen[-1].place, inside=seen[-1].inside)
    return [failure, *(finding for finding in findings if finding.kind != failure.kind)]


def _line(place: str) -> str:
    """The name of the file and the number of the line; '' where there is none."""
    match = _FILE_AND_LINE.search(place)
    return match[0] if match else ""


def _first_of_a_user(errors: str) -> Traceback | None:
    """The first traceback with a line of the user's code, or else the last one; None: none.

    What comes later follows from it: other ranks that lose their peer, the launcher that gives up.
    Ranks whose lines are mixed are told apart by torch's prefix, `[rank1]: `.
    """
    by_rank = sorted(errors.splitlines(), key=lambda line: (_RANK.match(line) or [""])[0])
    heads = [index for index, line in enumerate(by_rank) if line.endswith(_HEAD)]
    for begin, end in pairwise([*heads, len(by_rank)]):
        traceback = _without_emulator(last_traceback("\n".join(by_rank[begin:end])))
        if traceback is not None and traceback.user_frame is not None:
            return traceback
    return _without_emulator(last_traceback(errors))


def _without_emulator(traceback: Traceback | None) -> Traceback | None:
    """The traceback without the frames that a real GPU would not have."""
    if traceback is None:
        return None
    frames = tuple(frame for frame in traceback.frames if _EMULATORS not in frame.path)
    return replace(traceback, frames=frames)


def _kind(text: str) -> str:
    return next((kind for kind, pattern in _KINDS.items() if pattern.search(text)), "failed")
