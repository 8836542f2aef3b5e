"""Who is silent, for how long, and where: from heartbeats, stacks and the recorder of collectives.

All of these are read by others. All ranks of a run go through the same steps together, so the one
furthest behind holds the others up: it alone is asked whether it has been silent for too long. What
is too long is learnt from its own phases, and never less than the floor.
"""

import statistics
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from samecurve.core.events import PHASES, Beat, Phase
from samecurve.diagnose.stacks import Location

_LEARNT_AFTER = 3  # times that a phase was seen to end
_UNKNOWN_FACTOR = 10  # of the floor, before that: a first step compiles, a first save may be slow
_MEDIAN_FACTOR = 10  # of a phase's usual time
_LONGEST_FACTOR = 3  # of its longest
_KEPT = 200  # durations of a phase
_ONCE: tuple[Phase, ...] = ("start", "end")  # phases that a rank goes through once
_STEP: tuple[Phase, ...] = ("data", "step")


# where one rank is done before the others
SAME_CALLS = (
    "every rank must take the same number of steps and make the same calls: look for data of"
    " unequal length (drop_last, a sampler for each rank), or an exit that depends on the rank"
)


@dataclass(frozen=True)
class Silence:
    """Ranks that have given no sign for longer than they were allowed."""

    ranks: tuple[int, ...]  # those furthest behind
    seconds: float
    limit: float
    beats: Mapping[int, Beat]  # of every rank: where it was


class SilenceWatch:
    """Learns how long phases take, and finds the rank that is silent for too long.

    floor: seconds of silence that are never a hang
    unknown: likewise, for phases whose usual time is not known; None: ten times the floor
    """

    def __init__(self, floor: float, unknown: float | None = None) -> None:
        self._floor = floor
        if unknown is None:
            unknown = _UNKNOWN_FACTOR * floor
        self._unknown = unknown
        self._beats: dict[int, Beat] = {}
        self._since: dict[int, float] = {}  # when a rank's beat was first seen
        self._durations: dict[Phase, deque[float]] = {}
        self._began = 0.0
        self._last_look = -1.0
        self._excused = False

    def excuse(self) -> bool:
        """This silence has a reason that ends by itself.

        Until some rank gives a sign, only what is too long for a phase of no known length is a
        hang. False: it is excused already.
        """
        was_excused, self._excused = self._excused, True
        return not was_excused

    def observe(self, at: float, beats: Mapping[int, Beat], interval: float) -> Silence | None:
        """Take in the latest beats; the silence that is too long by now, if there is one.

        at: seconds
        beats: of the ranks that live and have begun
        interval: seconds between two calls at most; of what lies beyond, the watch itself was
            asleep
        """
        if self._last_look < 0:
            self._began = at
        elif (slept := at - self._last_look - 5 * interval) > 0:
            self._since = {rank: since + slept for rank, since in self._since.items()}
        self._last_look = at
        for rank, beat in beats.items():
            before = self._beats.get(rank)
            if beat != before:
                self._learn(before, beat, at - self._since.get(rank, self._began))
                self._beats[rank], self._since[rank] = beat, at
                self._excused = False
        return self._find_silence(at, beats)

    def _learn(self, before: Beat | None, beat: Beat, seconds: float) -> None:
        """How long phases took.

        Between two looks, or before the first one, a rank may have gone through many steps: none of
        their phases took longer than the share of one.
        """
        steps = beat.beats // len(_STEP)
        if before:
            steps = beat.step - before.step
        phases: tuple[Phase, ...] = ()
        if steps > 0:
            phases = _STEP
        elif before:
            phases = (before.phase,)
        steps = max(steps, 1)
        for phase in phases:
            durations = self._durations.setdefault(phase, deque(maxlen=_KEPT))
            durations.extend([seconds / steps] * min(steps, _LEARNT_AFTER))

    def _find_silence(self, at: float, beats: Mapping[int, Beat]) -> Silence | None:
        behind = furthest_behind(beats)
        if not behind:
            return None
        seconds = min(at - self._since[rank] for rank in behind)
        limit = self.limit(beats[behind[0]].phase)
        if seconds <= limit:
            return None
        return Silence(behind, seconds, limit, dict(beats))

    def limit(self, phase: Phase) -> float:
        """Seconds of silence in a phase beyond which it is a hang."""
        durations = self._durations.get(phase, ())
        if phase in _ONCE or len(durations) < _LEARNT_AFTER or self._excused:
            return self._unknown
        odd = len(durations) // 20  # the longest of twenty may be odd
        longest = sorted(durations)[-1 - odd]
        return max(
            self._floor,
            _MEDIAN_FACTOR * statistics.median(durations),
            _LONGEST_FACTOR * longest,
        )


