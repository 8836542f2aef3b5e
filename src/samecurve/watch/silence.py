"""How long each activity of a rank takes, and whether a rank has been silent for too long.

All ranks of a run go through the same steps together. The slowest rank blocks all others, so the
watch checks only how long that rank has been silent. The limit is learnt from the durations that
were seen, and is never less than the floor.
"""

import statistics
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

from samecurve.core.events import ACTIVITIES, Activity, Beat
from samecurve.watch import HangLimit

_LEARNT_AFTER = 3  # durations of an activity that must have been seen
# the limit is this many times the floor before: a first step compiles, a first save may be slow
_UNKNOWN_FACTOR = 10
_MEDIAN_FACTOR = 10  # times an activity's usual duration
_LONGEST_FACTOR = 3  # times an activity's longest duration
_KEPT = 200  # durations of an activity
_ONCE: tuple[Activity, ...] = ("start", "end")  # a rank does these once
_STEP: tuple[Activity, ...] = ("data", "step")


@dataclass(frozen=True)
class Silence:
    """A silence that lasts longer than its limit."""

    seconds: float
    limit: float


class SilenceWatch:
    """Learns how long activities take, and finds a silence that is too long."""

    def __init__(self, limit: HangLimit) -> None:
        self._floor, unknown = limit.floor, limit.unknown
        self._unknown = _UNKNOWN_FACTOR * limit.floor if unknown is None else unknown
        self._beats: dict[int, Beat] = {}
        self._since: dict[int, float] = {}  # when a rank's beat was first seen
        self._durations: dict[Activity, deque[float]] = {}
        self._began = 0.0
        self._last_look = -1.0
        self._excused = False

    def excuse(self) -> bool:
        """Accept the present silence, which has a reason that ends by itself.

        Until a rank beats again, the limit is the one of unknown activities. False: the silence
        was excused before.
        """
        was_excused, self._excused = self._excused, True
        return not was_excused

    def observe(self, at: float, beats: Mapping[int, Beat], interval: float) -> Silence | None:
        """Take in the latest heartbeats. Return the silence that is too long by now, if any.

        at: the time, in seconds
        beats: of the ranks that live and have begun
        interval: longest time between two calls, in seconds; a longer gap means that the watch
            itself was suspended
        """
        if self._last_look < 0:
            self._began = at
        elif (suspended := at - self._last_look - 5 * interval) > 0:
            self._since = {rank: since + suspended for rank, since in self._since.items()}
        self._last_look = at
        for rank, beat in beats.items():
            before = self._beats.get(rank)
            if beat != before:
                self._learn(before, beat, at - self._since.get(rank, self._began))
                self._beats[rank], self._since[rank] = beat, at
                self._excused = False
        return self._find_silence(at, beats)

    def _learn(self, before: Beat | None, beat: Beat, seconds: float) -> None:
        """Keep the durations of activities that ended between two heartbeats.

        Between two looks, or before the first one, a rank may have finished many steps. No activity
        of those steps took longer than one step's share of the time.
        """
        steps = beat.beats // len(_STEP)
        if before:
            steps = beat.step - before.step
        activities: tuple[Activity, ...] = ()
        if steps > 0:
            activities = _STEP
        elif before:
            activities = (before.activity,)
        steps = max(steps, 1)
        for activity in activities:
            durations = self._durations.setdefault(activity, deque(maxlen=_KEPT))
            durations.extend([seconds / steps] * min(steps, _LEARNT_AFTER))

    def _find_silence(self, at: float, beats: Mapping[int, Beat]) -> Silence | None:
        behind = furthest_behind(beats)
        if not behind:
            return None
        seconds = min(at - self._since[rank] for rank in behind)
        limit = self._limit(beats[behind[0]].activity)
        return Silence(seconds, limit) if seconds > limit else None

    def _limit(self, activity: Activity) -> float:
        """Seconds of silence in an activity beyond which the silence is a hang."""
        durations = self._durations.get(activity, ())
        if activity in _ONCE or len(durations) < _LEARNT_AFTER or self._excused:
            return self._unknown
        outliers = len(durations) // 20  # the longest of twenty may be an outlier
        longest = sorted(durations)[-1 - outliers]
        return max(
            self._floor,
            _MEDIAN_FACTOR * statistics.median(durations),
            _LONGEST_FACTOR * longest,
        )


def furthest_behind(beats: Mapping[int, Beat]) -> tuple[int, ...]:
    """The ranks with the earliest step and activity."""
    if not beats:
        return ()
    progress = {rank: (beat.step, ACTIVITIES.index(beat.activity)) for rank, beat in beats.items()}
    least = min(progress.values())
    return tuple(sorted(rank for rank in beats if progress[rank] == least))
