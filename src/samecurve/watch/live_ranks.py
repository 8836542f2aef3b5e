"""The processes of the ranks, named in the files process-N.json of a run's logs.

A rank writes its file as it starts. The hang watch and the sensors read the files of this host.
"""

import json
import os
import socket
from contextlib import suppress
from pathlib import Path

import psutil

from samecurve.core.system.files import read_file_bytes, write_json

# seconds by which two processes may differ on when a third began: the kernel's time of boot is
# rounded, and corrected
_CLOCK = 2.0
_MOST_JSON = 1 << 16  # bytes of one file


def announce(logs: Path, rank: int) -> None:
    """Write down that this process is the rank."""
    values = {
        "pid": os.getpid(),
        "host": socket.gethostname(),
        "since": psutil.Process().create_time(),
    }
    # a full disk; then nobody watches the rank, and training says what is wrong
    with suppress(OSError):
        write_json(logs / f"process-{rank}.json", values)


def live_ranks(logs: Path) -> dict[int, int]:
    """The live processes of the ranks that were started on this host: rank -> process id.

    A process id that the system has given to another process since is left out: ranks may be killed
    by their process ids.
    """
    processes = {}
    for path in logs.glob("process-*.json"):
        # another program's file, or the process has ended
        with suppress(OSError, ValueError, KeyError, TypeError, psutil.Error):
            values = json.loads(read_file_bytes(path, _MOST_JSON))
            pid = int(values["pid"])
            if values["host"] != socket.gethostname():
                continue
            if abs(psutil.Process(pid).create_time() - values["since"]) < _CLOCK:
                processes[int(path.stem.removeprefix("process-"))] = pid
    return processes


def clear_hang_files(logs: Path) -> None:
    """Remove the files by which an earlier start's ranks were watched."""
    for kind in ("heartbeat-*", "stack-*.txt", "collectives-*", "asked"):
        for path in logs.glob(kind):
            path.unlink()
