"""Messages of the watch over a script's ranks: what it can see, and ranks that leave early."""

import time
from collections.abc import Callable, Sequence

from samecurve.launch.script.misuse import LONG
from samecurve.watch import HangLimit
from samecurve.watch.verdict import name_ranks

_LEFT = 10.0  # seconds after which a rank that has left is missed


class WatchAnnouncement:
    """Says once what is watched. If that takes long, it says first what can't be seen yet."""

    def __init__(self, limit: HangLimit, say: Callable[[str], None], long: float = LONG) -> None:
        """long: seconds."""
        self._limit, self._say = limit, say
        self._late_at: float | None = time.monotonic() + long  # None: said
        self._done = False

    def tick(self, *, all_seen: bool) -> None:
        """all_seen: every rank has entered a collective."""
        if self._done:
            return
        if all_seen:
            self._done = True
            self._say(
                "crashes, and hangs by the ranks' collectives: one that enters none for"
                f" {self._limit.floor:g} s (--hang-floor) and ten times as long as usual is named"
                f" and ended; {self._limit.unknown:g} s, until it is known what is usual"
            )
        elif self._late_at is not None and time.monotonic() > self._late_at:
            self._late_at = None
            self._say(
                "crashes only, until every rank has entered a collective: a hang before that would"
                " not be seen"
            )


class Departures:
    """Says once which ranks have left with 0 while others go on, and where the others are."""

    def __init__(self, where: Callable[[], str], say: Callable[[str], None]) -> None:
        """where: asks the ranks at work where they are."""
        self._where, self._say = where, say
        self._since: float | None = None
        self._said = False

    def tick(self, left: Sequence[int]) -> None:
        """left: ranks that have ended with 0, while other ranks are still at work."""
        if not left or self._said:
            return
        now = time.monotonic()
        self._since = self._since or now
        if now - self._since < _LEFT:
            return
        self._said = True
        self._say(
            f"{name_ranks(left)} left with exit code 0 {_LEFT:g} s ago; still at work:"
            f" {self._where()}"
        )
