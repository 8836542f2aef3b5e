"""A start of a run, in the form in which every rank gets it; the logs that its processes print to;
and what the journal says of it: its surroundings (versions, host, the commit of the working
directory), its seconds, and those of the command's earlier starts.

No engine is imported. Surroundings that can't be known are left out, so that a run never fails
because of them.
"""

import json
import os
import platform
import socket
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import samecurve
from samecurve.core.events import Event
from samecurve.core.planning.fixed import parse_dataclass
from samecurve.core.planning.machine import Machine
from samecurve.processes import child_environment, how_ended, output_of
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
