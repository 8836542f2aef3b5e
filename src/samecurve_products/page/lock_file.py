"""The process that a run's lock names, and whether it really is the one that holds the lock."""

import json
import os
import socket
from dataclasses import dataclass
from pathlib import Path

import psutil

from samecurve.run.directory import boot_id
from samecurve.seam import Run, is_live, read_file_bytes

_MOST_BYTES = 1 << 16
_CLOCK = 2.0  # seconds by which the kernel's time of a start may be off


@dataclass(frozen=True)
class Holder:
    """The entry in a lock."""

    host: str
    pid: int
    boot: str  # the id of the boot in which it was written; '': not known
    since: float  # seconds since 1970


def read_holder(run: Run) -> Holder | None:
    """The entry in the run's lock. None: there is none, or it can't be read."""
    try:
        values = json.loads(read_file_bytes(run.home / "lock", _MOST_BYTES))
        values = {"boot": "", "since": 0.0, **values}
        host, pid, boot, since = (values[name] for name in ("host", "pid", "boot", "since"))
        return Holder(str(host), int(pid), str(boot), float(since))
    except (OSError, ValueError, LookupError, TypeError, RecursionError, OverflowError):
        return None


def holds_lock(run: Run) -> bool:
    """Whether a live process holds the run's lock. A lock that was released is an empty file."""
    try:
        return os.stat(run.home / "lock", follow_symlinks=False).st_size > 0 and is_live(run)
    except OSError:
        return False


def launcher(run: Run) -> psutil.Process | str:
    """The process that holds the run's lock. A text says why there is none that may be killed.

    A process id may have been given to another process since, and a lock may come from elsewhere:
    host, boot and the time of the start are compared, and the process must have the lock open.
    """
    holder = read_holder(run)
    if holder is None or not is_live(run):
        return "no process holds its lock"
    if holder.host != socket.gethostname():
        return f"its launcher is a process of {holder.host}"
    if holder.boot and holder.boot != boot_id():
        return "its lock was written before this machine was started"
    if holder.pid <= 1 or holder.pid == os.getpid():
        return "its lock names no launcher"
    try:
        process = psutil.Process(holder.pid)
        if process.create_time() > holder.since + _CLOCK:
            return f"process {holder.pid} is younger than the lock: another program has its number"
        if not _has_open(process, run.home / "lock"):
            return f"process {holder.pid} does not hold the lock: another program has its number"
    except psutil.Error:
        return f"its launcher, process {holder.pid}, has ended"
    return process


def _has_open(process: psutil.Process, path: Path) -> bool:
    """Whether a process has a file open. psutil.Error: its open files can't be read."""
    there = path.stat()
    descriptors = Path(f"/proc/{process.pid}/fd")
    if not descriptors.is_dir():  # no Linux
        return any(os.path.samefile(file.path, path) for file in process.open_files())
    try:
        for entry in os.listdir(descriptors):
            try:
                if os.path.samestat(os.stat(descriptors / entry), there):
                    return True
            except OSError:  # closed meanwhile
                continue
    except PermissionError:
        raise psutil.AccessDenied(process.pid) from None
    except FileNotFoundError:
        raise psutil.NoSuchProcess(process.pid) from None
    return False
