"""A rank's heartbeat: sixteen mapped bytes, step and phase, that others read while it works or hangs."""

import mmap
import os
import struct
from pathlib import Path

from lockstep.core.events import PHASES, Phase

_FORMAT = struct.Struct("<qq")


class Pulse:
    def __init__(self, path: Path) -> None:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        os.ftruncate(descriptor, _FORMAT.size)
        self._map = mmap.mmap(descriptor, _FORMAT.size)
        os.close(descriptor)

    def __call__(self, step: int, phase: Phase) -> None:
        _FORMAT.pack_into(self._map, 0, step, PHASES.index(phase))


def read_pulse(path: Path) -> tuple[int, Phase] | None:
    """(step, phase) of a rank, None if it has not begun."""
    try:
        content = path.read_bytes()
    except OSError:
        return None
    if len(content) != _FORMAT.size:
        return None
    step, phase = _FORMAT.unpack(content)
    return step, PHASES[phase]
