"""A start of a run, in the form in which every rank gets it; and its surroundings, for the journal:
versions, host, and the commit of the working directory.

No engine is imported and nothing is written. Surroundings that can't be known are left out, so that
a run never fails because of them.
"""

import json
import os
import platform
import socket
import subprocess
import time
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import samecurve
from samecurve.core.planning.machine import Machine


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
        return cls.from_values(json.loads(text))

    @classmethod
    def from_values(cls, values: dict[str, Any]) -> "Attempt":
        earlier = values.get("earlier")
        if earlier:
            recoveries = tuple(earlier["recoveries"])
            values = {**values, "earlier": Earlier(**{**earlier, "recoveries": recoveries})}
        return cls(**values)


def new_attempt_name() -> str:
    return f"{time.time_ns():x}-{os.getpid()}"


_LIBRARIES = {"torch": ("torch",), "jax": ("jax", "jaxlib", "flax", "optax")}
_PATIENCE = 5.0  # seconds, for git


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
    """The working directory's commit; '' where there is no repository, or no git."""
    git = [
        "git",
        "--no-optional-locks",
        "-c",
        "core.fsmonitor=false",
        "describe",
        "--always",
        "--dirty",
        "--exclude=*",
        "--abbrev=40",
    ]
    try:
        return subprocess.run(
            git,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_PATIENCE,
            check=True,
        ).stdout.strip()
    except (OSError, ValueError, subprocess.SubprocessError):
        return ""
