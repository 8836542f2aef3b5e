"""Who is silent, for how long, and where: from heartbeats, stacks and the recorder of collectives
that others have read.

All ranks of a run go through the same steps together, so the hindmost holds the others up: it alone
is asked whether it has been silent for too long. What is too long is learnt from its own phases,
and never less than the floor.
"""

import statistics
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from samecurve.core.events import PHASES, Beat, Phase
from samecurve.diagnose.stacks import Location

_KNOWN = 3  # times that a phase was seen to end, until its limit is learnt
_UNKNOWN = 10  # times the floor, before that: a first step compiles, a first save may be slow
_USUAL, _LONGEST = 10, 3  # times the usual and the longest one
_KEPT = 200
_BEFORE: tuple[Phase, ...] = ("start", "end")  # phases that a rank goes through once
_STEP: tuple[Phase, ...] = ("data", "step")


@dataclass(frozen=True)
class Silence:
    """ranks: the hindmost.

    seconds: how long they have given no sign; limit: what they were allowed. beats: where every
    rank was.
    """

    ranks: tuple[int, ...]
    seconds: float
    limit: float
    beats: Mapping[int, Beat]


class SilenceWatch:
    """floor: seconds of silence that are never a hang.

    unknown: likewise for phases whose usual time is not known; ten times the floor if not given.
    """

    def __init__(self, floor: float, unknown: float | None = None) -> None:
        self._floor, self._unknown = floor, _UNKNOWN * floor if unknown is None else unknown
        self._beats: dict[int, Beat] = {}
        self._since: dict[int, float] = {}
        self._took: dict[Phase, deque[float]] = {}
        self._began, self._last = 0.0, -1.0
        self._excused = False

    def excuse(self) -> bool:
        """This silence has a reason that ends by itself: until somebody gives a sign, only what is
        too long for a phase of no known length is a hang. False: it is excused already.
        """
        before, self._excused = self._excused, True
        return not before

    def observe(self, at: float, beats: Mapping[int, Beat], often: float) -> Silence | None:
        """at: seconds.

        beats: of the ranks that live and have begun. often: seconds between two calls at most; what
        lies beyond, the watch itself was asleep.
        """
        if self._last < 0:
            self._began = at
        elif (slept := at - self._last - 5 * often) > 0:
            self._since = {rank: since + slept for rank, since in self._since.items()}
        self._last = at
        for rank, beat in beats.items():
            before = self._beats.get(rank)
            if beat != before:
                self._learn(before, beat, at - self._since.get(rank, self._began))
                self._beats[rank], self._since[rank], self._excused = beat, at, False
        return self._silent(at, beats)

    def _learn(self, before: Beat | None, beat: Beat, seconds: float) -> None:
        """Between two looks, or before the first one, a rank may have gone through many steps: none
        of their phases took longer than the share of one.
        """
        steps = beat.step - before.step if before else beat.beats // len(_STEP)
        for phase in _STEP if steps > 0 else (before.phase,) if before else ():
            self._took.setdefault(phase, deque(maxlen=_KEPT)).extend(
                [seconds / max(steps, 1)] * min(max(steps, 1), _KNOWN)
            )

    def _silent(self, at: float, beats: Mapping[int, Beat]) -> Silence | None:
        last = furthest_behind(beats)
        if not last:
            return None
        seconds = min(at - self._since[rank] for rank in last)
        limit = self.limit(beats[last[0]].phase)
        return Silence(last, seconds, limit, dict(beats)) if seconds > limit else None

    def limit(self, phase: Phase) -> float:
        """Seconds of silence in a phase that are a hang if they are exceeded."""
        took = self._took.get(phase, ())
        if phase in _BEFORE or len(took) < _KNOWN or self._excused:
            return self._unknown
        return max(
            self._floor,
            _USUAL * statistics.median(took),
            _LONGEST * sorted(took)[-1 - len(took) // 20],
        )  # the longest of twenty may be odd


def furthest_behind(beats: Mapping[int, Beat]) -> tuple[int, ...]:
    """The ranks that are least far."""
    if not beats:
        return ()
    place = {rank: (beat.step, PHASES.index(beat.phase)) for rank, beat in beats.items()}
    return tuple(sorted(rank for rank in place if place[rank] == min(place.values())))


@dataclass(frozen=True)
class RankSnapshot:
    """What was seen of a silent world's rank.

    state: of its process, as the kernel names it (T: stopped). spot: where its program is; None: it
    did not say. collective: the last one that it entered, and how many it has entered; None:
    unknown.
    """

    beat: Beat | None
    process_state: str = ""
    location: Location | None = None
    collective: "Collective | None" = None


@dataclass(frozen=True)
class Collective:
    """number: counts up on every rank alike. ended False: it waits in it."""

    number: int
    name: str
    sizes: str
    ended: bool


@dataclass(frozen=True)
class Verdict:
    """culprits: ranks that hold the others up; empty: none could be told from the others.

    cause, remedy: in words. again: whether starting again may help.
    """

    culprits: tuple[int, ...]
    cause: str
    remedy: str
    again: bool = True


def judge(
    snapshots: Mapping[int, RankSnapshot],
    seconds: float,
    limit: float,
    world_size: int,
    floor_flag: str = "--set devices.hang_floor=",
    unit: str = "step",
) -> Verdict:
    """Who holds the others up, and where everybody is.

    world: how many ranks there are; those of other hosts are not seen. knob: how to set the floor.
    unit: what beats count.
    """
    others = "; ".join(
        f"{_ranks(ranks)} {text}" for text, ranks in _grouped(snapshots, unit).items()
    )
    stopped = [rank for rank, one in snapshots.items() if one.process_state == "T"]
    if stopped:
        return Verdict(
            tuple(stopped),
            f"{_ranks(stopped)} stopped (SIGSTOP, or a terminal's Ctrl-Z) for {seconds:.0f} s:"
            f" {others}",
            f"whoever stopped it can let it go on with `kill -CONT`; {floor_flag}N waits N seconds for"
            " that",
        )
    apart = _mismatch(snapshots)
    if apart:
        return Verdict(
            (),
            f"the ranks are in different collectives, which wait for each other for ever: {apart}",
            "every rank must make the same calls with the same shapes: look for a condition on the"
            " rank, or data of unequal length",
            again=False,
        )
    culprits = _behind(snapshots) if len(snapshots) == world_size else []
    longer = (
        f"if that is how long it takes, {floor_flag}{round(max(2 * seconds, limit))} waits longer"
    )
    if not culprits:
        return Verdict(
            (),
            f"no rank has made any progress for {seconds:.0f} s (limit {limit:.0f} s): {others}",
            f"all wait for each other, or for what is outside the program; {longer}",
        )
    spot = snapshots[culprits[0]].location
    remedy = (
        "--num-workers or a quicker source, if the data is slow; "
        if (spot and spot.activity == "data") or _phase(snapshots, culprits) == "data"
        else ""
    )
    return Verdict(
        tuple(culprits),
        f"{_ranks(culprits)} gave no sign for {seconds:.0f} s (limit {limit:.0f} s): {others}",
        remedy + longer,
    )


def _phase(seen: Mapping[int, RankSnapshot], ranks: Iterable[int]) -> str:
    beats = [beat for rank in ranks if (beat := seen[rank].beat)]
    return beats[0].phase if beats else ""


def _behind(seen: Mapping[int, RankSnapshot]) -> list[int]:
    """The hindmost by step and phase; else by collectives; else those that are in none, while
    others are.
    """
    beats = {rank: one.beat for rank, one in seen.items() if one.beat}
    last = furthest_behind(beats)
    if 0 < len(last) < len(seen):
        return list(last)
    numbers = {rank: one.collective.number for rank, one in seen.items() if one.collective}
    if len(numbers) == len(seen) and len(set(numbers.values())) > 1:
        return [rank for rank, number in numbers.items() if number == min(numbers.values())]
    if (
        numbers
        and len(numbers) == len(seen)
        and any(not one.collective.ended for one in seen.values() if one.collective)
    ):
        outside = [rank for rank, one in seen.items() if one.collective and one.collective.ended]
        if outside:
            return outside
    outside = [
        rank for rank, one in seen.items() if one.location and one.location.activity != "collective"
    ]
    return outside if 0 < len(outside) < len(seen) else list(seen) if len(seen) == 1 else []


def _mismatch(seen: Mapping[int, RankSnapshot]) -> str:
    """Ranks that wait in collectives of the same number that are not the same. '' if none do."""
    waiting = {
        rank: one.collective
        for rank, one in seen.items()
        if one.collective and not one.collective.ended
    }
    kinds = {(found.number, found.name, found.sizes) for found in waiting.values()}
    if len(waiting) < len(seen) or len(kinds) < 2 or len({number for number, *_ in kinds}) > 1:
        return ""
    return "; ".join(
        f"rank {rank} in {found.name} number {found.number} of {found.sizes}"
        for rank, found in sorted(waiting.items())
    )


def _grouped(seen: Mapping[int, RankSnapshot], unit: str) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for rank, one in sorted(seen.items()):
        found.setdefault(_where(one, unit), []).append(rank)
    return found


def _where(one: RankSnapshot, unit: str) -> str:
    phase = f"{one.beat.phase}, " if one.beat and unit == "step" else ""
    since = f" ({phase}since {unit} {one.beat.step})" if one.beat else ""
    if one.process_state == "T":
        return f"stopped{since}"
    if one.collective and not one.collective.ended:
        return f"in {one.collective.name}{since}"
    return f"in {one.location.text}{since}" if one.location else f"without an answer{since}"


def _ranks(ranks: Iterable[int]) -> str:
    ranks = list(ranks)
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
