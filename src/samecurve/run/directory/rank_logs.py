"""The logs of a run: what its processes print, and what is removed before a new start."""

import os
from contextlib import suppress
from pathlib import Path

from samecurve.watch.live_ranks import clear_hang_files


def log_to(path: Path, attempt: str = "") -> None:
    """Send all that this process and its libraries print to a file.

    attempt: written there first, since the file keeps what earlier attempts printed.
    """
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    if attempt:
        from samecurve.diagnose.tracebacks import ATTEMPT_LINE

        with suppress(OSError):  # a full disk
            os.write(descriptor, f"{ATTEMPT_LINE} {attempt}\n".encode())
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)


def clear_logs(logs: Path) -> None:
    """Remove what the ranks of an earlier start left for the launcher and the hang watch."""
    for kind in ("failure-*.json", "process-*.json"):
        for path in logs.glob(kind):
            path.unlink()
    clear_hang_files(logs)
