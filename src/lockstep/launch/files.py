"""A run is a directory. Its files, its lock, and the requests to a live run."""

import fcntl
import json
import os
import socket
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

from lockstep.checkpoint.format import write_json
from lockstep.core.config import Config, Registry, load
from lockstep.core.document import dump, read_file
from lockstep.core.events import REQUESTS, Request
from lockstep.core.plan import Plan
from lockstep.diagnose.trace import BEGINS
from lockstep.errors import RunError, UserError
from lockstep.launch.starts import Earlier

_CLOCK = 2.0  # seconds by which two processes may differ on when a third began: the kernel's time of boot is rounded, and corrected
_LOOK = 0.05  # seconds between two looks at the control file
SCRATCH = ".initial"  # where weights to begin from are copied to, before a run is one


@dataclass(frozen=True)
class Run:
    """The paths of a run directory."""

    home: Path

    @property
    def config(self) -> Path:
        return self.home / "config.yaml"

    @property
    def plan(self) -> Path:
        return self.home / "plan.json"

    @property
    def journal(self) -> Path:
        return self.home / "journal.jsonl"

    @property
    def control(self) -> Path:
        return self.home / "control.jsonl"

    @property
    def checkpoints(self) -> Path:
        return self.home / "checkpoints"

    @property
    def logs(self) -> Path:
        return self.home / "logs"

    @property
    def assets(self) -> Path:
        return self.home / "assets"

    @property
    def initial(self) -> Path:
        """A copy of the weights that the run began from (--init-from)."""
        return self.home / "initial"

    def exists(self) -> bool:
        return self.plan.is_file()

    def announce(self, rank: int) -> None:
        """Which process is this rank, for those who watch it."""
        with suppress(OSError):  # a full disk; then it is watched by nobody, and training says what is wrong
            write_json(self.logs / f"process-{rank}.json", {"pid": os.getpid(), "host": socket.gethostname(), "since": psutil.Process().create_time()})

    def processes(self) -> dict[int, int]:
        """The live processes of the ranks that were started on this host, by rank. A number that the system has given to another process since is left out: ranks may be killed by it."""
        found = {}
        for path in self.logs.glob("process-*.json"):
            with suppress(OSError, ValueError, KeyError, TypeError, psutil.Error):  # somebody else's file, or it has ended
                said = json.loads(path.read_text())
                if said["host"] == socket.gethostname() and abs(psutil.Process(int(said["pid"])).create_time() - said["since"]) < _CLOCK:
                    found[int(path.stem.removeprefix("process-"))] = int(said["pid"])
        return found

    def write(self, config: Config, plan: Plan, origins: Mapping[str, str], formulas: Mapping[str, str], began: str | None = None, weights: str | None = None) -> None:
        """began: the checkpoint of another run that this one begins from. weights: what --init-from named."""
        scratch = self.config.with_name("config.yaml.part")
        scratch.write_text(dump(config.model_dump(mode="json")))
        scratch.replace(self.config)
        write_json(self.plan, {"plan": plan.to_json(), "origins": dict(origins), "formulas": dict(formulas), "began": began, "weights": weights})

    def began(self) -> str | None:
        """The checkpoint of another run that this one began from."""
        return self._said("began")

    def weights(self) -> str | None:
        """The path of the weights that this one began from."""
        return self._said("weights")

    def _said(self, key: str) -> str | None:
        try:
            found: str | None = json.loads(self.plan.read_text()).get(key)
            return found
        except (OSError, ValueError, AttributeError):
            return None

    def read_config(self, registry: Registry) -> Config:
        return load(read_file(self.config), registry).config

    def read_plan(self) -> Plan:
        try:
            return Plan.from_json(json.loads(self.plan.read_text())["plan"])
        except (ValueError, KeyError, TypeError) as error:
            raise RunError(f"{self.plan} can't be read: {error}", "begin a new run with another --save-dir", str(self.plan)) from None