def furthest_behind(beats: Mapping[int, Beat]) -> tuple[int, ...]:
    """The ranks whose step and phase are least far."""
    if not beats:
        return ()
    progress = {rank: (beat.step, PHASES.index(beat.phase)) for rank, beat in beats.items()}
    least = min(progress.values())
    return tuple(sorted(rank for rank in beats if progress[rank] == least))


@dataclass(frozen=True)
class Collective:
    """The last one that a rank entered."""

    number: int  # counts up on every rank alike
    name: str
    sizes: str
    ended: bool  # False: it waits in it


@dataclass(frozen=True)
class RankSnapshot:
    """What was seen of one rank of a silent world."""

    beat: Beat | None
    process_state: str = ""  # as the kernel names it (T: stopped)
    location: Location | None = None  # of its program; None: it did not say
    collective: Collective | None = None  # None: unknown

    @property
    def is_stopped(self) -> bool:
        return self.process_state == "T"

    @property
    def waits_in(self) -> Collective | None:
        """The collective that it is in."""
        if self.collective and not self.collective.ended:
            return self.collective
        return None


Snapshots = Mapping[int, RankSnapshot]  # by rank


@dataclass(frozen=True)
class Verdict:
    """What is said of a hang."""

    culprits: tuple[int, ...]  # hold the others up; empty: none could be told from the others
    cause: str
    remedy: str
    again: bool = True  # starting again may help


def judge(
    snapshots: Snapshots,
    *,
    seconds: float,
    limit: float,
    world_size: int,
    floor_flag: str = "--set devices.hang_floor=",
    unit: str = "step",
    left: Sequence[int] = (),
) -> Verdict:
    """Who holds the others up, and where everybody is.

    seconds, limit: how long they were silent, and were allowed to be
    world_size: how many ranks there are; those of other hosts are not among the snapshots
    floor_flag: how to set the floor
    unit: what beats count
    left: ranks that have ended with 0
    """
    where = describe_all(snapshots, unit)
    stopped = [rank for rank, snapshot in snapshots.items() if snapshot.is_stopped]
    if stopped:
        return Verdict(
            tuple(stopped),
            f"{name_ranks(stopped)} stopped (SIGSTOP, or a terminal's Ctrl-Z) for {seconds:.0f} s:"
            f" {where}",
            f"whoever stopped it can let it go on with `kill -CONT`; {floor_flag}N waits N seconds"
            " for that",
        )
    mismatch = _describe_mismatch(snapshots)
    if mismatch:
        return _judge_mismatch(mismatch)
    wait_longer = (
        f"if that is how long it takes, {floor_flag}{round(max(2 * seconds, limit))} waits longer"
    )
    if left:
        return Verdict(
            tuple(left),
            f"{name_ranks(left)} left with exit code 0 before the others were done, which have"
            f" made no progress for {seconds:.0f} s (limit {limit:.0f} s): {where}",
            f"{SAME_CALLS}; {wait_longer}",
        )
    culprits: list[int] = []
    if len(snapshots) == world_size:
        culprits = _find_culprits(snapshots)
    if not culprits:
        return Verdict(
            (),
            f"no rank has made any progress for {seconds:.0f} s (limit {limit:.0f} s): {where}",
            f"all wait for each other, or for what is outside the program; {wait_longer}",
        )
    remedy = wait_longer
    if _waits_for_data(snapshots, culprits):
        remedy = f"--num-workers or a quicker source, if the data is slow; {wait_longer}"
    return Verdict(
        tuple(culprits),
        f"{name_ranks(culprits)} gave no sign for {seconds:.0f} s (limit {limit:.0f} s): {where}",
        remedy,
    )


