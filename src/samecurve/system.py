"""Small operating-system helpers: files written whole, processes that end with their parents, the
cache.
"""

import ctypes
import json
import os
import signal
import sys
from collections.abc import Mapping
from pathlib import Path


def write_json(path: Path, value: object) -> None:
    """Whole or not at all, and on disk when this returns."""
    scratch = path.with_name(f"{path.name}.{os.getpid()}.part")
    with open(scratch, "w") as file:
        json.dump(value, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    scratch.replace(path)


def sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def cache_home(environment: Mapping[str, str] = os.environ) -> Path:
    """Where token files and facts are kept: SAMECURVE_CACHE, else the user's cache directory."""
    if environment.get("SAMECURVE_CACHE"):
        return Path(environment["SAMECURVE_CACHE"])
    return Path(environment.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "samecurve"


def die_with(parent: int, by: int = signal.SIGKILL) -> None:
    """Let the system end this process, by a signal, when its parent ends, even by kill -9.

    Linux only; elsewhere nothing happens.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, by)  # PR_SET_PDEATHSIG
        if os.getppid() != parent:
            os._exit(1)


STOP_SIGNAL = (
    signal.SIGUSR1
)  # what the launcher sends where the control file can't be written, or is not its own
LAUNCHER = "SAMECURVE_LAUNCHER"
