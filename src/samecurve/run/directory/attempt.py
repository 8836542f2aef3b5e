"""A start of a run, in the form in which every rank gets it, and the requests to it while it lives.

Beside them the logs that its processes print to, and what the journal says of it: its surroundings
(versions, host, the commit of the working directory), its seconds, and those of the command's
earlier starts. Requests are lines of control.jsonl that name the attempt, which one rank reads, and
signals, which every rank may get.

No engine is imported. Surroundings that can't be known are left out, so that a run never fails
because of them.
"""

import json
import math
import os
import platform
import signal
import socket
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import samecurve
from samecurve.core.events import REQUESTS, Event, Request
from samecurve.core.planning.fixed import parse_dataclass
from samecurve.core.planning.machine import Machine
from samecurve.core.system import regular_only, write_all
from samecurve.processes import child_environment, how_ended, output_of
from samecurve.run.directory import Run
from samecurve.watch import clear_hang_files


@dataclass(frozen=True)
class Earlier:
    """The earlier starts of the same command."""

    began: float  # when the command began to train
    steps: int  # the steps that still count
    useful: float  # the seconds of these steps
    failed: float  # when the last failure was seen
    recoveries: tuple[float, ...] = ()  # the seconds of each earlier recovery


@dataclass(frozen=True)
class Attempt:
    """A start of a run."""

    name: str
    run: str
    resume: str | None = None  # the checkpoint that the start goes on from
    stop_at: int | None = None  # the step after which the run saves and leaves
    coordinator: str | None = None  # host:port where jax's processes meet, if there are several
    evaluate: str | None = None  # only evaluate `resume`, on "held-out", "train" or "test"
    weights: str | None = None  # the weights to begin with, where nothing is resumed
    earlier: Earlier | None = None  # set if the same command has started before

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "Attempt":
        return parse_dataclass(cls, json.loads(text))


def new_attempt_name() -> str:
    return f"{time.time_ns():x}-{os.getpid()}"


_MOST_SAVING = 0.01  # share of the time in which training may stand still for saves by the clock
_LOOK = 0.05  # seconds between two looks at the file
# the launcher sends it where the control file can't be written, or is not its own
STOP_SIGNAL = signal.SIGUSR1
_NOTHING = (0,) * len(REQUESTS)
_LIBRARIES = {"torch": ("torch",), "jax": ("jax", "jaxlib", "flax", "optax")}
_PATIENCE = 5.0  # seconds, for git
_NO_FILTER = ("clean=", "process=", "required=false")  # settings of git that switch a filter off
_CONTENTS_ALONE = ("--quiet", "--no-ext-diff", "--no-textconv", "--ignore-submodules")


def surroundings(engine: str, machine: Machine) -> dict[str, object]:
    """The surroundings, for the journal.

    Its `commit` ends with `-dirty` where the working directory has changes, and is absent where the
    directory is no repository.
    """
    versions = {"samecurve": samecurve.__version__, "python": platform.python_version()}
    for name in (*_LIBRARIES[engine], "numpy", "safetensors"):
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    values: dict[str, object] = {
        "versions": versions,
        "host": socket.gethostname(),
        "system": platform.platform(),
        "cpu": machine.cpu,
        "cores": machine.cores,
        "host_bytes": machine.host_bytes,
        "hosts": machine.hosts,
    }
    commit = _commit()
    if commit:
        values["commit"] = commit
    return values


def _commit() -> str:
    """The working directory's commit; '' where there is no repository, or no git.

    The repository may have come from anywhere, so no command of its own config is run.
    """
    try:
        commit = _git("rev-parse", "--verify", "HEAD").stdout.strip()
        keys = ["config", "--show-scope", "--includes", "--name-only", "--get-regexp", r"^filter\."]
        found = _git(*keys, codes={0, 1}).stdout  # code 1: there is no filter
        if "=" in found:  # a name that -c can't take
            return ""
        filters = {
            key.rpartition(".")[0]
            for scope, _, key in (line.partition("\t") for line in found.splitlines())
            if scope not in {"system", "global"}
        }
        values = [f"{name}.{value}" for name in filters for value in _NO_FILTER]
        settings = [word for value in values for word in ("-c", value)]
        compared = _git(*settings, "diff", *_CONTENTS_ALONE, "HEAD", codes={0, 1})
    except OSError:
        return ""
    return f"{commit}-dirty" if compared.returncode else commit


def _git(*words: str, codes: Collection[int] = frozenset({0})) -> CompletedProcess[str]:
    """What git says. It takes no lock, asks no monitor of files, and fetches nothing.

    OSError: there is no git, it takes too long, or its exit code is not one of these codes.
    """
    done = output_of(
        ["git", "--no-optional-locks", "-c", "core.fsmonitor=false", *words],
        environment=child_environment(GIT_ALLOW_PROTOCOL="none"),
        seconds=_PATIENCE,
    )
    if done.returncode not in codes:
        raise OSError(f"git {words[0]} ended with {how_ended(done.returncode)}")
    return done


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


class StartupClock:
    """Times the parts of a start."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        began = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[f"{name}_seconds"] = round(time.perf_counter() - began, 3)


def machine_load() -> dict[str, Any]:
    """The machine's load average, and its cores."""
    return {"load": round(os.getloadavg()[0], 2), "cores": os.cpu_count() or 1}


