"""What processes leave in a directory of logs: what they print, and signs for whoever watches."""

import os
from contextlib import suppress
from pathlib import Path

from samecurve.diagnose.tracebacks import ATTEMPT_LINE


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
