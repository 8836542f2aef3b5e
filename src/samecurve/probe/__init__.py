"""Describes this machine: its GPUs, cores, memory and file systems, and this process's environment.

Reads the operating system, the driver, the environment and installed packages; imports no engine.
"""

import os
import platform
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil

from samecurve.core.planning.machine import AMD, NVIDIA, Device, Machine
from samecurve.probe import nvidia

MOUNTS = Path("/proc/self/mountinfo")
_NETWORK = re.compile(
    r"nfs\d?|cifs|smb\d?|smbfs|lustre|gpfs|beegfs|ceph|glusterfs|9p|afs|orangefs|pvfs2|wekafs|fuse"
    r"|fuse\..*"
)
_LOCAL = {"fuse.fuse-overlayfs", "fuse.lxcfs", "fuse.mergerfs", "fuse.ntfs-3g"}  # of a local disk
_OCTAL = re.compile(r"\\([0-7]{3})")  # how mountinfo writes blanks


def probe() -> Machine:
    """This machine, as far as this process may use it.

    UserError: a variable such as CUDA_VISIBLE_DEVICES names a GPU that isn't there.
    """
    gpus, unfit = find_gpus(os.environ), {}
    if gpus.vendor:
        from samecurve.probe.engines import unfit_engines

        unfit = unfit_engines(gpus.vendor)
    return Machine(
        devices=gpus.devices,
        links=(),
        host_bytes=host_memory(),
        cores=cpu_cores(),
        cpu=cpu_name(),
        threads=_threads(os.environ),
        xla_devices=_xla_devices(os.environ),
        unfit=unfit,
    )


def _threads(environment: Mapping[str, str]) -> int | None:
    """The threads that OMP_NUM_THREADS asks for; torchrun's own default of 1 asks for nothing."""
    first = environment.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    is_default = first == "1" and "TORCHELASTIC_RUN_ID" in environment
    is_number = re.fullmatch(r"[1-9]\d{0,4}", first, re.ASCII) is not None
    return int(first) if is_number and not is_default else None


def _xla_devices(environment: Mapping[str, str]) -> int | None:
    """How many CPU devices XLA_FLAGS asks for; of several such flags XLA obeys the last."""
    counts = re.findall(
        r"--xla_force_host_platform_device_count=(\d+)", environment.get("XLA_FLAGS", "")
    )
    return int(counts[-1]) if counts else None


def allowed_cores() -> set[int]:
    """The numbers of the cores to which this process is bound; all where it is not."""
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    return set(range(os.cpu_count() or 1))


def cpu_cores(numbers: Collection[int] | None = None) -> int:
    """Cores that this process may run on, a container's quota applied.

    numbers: those of several processes together; None: of this one
    """
    allowed = len(allowed_cores() if numbers is None else numbers)
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
    except (OSError, ValueError):
        return allowed
    if quota == "max":
        return allowed
    return max(1, min(allowed, int(quota) // int(period)))


def host_memory() -> int:
    """Bytes of host memory, a container's limit applied."""
    total = int(psutil.virtual_memory().total)
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
    except OSError:
        return total
    if limit == "max":
        return total
    return min(total, int(limit))


def oom_kills(root: Path = Path("/")) -> int | None:
    """Processes that the kernel has killed so far because memory ran out. None: not known.

    The count of this control group, where it has one, else of the whole machine.
    """
    for path, key in (*_counters(root), (root / "proc/vmstat", "oom_kill")):
        try:
            lines = [line.split() for line in path.read_text().splitlines()]
            return next(int(words[1]) for words in lines if words[:1] == [key])
        except (OSError, StopIteration, ValueError, IndexError):
            continue
    return None


def oom_kills_since(before: int | None) -> int | None:
    """Processes killed since the count was `before`. None: not known."""
    now = oom_kills()
    if now is None or before is None:
        return None
    return now - before


def _counters(root: Path) -> list[tuple[Path, str]]:
    """The files in which a control group counts kills: (file, key), version 2 first.

    A container may see its own group as the root.
    """
    try:
        text = (root / "proc/self/cgroup").read_text()
    except OSError:
        return []
    groups = root / "sys/fs/cgroup"
    of_version_2, of_version_1 = [], []
    for line in text.splitlines():
        _, controllers, path = line.split(":", 2)
        for place in (path.lstrip("/"), ""):
            if not controllers:
                of_version_2.append((groups / place / "memory.events", "oom_kill"))
            elif controllers == "memory":
                of_version_1.append((groups / "memory" / place / "memory.oom_control", "oom_kill"))
    return [*of_version_2, *of_version_1]


def cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or "CPU"
    for line in lines:
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return f"{platform.machine()} CPU"


def file_system(place: Path, mounts: Path = MOUNTS) -> str:
    """The kind of the file system at a place, such as ext4; '': not known.

    place: it need not exist yet
    mounts: the system's list, in the format of /proc/self/mountinfo
    """
    try:
        lines = mounts.read_text(errors="surrogateescape").splitlines()
    except OSError:  # macOS has no such list
        return ""
    place, kinds = place.resolve(), dict[Path, str]()
    for line in lines:
        mounted, _, source = line.partition(" - ")
        words, kind = mounted.split(" "), source.partition(" ")[0]
        if len(words) < 5 or not kind:
            continue
        point = Path(_OCTAL.sub(lambda match: chr(int(match[1], 8)), words[4]))
        if point == place or point in place.parents:
            kinds[point] = kind  # a later line of the same place lies over the earlier one
    return kinds[max(kinds, key=lambda point: len(point.parts))] if kinds else ""


def is_network(kind: str) -> bool:
    """Whether files of a file system come over a network (or from a program: FUSE)."""
    return _NETWORK.fullmatch(kind) is not None and kind not in _LOCAL


def network_note(place: Path, mounts: Path = MOUNTS) -> tuple[str, str] | None:
    """What a run should know of a directory for its checkpoints, and the remedy; None: nothing."""
    kind = file_system(place, mounts)
    if not is_network(kind):
        return None
    return (
        f"{place} is on a network file system ({kind}): saves are slower there, and a server that"
        " does not answer holds the run up",
        "--save-dir on a local disk (with s3://BUCKET/NAME a copy is kept in a store); runs of"
        " several machines need a shared directory, and stay here",
    )


TOPOLOGY = Path("/sys/class/kfd/kfd/topology")  # of the driver for AMD's GPUs


@dataclass(frozen=True)
class Gpus:
    """The GPUs that this process may use."""

    vendor: str  # '' without any
    devices: tuple[Device, ...]
    variable: str  # the environment variable that chooses among them


def find_gpus(environment: Mapping[str, str]) -> Gpus:
    """NVIDIA's GPUs, else AMD's, else none.

    UserError: an environment variable names a GPU that isn't there.
    """
    if devices := nvidia.devices(environment):
        return Gpus(NVIDIA, devices, nvidia.VISIBLE)
    if TOPOLOGY.is_dir():
        from samecurve.probe import amd

        if devices := amd.devices(environment, TOPOLOGY):
            return Gpus(AMD, devices, amd.hip_variable(environment))
    return Gpus("", (), "")
