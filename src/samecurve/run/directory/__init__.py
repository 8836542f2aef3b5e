"""The directory of a run: its files, its lock, and the processes that work on it."""

import errno
import fcntl
import json
import os
import socket
import stat
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from samecurve.core.config.document import Document, dump_document, read_document
from samecurve.core.config.loading import Registry, load_of_run
from samecurve.core.config.sections import Config
from samecurve.core.planning.plan import Plan
from samecurve.core.system import explain_os_error, read_file_bytes, regular_only, write_json
from samecurve.errors import RunError, SamecurveError, UserError
from samecurve.tasks.user_class import (
    SOURCE_INDEX,
    SOURCES,
    TASK_PICKLE,
    find_pickled_class,
)
from samecurve.watch import live_ranks

_MOST_JSON = 1 << 28  # bytes of plan.json
SUBMITTED = "submit"  # the files and logs of a job, which are there before the run begins
SCRATCH = ".initial"  # where weights to begin from are copied to, before a run is one


class Run:
    """The paths of a run directory."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.config = home / "config.yaml"
        self.plan = home / "plan.json"
        self.journal = home / "journal.jsonl"
        self.control = home / "control.jsonl"
        # where the run is mirrored in an object store, and the name of this copy of it
        self.remote = home / "remote.json"
        self.results = home / "results.json"
        self.checkpoints = home / "checkpoints"
        self.logs = home / "logs"
        self.assets = home / "assets"
        # the task's class, where the run was begun from a session without a file of the class
        self.task = home / TASK_PICKLE
        # a copy of the weights that the run began from (--init-from)
        self.initial = home / "initial"
        # the path and SHA-256 of the frozen weights on which this run trains something small
        self.base = home / "base.json"

    def exists(self) -> bool:
        return self.plan.is_file()

    def check(self, where: str) -> None:
        """Check that the run has ordinary files, since it may come from anywhere.

        where: the argument that named the run

        UserError: a file is a link, or waits for another process.
        """
        files = [self.config, self.plan, self.journal, self.control, self.task, self.base]
        files += [self.home / "lock", self.remote]
        folders = [self.checkpoints, self.logs, self.assets, self.initial, self.home / "samples"]
        folders.append(self.home / SOURCES)
        for folder in (self.logs, self.assets, self.home / "samples"):
            if folder.is_dir() and not folder.is_symlink():
                files += [path for path in folder.iterdir() if not path.is_dir()]
        for path, is_kind, kind in (
            *((path, stat.S_ISREG, "file") for path in files),
            *((path, stat.S_ISDIR, "directory") for path in folders),
        ):
            mode = _mode(path)
            if mode is not None and not is_kind(mode):
                what = "a link" if stat.S_ISLNK(mode) else f"no ordinary {kind}"
                raise UserError(
                    f"{path} is {what}, and a run is read from and written to its own files alone",
                    f"put the {kind} itself there, or take it away",
                    where,
                )

    def processes(self) -> dict[int, int]:
        """The live processes of the ranks that were started on this host: rank -> process id."""
        return live_ranks(self.logs)

    def write(
        self,
        config: Config,
        plan: Plan,
        *,
        origins: Mapping[str, str] | None = None,
        formulas: Mapping[str, str] | None = None,
        parent_checkpoint: str | None = None,
        weights_path: str | None = None,
    ) -> None:
        """Write config.yaml and plan.json.

        origins: where each value of the config came from.
        formulas: how sizes were computed.
        parent_checkpoint: the checkpoint of another run that this run begins from.
        weights_path: the path that --init-from named.
        """
        is_new = not self.config.exists()
        scratch = self.config.with_name("config.yaml.part")
        scratch.write_text(dump_document(config.model_dump(mode="json")))
        scratch.replace(self.config)
        values = {
            "plan": plan.to_json(),
            "origins": dict(origins or {}),
            "formulas": dict(formulas or {}),
            "began": parent_checkpoint,
            "weights": weights_path,
        }
        try:
            write_json(self.plan, values)
        except OSError:  # the run does not begin
            if is_new:
                self.config.unlink()
            raise

    def parent_checkpoint(self) -> str | None:
        """The checkpoint of another run that this one began from."""
        return self._read_text("began")

    def weights_path(self) -> str | None:
        """The path of the weights that this one began from."""
        return self._read_text("weights")

    def _read_text(self, key: str) -> str | None:
        """A text in plan.json; None: there is none."""
        try:
            text = json.loads(read_file_bytes(self.plan, _MOST_JSON)).get(key)
        except (OSError, ValueError, AttributeError, RecursionError):
            return None
        return text if isinstance(text, str) else None

    def read_config(self, registry: Registry) -> Config:
        return load_of_run(self.read_document(), registry).config

    def read_document(self) -> Document:
        """config.yaml as it stands, with the present place of a class that the run keeps."""
        document = read_document(self.config, regular=True)
        find_pickled_class(document, self.home)
        return document

    def document_for_use(self) -> Document:
        """config.yaml as the trained model is used with it: its task is the code that was trained.

        That is the run's own copy of the source where the files themselves have changed.
        """
        document = self.read_document()
        if (self.home / SOURCES / SOURCE_INDEX).is_file():
            from samecurve.tasks.user_class.kept_source import used_document

            used_document(self.home, document)
        return document

    def read_plan(self) -> Plan:
        try:
            return Plan.from_json(json.loads(read_file_bytes(self.plan, _MOST_JSON))["plan"])
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            raise RunError(
                f"{self.plan} can't be read: {error}",
                "begin a new run with another --save-dir",
                str(self.plan),
            ) from None


def _mode(path: Path) -> int | None:
    """The mode of a file, links not followed; None: there is no file."""
    try:
        return path.lstat().st_mode
    except OSError:
        return None


def unwritable(error: OSError, home: Path) -> SamecurveError:
    """The error for a run directory that can't be written when a run is to begin there."""
    path = Path(os.fsdecode(error.filename)) if error.filename else home
    if error.errno in {errno.ENOSPC, errno.EDQUOT, errno.EIO}:
        cause, remedy = explain_os_error(error, path, "give the same command again")
        return RunError(cause, f"{remedy}; or another --save-dir", "--save-dir")
    return UserError(
        f"{path} can't be written: {error.strerror}",
        "another --save-dir, or the right to write there (chmod, chown)",
        "--save-dir",
    )


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
