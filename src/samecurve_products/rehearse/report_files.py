"""What the emulator wrote about each process, as findings at the user's lines and a step's costs.

A finding's stack (`here`, innermost first) and that of the other access (`there`) become one line
each. The host syncs of a step have their stacks as well.
"""

import os
import re
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from samecurve.diagnose.tracebacks import Frame
from samecurve_products.rehearse.emulator import Found, ProcessReport, read_reports
from samecurve_products.rehearse.rehearsal import STEADY, Finding, StepCosts

_LINE = re.compile(r"^\s*(?P<path>.+?):(?P<line>\d+)(?: (?:in )?(?P<function>\S.*))?$")
# what carries a call and does nothing of its own
_CARRIERS = re.compile(
    r"(?:^|/)torch/|^<|/lib/python3\.\d+/(?!site-packages/|dist-packages/)|/samecurve_products/"
    r"|/samecurve/torch_engine/model/one_device_view\.py"
)
# kinds that are noticed at some later line: the other line is the one to correct
_NOTICED_LATER = {"pinned_source"}
_SYNC_WORDS = {
    "aten::_local_scalar_dense": "a number is read: .item(), float(), int(), bool(), if, print",
    "aten::nonzero": "the shape depends on values: nonzero, a boolean mask, torch.where(mask)",
    "aten::index": "a boolean mask as an index: the shape depends on values; use torch.where",
    "aten::_index_put_impl_": "a boolean mask as an index: torch.where, or masked_fill",
    "copy_ H2D": "a copy to the GPU from memory that is not pinned, or without non_blocking=True",
    "copy_ D2H": "a copy to the host: .cpu(), .to('cpu'), .numpy(), .tolist()",
    "event.synchronize": "an event is waited for",
    "stream.synchronize": "a stream is waited for",
    "device.synchronize": "the whole GPU is waited for: torch.cuda.synchronize()",
}


@dataclass(frozen=True)
class Place:
    """The lines of a stack that a reader needs."""

    user: Frame | None  # the innermost line of the user's own code
    inside: Frame | None  # the innermost line of all that did something of its own

    @property
    def is_own(self) -> bool:
        """Whether samecurve itself did it, and not what it has called."""
        return self.inside is not None and self.inside.is_ours


def place_of(stack: Sequence[str]) -> Place:
    """The user's line of a stack, and the line that did it. stack: innermost first"""
    frames = [frame for frame in map(_frame, stack) if frame is not None]
    doing = [frame for frame in frames if not _CARRIERS.search(frame.path)]
    users = [frame for frame in doing if frame.is_users]
    return Place(users[0] if users else None, next(iter(doing or frames), None))


def _frame(line: str) -> Frame | None:
    match = _LINE.match(line)
    if match is None:
        return None
    return Frame(match["path"], int(match["line"]), match["function"] or "", "")


def shown(frame: Frame | None) -> str:
    """A frame as `file:line in function`; a file below the working directory by its short name."""
    if frame is None:
        return ""
    here = f"{os.getcwd()}{os.sep}"
    return str(replace(frame, path=frame.path.removeprefix(here)))


class Report:
    """The report of all processes of a rehearsal.

    unlike: steps, counted from 1, that do more than most: they are no steady ones
    """

    def __init__(self, directory: Path, unlike: Collection[int] = ()) -> None:
        self._unlike = unlike
        reports = read_reports(directory)
        self._processes = [report for report in reports if report.steps or report.findings]

    @property
    def steps(self) -> int:
        """The steps that the process with the most of them has run."""
        return max((max(report.steps, default=0) for report in self._processes), default=0)

    def findings(self) -> tuple[Finding, ...]:
        """What was found, each at one place once, what fails first."""
        merged: dict[tuple[str, ...], Finding] = {}
        for report in self._processes:
            for key, finding in _by_place(report.findings).items():
                known = merged.get(key, replace(finding, processes=0))
                first = min(known.step, finding.step)
                merged[key] = replace(known, processes=known.processes + 1, step=first)
        found = [*merged.values(), *self._syncs()]
        return tuple(sorted(found, key=lambda finding: (not finding.fails, finding.kind)))

    def _syncs(self) -> list[Finding]:
        """The host syncs of steady steps at the user's lines, the most frequent first."""
        times: dict[tuple[str, str, str], int] = defaultdict(int)
        for text, place, count in self._steady_syncs():
            if not place.is_own:
                user, inside = _two_lines(place)
                times[user, inside, _sync_words(text)] += count
        found = [
            Finding(
                kind="host sync",
                text=text,
                place=user,
                inside=inside,
                step=STEADY,
                times=count / len(self._steady_counts()),
            )
            for (user, inside, text), count in times.items()
        ]
        return sorted(found, key=lambda finding: -finding.times)

    def _steady_syncs(self) -> Iterator[tuple[str, Place, int]]:
        """The host syncs of steady steps: what waited, where, how often in a step."""
        for counts in self._steady_counts():
            for sync, count in counts["syncs"].items():
                text, *stack = sync.splitlines()
                yield text, place_of(stack), count

    def _steady_counts(self) -> list[Mapping[str, Any]]:
        return [
            report.steps[number]
            for report in self._processes
            for number in _steady(report, self._unlike)
            if number in report.steps
        ]

    def costs(self) -> StepCosts | None:
        """What a steady step of one process does. None: no step was seen."""
        steady = self._steady_counts()
        if not steady:
            return None

        def mean(name: str) -> float:
            return float(sum(counts[name] for counts in steady)) / len(steady)

        own = sum(count for _, place, count in self._steady_syncs() if place.is_own)
        return StepCosts(
            operations=mean("launches"),
            collectives=mean("collectives"),
            collective_bytes=mean("collective_bytes"),
            copies_to_device=mean("copies_to_device"),
            copies_to_host=mean("copies_to_host"),
            own_syncs=own / len(steady),
        )

    @property
    def peak(self) -> int:
        """Bytes on the fullest device; 0: no step was seen."""
        return max(
            (
                counts["memory_peak"]
                for report in self._processes
                for counts in report.steps.values()
            ),
            default=0,
        )


def _steady(report: ProcessReport, unlike: Collection[int]) -> Sequence[int]:
    """The numbers of the steady steps; of a short run the last step."""
    last = max(report.steps, default=0)
    late = range(min(STEADY, last), last + 1) if last else range(0)
    return [number for number in late if number not in unlike] or late


def _by_place(found: Sequence[Found]) -> dict[tuple[str, ...], Finding]:
    """What was found, each at one place once."""
    first: dict[tuple[str, ...], Finding] = {}
    for finding in map(_finding, found):
        what = "" if finding.place else finding.text  # the backward pass has no lines
        first.setdefault(
            (finding.kind, finding.place, finding.inside, finding.there, what), finding
        )
    return first


def _finding(found: Found) -> Finding:
    stacks = found.here, found.there
    here, there = map(place_of, reversed(stacks) if found.kind in _NOTICED_LATER else stacks)
    user, inside = _two_lines(here)
    return Finding(
        kind=found.kind,
        text=found.text,
        place=user,
        inside=inside,
        there=shown(there.user or there.inside),
        step=found.step,
    )


def _two_lines(place: Place) -> tuple[str, str]:
    """The user's line, and the library's line that it has called; '' where that is the same."""
    if place.user is None:
        return shown(place.inside), ""
    inside = "" if place.inside == place.user else shown(place.inside)
    return shown(place.user), inside


def _sync_words(text: str) -> str:
    """What a host sync is, in words of the code that causes it."""
    return next((words for name, words in _SYNC_WORDS.items() if text.startswith(name)), text)
