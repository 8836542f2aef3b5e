"""A rank's heartbeat, which others read while it works or hangs.

The file has sixteen mapped bytes: the step, the activity, and the number of beats.
"""

import mmap
import os
import struct
from pathlib import Path

from samecurve.core.events import ACTIVITIES, Activity, Beat

_FORMAT = struct.Struct("<qII")
_MAX_BEATS = 1 << 32


class Heartbeat:
    """The writer of one rank's heartbeat."""

    def __init__(self, path: Path) -> None:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        os.ftruncate(descriptor, _FORMAT.size)
        self._map = mmap.mmap(descriptor, _FORMAT.size)
        os.close(descriptor)
        self._beats = 0
        self.trained = False  # whether a step has been finished
        self.activity: Activity = "start"

    def __call__(self, step: int, activity: Activity) -> None:
        self.trained = self.trained or activity == "data"
        self.activity = activity
        self._beats = (self._beats + 1) % _MAX_BEATS
        _FORMAT.pack_into(self._map, 0, step, ACTIVITIES.index(activity), self._beats)


def read_beat(path: Path) -> Beat | None:
    """A rank's last beat; None: it has not begun."""
    try:
        content = path.read_bytes()
    except OSError:
        return None
    if len(content) != _FORMAT.size:
        return None
    step, activity, beats = _FORMAT.unpack(content)
    return Beat(step, ACTIVITIES[activity], beats)
