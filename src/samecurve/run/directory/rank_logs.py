"""What processes leave in a directory of logs: what they print, and signs for whoever watches."""

import json
import os
import socket
from contextlib import suppress
from pathlib import Path

import psutil

from samecurve.diagnose.tracebacks import ATTEMPT_LINE
from samecurve.system import read_file_bytes

# seconds by which two processes may differ on when a third began: the kernel's time of boot is
# rounded, and corrected
_CLOCK = 2.0
_MOST_JSON = 1 << 16  # bytes of what a rank says of itself


def log_to(path: Path, attempt: str = "") -> None:
    """All that this process and its libraries print goes to a file.

    attempt: written there first, since what an earlier one printed stays in it.
    """
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    if attempt:
        with suppress(OSError):  # a full disk
            os.write(descriptor, f"{ATTEMPT_LINE} {attempt}\n".encode())
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)


def live_ranks(logs: Path) -> dict[int, int]:
    """The live processes of the ranks that have announced themselves from this host, by rank.

    A number that the system has given to another process since is left out: ranks may be killed by
    it.
    """
    processes = {}
    for path in logs.glob("process-*.json"):
        # somebody else's file, or it has ended
        with suppress(OSError, ValueError, KeyError, TypeError, psutil.Error):
            values = json.loads(read_file_bytes(path, _MOST_JSON))
            pid = int(values["pid"])
            if values["host"] != socket.gethostname():
                continue
            if abs(psutil.Process(pid).create_time() - values["since"]) < _CLOCK:
                processes[int(path.stem.removeprefix("process-"))] = pid
    return processes


def clear_logs(logs: Path) -> None:
    """What ranks of an earlier start left for whoever watched them or explains their failure."""
    for kind in ("failure-*.json", "process-*.json"):
        _remove(logs, kind)
    clear_hang_files(logs)


def clear_hang_files(logs: Path) -> None:
    """Of these, what the hang watch reads."""
    for kind in ("heartbeat-*", "stack-*.txt", "collectives-*", "asked"):
        _remove(logs, kind)


def _remove(logs: Path, kind: str) -> None:
    for stale in logs.glob(kind):
        stale.unlink()