def _judge_mismatch(mismatch: str) -> Verdict:
    return Verdict(
        (),
        f"the ranks are in different collectives, which wait for each other for ever: {mismatch}",
        "every rank must make the same calls with the same shapes: look for a condition on the"
        " rank, or data of unequal length",
        again=False,
    )


def _waits_for_data(snapshots: Snapshots, ranks: Iterable[int]) -> bool:
    """By the first one's location, or the phase of the first that has a beat."""
    chosen = [snapshots[rank] for rank in ranks]
    location = chosen[0].location
    if location and location.activity == "data":
        return True
    beats = [snapshot.beat for snapshot in chosen if snapshot.beat]
    return bool(beats) and beats[0].phase == "data"


def _find_culprits(snapshots: Snapshots) -> list[int]:
    """Those furthest behind, by step and phase; else by collectives.

    Else those that are in none, while others are. A rank that is alone is its own culprit.
    """
    behind = furthest_behind(
        {rank: snapshot.beat for rank, snapshot in snapshots.items() if snapshot.beat}
    )
    if 0 < len(behind) < len(snapshots):
        return list(behind)
    collectives = {
        rank: snapshot.collective for rank, snapshot in snapshots.items() if snapshot.collective
    }
    if collectives and len(collectives) == len(snapshots):
        numbers = {collective.number for collective in collectives.values()}
        if len(numbers) > 1:
            return [rank for rank, one in collectives.items() if one.number == min(numbers)]
        outside = [rank for rank, collective in collectives.items() if collective.ended]
        if 0 < len(outside) < len(collectives):
            return outside
    elsewhere = [
        rank
        for rank, snapshot in snapshots.items()
        if snapshot.location and snapshot.location.activity != "collective"
    ]
    if 0 < len(elsewhere) < len(snapshots):
        return elsewhere
    if len(snapshots) == 1:
        return list(snapshots)
    return []


def _describe_mismatch(snapshots: Snapshots) -> str:
    """Ranks that wait in collectives of the same number that are not the same. '' if none do."""
    waiting = {
        rank: collective
        for rank, snapshot in snapshots.items()
        if (collective := snapshot.waits_in)
    }
    numbers = {collective.number for collective in waiting.values()}
    kinds = {(collective.name, collective.sizes) for collective in waiting.values()}
    if len(waiting) < len(snapshots) or len(numbers) != 1 or len(kinds) < 2:
        return ""
    return "; ".join(
        f"rank {rank} in {collective.name} number {collective.number} of {collective.sizes}"
        for rank, collective in sorted(waiting.items())
    )


def describe_all(snapshots: Snapshots, unit: str) -> str:
    """Where each rank is; those in the same place together."""
    ranks_at: dict[str, list[int]] = {}
    for rank, snapshot in sorted(snapshots.items()):
        ranks_at.setdefault(_describe_place(snapshot, unit), []).append(rank)
    return "; ".join(f"{name_ranks(ranks)} {place}" for place, ranks in ranks_at.items())


def _describe_place(snapshot: RankSnapshot, unit: str) -> str:
    since = ""
    if snapshot.beat and unit == "step":
        since = f" ({snapshot.beat.phase}, since step {snapshot.beat.step})"
    elif snapshot.beat:
        since = f" (since {unit} {snapshot.beat.step})"
    if snapshot.is_stopped:
        return f"stopped{since}"
    if collective := snapshot.waits_in:
        return f"in {collective.name}{since}"
    if snapshot.location:
        return f"in {snapshot.location.text}{since}"
    return f"without an answer{since}"


def name_ranks(ranks: Iterable[int]) -> str:
    names = [str(rank) for rank in ranks]
    if len(names) == 1:
        return f"rank {names[0]}"
    return f"ranks {', '.join(names)}"
