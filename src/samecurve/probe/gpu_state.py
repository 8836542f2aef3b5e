"""The state of a GPU beyond what a plan needs, as its driver tells it.

A value that the driver does not tell is None or empty. Nothing is guessed.
"""

from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple

import psutil


class GpuProcess(NamedTuple):
    """A process that uses a GPU."""

    pid: int  # as the driver counts it: the host's, also in a container
    name: str
    memory: int | None  # bytes


@dataclass(frozen=True, kw_only=True)
class GpuState:
    """The state of one GPU."""

    uuid: str = ""
    free: int | None = None  # bytes of its memory
    compute_mode: str = ""  # default, exclusive or prohibited
    uncorrected_errors: int | None = None  # of its memory, since the driver was loaded
    slowdowns: tuple[str, ...] = ()  # why its clock is held down, in words
    processes: tuple[GpuProcess, ...] = ()
    bus: str = ""  # its address in /sys/bus/pci/devices: 0000:3b:00.0
    lanes: tuple[int, int] | None = None  # PCIe lanes: in use, and the most that it has


def gpu_processes(uses: Iterable[tuple[int, int | None]]) -> tuple[GpuProcess, ...]:
    """The processes with their names. uses: (process id, bytes)."""
    return tuple(GpuProcess(pid, _name_of(pid), memory) for pid, memory in uses)


def _name_of(pid: int) -> str:
    with suppress(psutil.Error, ValueError, OverflowError):
        return psutil.Process(pid).name()
    return "a process that is not seen from here"
