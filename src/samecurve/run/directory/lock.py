"""The lock of a run directory, held by the run's launcher."""

import fcntl
import json
import os
import socket
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from samecurve.core.system.files import regular_only
from samecurve.errors import UserError
from samecurve.run.directory.run_directory import Run, unwritable

_MOST = 1 << 16  # characters of the lock
_BEGIN = b'{"host": '  # of its content


class Lock:
    """A lock on a run directory. The system releases it when this process ends, however it ends."""

    def __init__(self, run: Run, group: str = "") -> None:
        """group: names hosts of which a launcher leaves out those that are lost: another of them
        takes over the lock that a lost host has left; '': there is no such launcher
        """
        run.check("--save-dir")
        self._path = run.home / "lock"
        try:
            # held as long as the lock is
            self._file = open(self._path, "a+", opener=regular_only)  # noqa: SIM115
        except OSError as error:
            raise unwritable(error, self._path) from None
        if not self._acquired():
            holder = self._holder()
            self._file.close()
            raise UserError(
                f"{run.home} belongs to a live run: process {holder.get('pid', '?')} on"
                f" {holder.get('host', '?')}",
                "wait for it, stop it, or give another --save-dir",
                "--save-dir",
            )
        holder = self._holder()
        # a shared file system may not lock between hosts
        is_ours = bool(group) and holder.get("group") == group
        if holder and holder["host"] != socket.gethostname() and not is_ours:
            self._file.close()
            raise UserError(
                f"{run.home} was locked by process {holder['pid']} on {holder['host']}, which did"
                " not let go of it",
                f"if that run is gone, remove {self._path}",
                "--save-dir",
            )
        holder = {
            "host": socket.gethostname(),
            "boot": boot_id(),
            "pid": os.getpid(),
            "since": time.time(),
            **({"group": group} if group else {}),
        }
        try:
            self._file.truncate(0)
            self._file.write(json.dumps(holder))
            self._file.flush()
        except OSError as error:  # a full disk
            with suppress(OSError):  # what is buffered
                self._file.close()
            raise unwritable(error, self._path) from None

    def _acquired(self) -> bool:
        """Try to lock, several times: a process in is_live() holds the lock for a moment."""
        for _ in range(5):
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return True
            except OSError:
                time.sleep(0.05)
        return False

    def _holder(self) -> dict[str, Any]:
        """The entry of the process that locked last; {} if it has released the lock."""
        self._file.seek(0)
        try:
            holder = json.loads(self._file.read(_MOST))
        except (ValueError, RecursionError):
            return {}
        return holder if isinstance(holder, dict) and {"host", "pid"} <= set(holder) else {}

    def release(self) -> None:
        """Release the lock, even on a disk that has failed: closing the file is enough."""
        if self._file.closed:
            return
        with suppress(OSError):  # then the entry stays; the next run takes the lock over
            self._file.truncate(0)
        with suppress(OSError):
            self._file.close()


def is_own_lock(run: Run) -> bool:
    """Whether a start has made the file `lock`, not another program: it is empty, or an entry of a
    process, which a full disk may have cut off.
    """
    try:
        with open(run.home / "lock", "rb", opener=regular_only) as file:
            return _BEGIN.startswith(file.read(len(_BEGIN)))
    except OSError:
        return False


def is_live(run: Run) -> bool:
    """Whether a process on this host holds the run's lock."""
    return is_locked(run.home / "lock")


def is_locked(path: Path) -> bool:
    """Whether a process on this host holds the lock on a file."""
    try:
        with open(path, "rb", opener=regular_only) as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            return False
    except FileNotFoundError:
        return False
    except OSError:
        return True


def boot_id() -> str:
    """The id of this boot of the machine; '': not known."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""
