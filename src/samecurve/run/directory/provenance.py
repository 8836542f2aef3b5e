"""The surroundings of a start: versions, host, and the commit of the working directory.

No engine is imported and nothing is written. Values that can't be known are left out, so that a run
never fails because of them.
"""

import platform
import socket
import subprocess
from importlib.metadata import PackageNotFoundError, version

import samecurve
from samecurve.core.planning.machine import Machine

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