@dataclass(frozen=True)
class Attempt:
    """One go at a run. resume: the checkpoint it begins from; weights: if there is none, a checkpoint of no more than the model.
    stop_at: steps after which it saves and leaves. coordinator: host:port where jax's processes meet, if there are several.
    evaluate: train nothing, only evaluate what is resumed, on "held-out" or "train" data. earlier: what the same command did before it had to start again."""

    name: str
    run: str
    resume: str | None = None
    stop_at: int | None = None
    coordinator: str | None = None
    evaluate: str | None = None
    weights: str | None = None
    earlier: Earlier | None = None

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "Attempt":
        return cls.from_values(json.loads(text))

    @classmethod
    def from_values(cls, values: dict[str, Any]) -> "Attempt":
        earlier = values.get("earlier")
        return cls(**{**values, "earlier": Earlier(**{**earlier, "recoveries": tuple(earlier["recoveries"])}) if earlier else None})


def new_attempt_name() -> str:
    return f"{time.time_ns():x}-{os.getpid()}"


class Lock:
    """Held by the one launcher (or lone process) of a run; the system lets go of it when that process ends, however it ends."""

    def __init__(self, run: Run) -> None:
        self._path = run.home / "lock"
        try:
            self._file = open(self._path, "a+")  # noqa: SIM115 - held as long as the lock is
        except OSError as error:
            raise UserError(f"{self._path} can't be opened: {error.strerror}", "another --save-dir, or mend this one", "--save-dir") from None
        if not self._taken():
            holder = self._holder()
            self._file.close()
            raise UserError(f"{run.home} belongs to a live run: process {holder.get('pid', '?')} on {holder.get('host', '?')}",
                            "wait for it, stop it, or give another --save-dir", "--save-dir")
        holder = self._holder()
        if holder and holder["host"] != socket.gethostname():  # a shared file system may not lock across hosts
            self._file.close()
            raise UserError(f"{run.home} was locked by process {holder['pid']} on {holder['host']}, which did not let go of it",
                            f"if that run is gone, remove {self._path}", "--save-dir")
        self._file.truncate(0)
        self._file.write(json.dumps({"host": socket.gethostname(), "boot": _boot(), "pid": os.getpid(), "since": time.time()}))
        self._file.flush()

    def _taken(self) -> bool:
        """Several tries: somebody may only be looking (is_live)."""
        for _ in range(5):
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return True
            except OSError:
                time.sleep(0.05)
        return False

    def _holder(self) -> dict[str, Any]:
        self._file.seek(0)
        try:
            found = json.loads(self._file.read())
        except ValueError:
            return {}
        return found if isinstance(found, dict) and {"host", "pid"} <= set(found) else {}

    def release(self) -> None:
        if not self._file.closed:
            self._file.truncate(0)
            self._file.close()


def is_live(run: Run) -> bool:
    """Whether somebody on this host holds the run's lock."""
    try:
        with open(run.home / "lock") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            return False
    except FileNotFoundError:
        return False
    except OSError:
        return True


def _boot() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def ask(run: Run, attempt: str, request: Request) -> None:
    """A request to a live attempt: one whole line."""
    with open(run.control, "ab", buffering=0) as file:
        file.write((json.dumps({"time": time.time(), "attempt": attempt, "request": request}) + "\n").encode())


class ControlFile:
    """The requests of this attempt, read by one rank: pending() gives the new ones, by events.REQUESTS. It is asked each step, and looks twenty times a second at most."""

    def __init__(self, run: Run, attempt: str) -> None:
        self._path, self._attempt, self._position = run.control, attempt, 0
        self._next = 0.0

    def pending(self) -> list[int]:
        counts = [0] * len(REQUESTS)
        now = time.monotonic()
        if now < self._next:
            return counts
        self._next = now + _LOOK
        try:
            if os.stat(self._path).st_size <= self._position:
                return counts
        except FileNotFoundError:
            return counts
        with open(self._path, "rb") as file:
            file.seek(self._position)
            for line in file:
                if not line.endswith(b"\n"):
                    break
                self._position += len(line)
                request = _request(line, self._attempt)
                if request is not None:
                    counts[REQUESTS.index(request)] += 1
        return counts


def _request(line: bytes, attempt: str) -> Request | None:
    """None for another attempt's line, or one that is no request."""
    try:
        found = json.loads(line)
    except ValueError:
        return None
    if not isinstance(found, dict) or found.get("attempt") != attempt or found.get("request") not in REQUESTS:
        return None
    request: Request = found["request"]
    return request


def log_to(path: Path, attempt: str = "") -> None:
    """All that this process and its libraries print goes to a file. attempt: told there, since what an earlier one said stays in it."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    if attempt:
        with suppress(OSError):  # a full disk
            os.write(descriptor, f"{BEGINS} {attempt}\n".encode())
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