def after_others(
    record: Callable[[Event], None], earlier: Earlier, *, resumed_at: int
) -> Callable[[Event], None]:
    """Wrap record(), for a start that follows others of the same command.

    A `recovered` line follows the first step. The last line has the whole command's goodput.

    resumed_at: the step that this start goes on from.
    """
    recovery: list[float] = []  # the seconds of the recovery, once it is over

    def recorded(event: Event) -> None:
        if event.kind in {"finished", "stopped"}:
            totals = _totals(event, earlier, recovery)
            event = replace(event, values={**event.values, **totals})
        record(event)
        if event.kind == "step" and not recovery:
            recovery.append(round(event.time - earlier.failed, 3))
            record(Event("recovered", event.step, {"seconds": recovery[0], "from": resumed_at}))

    return recorded


def _totals(event: Event, earlier: Earlier, recovery: list[float]) -> dict[str, Any]:
    """The totals of all starts: wall seconds, steps, goodput, and the seconds of each recovery.

    Goodput is the share of the wall seconds in steps that still count.
    """
    wall = event.time - earlier.began
    useful = earlier.useful + event.values["goodput"] * event.values["seconds"]
    return {
        "seconds": wall,
        "steps": earlier.steps + event.values["steps"],
        "goodput": useful / wall,
        "recoveries": [*earlier.recoveries, *recovery],
    }


def ask(run: Run, attempt: str, request: Request) -> None:
    """Send a request to a live attempt: one whole line."""
    line = json.dumps({"time": time.time(), "attempt": attempt, "request": request})
    with open(run.control, "ab", buffering=0, opener=regular_only) as file:
        write_all(file, f"{line}\n".encode())


class Requests:
    """The requests to this rank, from the control file, from signals and from the clock.

    control: None: another rank reads the control file.
    """

    def __init__(self, control: "ControlFile | None") -> None:
        self._control = control
        self._stops = self._stops_seen = 0  # signals that asked for a stop; those passed on
        self._kept = _NOTHING  # requests that were looked at, and not passed on
        self.signal: int | None = None  # the one that came last, where no launcher hears them

    def stop(self) -> None:
        self._stops += 1

    def saved(self, blocked: float) -> None:
        """Count the time until the next save from now on.

        blocked: seconds in which training stood still for the last save
        """
        if self._control is not None:
            self._control.saved(blocked)

    @property
    def has_stop_signal(self) -> bool:
        """Whether a signal to this process has asked for a stop, passed on or not."""
        return self._stops > 0

    def is_stop_asked(self) -> bool:
        """Whether a stop was asked for. All requests stay for pending()."""
        self._kept = tuple(self.pending())
        return bool(self._kept[REQUESTS.index("stop")])

    def pending(self) -> Sequence[int]:
        """How many new requests there are of each of events.REQUESTS."""
        kept, self._kept = self._kept, _NOTHING
        counts = _NOTHING if self._control is None else self._control.pending()
        if kept is not _NOTHING:
            counts = [before + new for before, new in zip(kept, counts, strict=True)]
        if self._stops > self._stops_seen:  # a signal may come between any two lines of this
            new = self._stops - self._stops_seen
            self._stops_seen += new
            counts = [*counts]
            counts[REQUESTS.index("stop")] += new
        return counts


class ControlFile:
    """The requests to this attempt, read by one rank, and saves that go by the clock.

    Asked in each step, it looks at the file and the clock twenty times a second at most. All ranks
    agree on the step of a save as they do where somebody asks for one.

    save_seconds: between saves; 0: none goes by the clock
    """

    def __init__(self, run: Run, attempt: str, save_seconds: float = 0.0) -> None:
        self._path, self._attempt, self._position = str(run.control), attempt, 0
        self._next_look = 0.0
        self._save_seconds = save_seconds
        self._next_save = time.monotonic() + save_seconds if save_seconds else math.inf

    def saved(self, blocked: float) -> None:
        """Count the time until the next save by the clock from now on, as Requests.saved() does."""
        if self._save_seconds:
            gap = max(self._save_seconds, blocked / _MOST_SAVING)
            self._next_save = time.monotonic() + gap

    def pending(self) -> Sequence[int]:
        """How many new requests there are of each of events.REQUESTS."""
        now = time.monotonic()
        if now < self._next_look:
            return _NOTHING
        self._next_look = now + _LOOK
        counts = self._read()
        if now >= self._next_save:
            self._next_save = math.inf  # until the save is published
            counts = [*counts]
            counts[REQUESTS.index("save")] += 1
        return counts

    def _read(self) -> Sequence[int]:
        """The new requests in the file."""
        try:
            if os.stat(self._path).st_size <= self._position:
                return _NOTHING
        except FileNotFoundError:
            return _NOTHING
        counts = [0] * len(REQUESTS)
        with open(self._path, "rb", opener=regular_only) as file:
            file.seek(self._position)
            for line in file:
                if not line.endswith(b"\n"):
                    break
                self._position += len(line)
                request = _read_request(line, self._attempt)
                if request is not None:
                    counts[REQUESTS.index(request)] += 1
        return counts


def _read_request(line: bytes, attempt: str) -> Request | None:
    """The request of a line; None: it is for another attempt, or no request."""
    try:
        values = json.loads(line)
    except ValueError:
        return None
    if not isinstance(values, dict) or values.get("attempt") != attempt:
        return None
    return next((name for name in REQUESTS if name == values.get("request")), None)
