"""A process by its number and the moment when it began, so that no other is taken for it.

A number is given to another process once the first has ended, and after a restart of the machine.
"""

import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

from samecurve.run.directory import boot_id


@dataclass(frozen=True)
class ProcessName:
    """A process of this machine, for good. began: the machine's boot, and the process's start."""

    pid: int
    began: str

    @classmethod
    def own(cls) -> "ProcessName":
        return cls(os.getpid(), _began(os.getpid()) or "")

    @classmethod
    def of_json(cls, value: object) -> "ProcessName | None":
        """None: the value names no process."""
        if isinstance(value, dict):
            pid, began = value.get("pid"), value.get("began")
            if isinstance(pid, int) and pid > 1 and isinstance(began, str):
                return cls(pid, began)
        return None

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def is_alive(self) -> bool:
        """Whether it lives; a process that has ended and waits for its parent does not."""
        return bool(self.began) and _began(self.pid) == self.began


def _began(pid: int) -> str | None:
    """When a process began, in words that stay the same; None: it has ended."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
        fields = text.rpartition(")")[2].split()
        return None if fields[0] in {"Z", "X"} else f"{boot_id()} {fields[19]}"
    except FileNotFoundError:
        if Path("/proc/self/stat").exists():
            return None
    except (OSError, IndexError):
        return None
    try:  # no Linux
        process = psutil.Process(pid)
        ended = process.status() == psutil.STATUS_ZOMBIE
        return None if ended else f"{process.create_time():.1f}"
    except psutil.Error:
        return None
