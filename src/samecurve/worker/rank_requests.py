"""Requests to a live rank: lines of the control file, and the signal that asks for a stop."""

import signal
from collections.abc import Sequence

from samecurve.core.events import REQUESTS
from samecurve.run.directory.control import ControlFile

# the launcher sends it where the control file can't be written, or is not its own
STOP_SIGNAL = signal.SIGUSR1


class RankRequests:
    """The requests to this rank since the last step."""

    def __init__(self, control: ControlFile | None) -> None:
        """control: None: another rank reads the control file."""
        self._control = control
        self._signalled = [0] * len(REQUESTS)

    def stop(self) -> None:
        """Ask for a stop, from a signal's handler."""
        self._signalled[REQUESTS.index("stop")] += 1

    def pending(self) -> Sequence[int]:
        """How many new requests there are of each of events.REQUESTS."""
        counts, self._signalled = self._signalled, [0] * len(REQUESTS)
        if self._control is None:
            return counts
        return [a + b for a, b in zip(counts, self._control.pending(), strict=True)]
