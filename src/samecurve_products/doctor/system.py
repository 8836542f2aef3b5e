"""The host: shared memory, limits, its name, its disk, its cores and its clock."""

import os
import resource
import shutil
import socket
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from secrets import token_hex

import psutil

from samecurve.probe import (
    MOUNTS,
    cpu_cores,
    cpu_name,
    file_system,
    host_memory,
    network_note,
)
from samecurve.seam import counted, explain_os_error, join_words, show_bytes
from samecurve_products.doctor import Check, failed, passed, warned

_GIB = 1 << 30
# NCCL keeps some MiB in /dev/shm for each pair of ranks of a host, and data workers keep batches
# there. A container has 64 MiB unless it was started with more.
_LEAST_SHARED, _ENOUGH_SHARED = 32 << 20, _GIB
# files and sockets of a rank with libraries, peers and data workers; systems allow 1024 or more
_LEAST_FILES, _ENOUGH_FILES = 256, 1024
_ENOUGH_PROCESSES = 512  # threads and processes of a few ranks with data workers
_LEAST_DISK, _ENOUGH_DISK = _GIB, 20 * _GIB  # checkpoints of a small, of a usual model
_PATIENCE = 5.0  # seconds for the resolution of a name
_INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
_CONTAINER = "; a container gets more by"


@dataclass(frozen=True, kw_only=True)
class Host:
    """A host, and the places where check_system() reads."""

    save_dir: Path  # where runs are saved
    ranks: int  # that will share the cores
    gpus: int = 0
    environment: Mapping[str, str] = field(default_factory=dict)
    root: Path = Path("/")  # below which the system's files lie
    shared_memory: Path = Path("/dev/shm")
    name: str = field(default_factory=socket.gethostname)
    cores: int = field(default_factory=cpu_cores)
    time: float = field(default_factory=time.time)


def check_system(host: Host) -> list[Check]:
    return [
        _cores(host),
        *_memory(host),
        *_shared_memory(host.shared_memory),
        _open_files(),
        *_processes(host.root),
        *_locked_memory(host),
        *_name(host.name),
        *_interfaces(host.environment),
        *_run_directory(host),
        _clock(host.time),
    ]


def _cores(host: Host) -> Check:
    each = host.cores // host.ranks
    ranks = f"{counted(host.ranks, 'GPU')}" if host.gpus else f"{counted(host.ranks, 'CPU rank')}"
    figure = f"{counted(host.cores, 'core')} for {ranks}, {cpu_name()}"
    if each >= 1:
        return passed("CPU cores", f"{figure}: {each} each")
    return warned(
        "CPU cores",
        f"{figure}: ranks take turns on a core, and all wait for the last",
        "give this process more cores (a container: --cpus; Slurm: --cpus-per-task), or use fewer"
        " devices, such as --devices cpu:1 or --gpus 0",
    )


def _memory(host: Host) -> list[Check]:
    """The host's memory, and a container's part of it."""
    limit, total = host_memory(), int(psutil.virtual_memory().total)
    free = int(psutil.virtual_memory().available)
    figure = f"{show_bytes(min(free, limit))} free of {show_bytes(limit)}"
    if limit < total:
        figure += f" (this container's part of {show_bytes(total)})"
    if min(free, limit) < host.ranks * _GIB:  # a rank with its libraries takes half a GiB
        return [
            warned(
                "host memory",
                f"{figure}, for {counted(host.ranks, 'rank')}",
                f"end other programs (`top` lists them), or use fewer devices{_CONTAINER}"
                " docker run --memory",
            )
        ]
    return [passed("host memory", figure)]


def _shared_memory(place: Path) -> list[Check]:
    more = f"remove files that nobody uses from {place}{_CONTAINER} docker run --shm-size=8g"
    try:
        usage = shutil.disk_usage(place)
    except OSError:
        return []  # macOS has none, and needs none
    figure = f"{show_bytes(usage.free)} free of {show_bytes(usage.total)} in {place}"
    if usage.free < _LEAST_SHARED:
        need = f"{figure}; ranks of one host need at least {show_bytes(_LEAST_SHARED)} there"
        return [failed("shared memory", need, more)]
    if usage.free < _ENOUGH_SHARED:
        need = f"{figure}: enough for two GPUs, not for eight or for many data workers"
        return [warned("shared memory", need, more)]
    return [passed("shared memory", figure)]


def _open_files() -> Check:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = "unlimited" if hard == resource.RLIM_INFINITY else str(hard)
    if soft == resource.RLIM_INFINITY or soft >= _ENOUGH_FILES:
        return passed("open files", f"{_limit(soft)} for each process")
    figure = f"{soft} for each process (ulimit -n), and {most} at most"
    raised = _ENOUGH_FILES if hard == resource.RLIM_INFINITY else min(hard, 65536)
    remedy = f"ulimit -n {raised}, in the shell that starts training"
    if hard != resource.RLIM_INFINITY and hard < _ENOUGH_FILES:
        remedy = (
            "more needs an administrator: `nofile` in /etc/security/limits.conf; a container:"
            " docker run --ulimit nofile=65536"
        )
    if soft < _LEAST_FILES:
        return failed("open files", f"{figure}: too few for one rank with its libraries", remedy)
    return warned("open files", f"{figure}: few for many ranks or data workers", remedy)


def _limit(value: int) -> str:
    return "unlimited" if value == resource.RLIM_INFINITY else str(value)


def _processes(root: Path) -> list[Check]:
    """How many threads and processes may be started, by the user's limit and the container's."""
    limits = {}
    soft = resource.getrlimit(resource.RLIMIT_NPROC)[0]
    if soft != resource.RLIM_INFINITY:
        limits["ulimit -u"] = soft
    with suppress(OSError, ValueError):
        limits["pids.max of this container"] = int((root / "sys/fs/cgroup/pids.max").read_text())
    low = {name: value for name, value in limits.items() if value < _ENOUGH_PROCESSES}
    if not low:
        least = min(limits.values(), default=None)
        return [passed("processes", "no limit" if least is None else f"{least} at most")]
    name, value = min(low.items(), key=lambda pair: pair[1])
    return [
        warned(
            "processes",
            f"{value} at most ({name}): a rank with its libraries has dozens of threads",
            f"ulimit -u 4096, as far as your administrator allows it{_CONTAINER}"
            " docker run --pids-limit 4096",
        )
    ]


def _locked_memory(host: Host) -> list[Check]:
    """The limit of locked memory, which InfiniBand needs: NCCL registers its buffers there."""
    soft = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    adapters = sorted(path.name for path in host.root.glob("sys/class/infiniband/*"))
    shown = "unlimited" if soft == resource.RLIM_INFINITY else show_bytes(soft)
    if not adapters or not host.gpus:
        return [passed("locked memory", shown)]
    if soft == resource.RLIM_INFINITY or soft >= _GIB:
        return [passed("locked memory", f"{shown}, for {join_words(adapters)}")]
    return [
        warned(
            "locked memory",
            f"{shown}: too little for NCCL over {join_words(adapters)}, which then fails, or goes"
            " over the slower network",
            "ulimit -l unlimited (an administrator: `memlock` in /etc/security/limits.conf; a"
            " container: docker run --ulimit memlock=-1; Slurm:"
            " PropagateResourceLimitsExcept=MEMLOCK in slurm.conf)",
        )
    ]


def _name(name: str) -> list[Check]:
    """Whether the host's own name leads to an address: Gloo asks for it."""
    answers: list[str] = []

    def ask() -> None:
        try:
            answers.append(str(socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)[0][4][0]))
        except (OSError, UnicodeError) as error:
            answers.append(f"no address: {getattr(error, 'strerror', None) or error}")

    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    asking.join(_PATIENCE)
    answer = answers[0] if answers else f"no answer in {_PATIENCE:g} s"
    if not answer.startswith("no "):
        return [passed("host name", f"{name} is {answer}")]
    return [
        warned(
            "host name",
            f"{name}, this host's own name, has {answer}",
            f"add the line `127.0.0.1 {name}` to /etc/hosts (as root); or export"
            " GLOO_SOCKET_IFNAME=lo for training on this one machine",
        )
    ]


def _interfaces(environment: Mapping[str, str]) -> list[Check]:
    """Variables that name a network interface which is not there."""
    there = sorted(psutil.net_if_addrs())
    checks = []
    for variable in _INTERFACES:
        value = environment.get(variable, "")
        # NCCL's form: ^a,b leaves interfaces out, =a is the whole name, a alone its beginning
        if not value or value.startswith("^"):
            continue
        names = [part for part in value.removeprefix("=").split(",") if part]
        if not any(known.startswith(part) for part in names for known in there):
            figure = f"{variable}={value} names no network interface of this host"
            remedy = f"unset {variable}, or name one of {', '.join(there)}"
            checks.append(failed("network variable", figure, remedy))
    return checks


def _run_directory(host: Host) -> list[Check]:
    """Whether runs can be saved: rights, room, and what kind of disk it is."""
    home = host.save_dir.absolute()
    place = next((path for path in (home, *home.parents) if path.exists()), Path("/"))
    trial = place / f".samecurve-check-{token_hex(4)}"
    try:
        trial.write_bytes(b"\0" * 4096)
    except OSError as error:
        cause, remedy = explain_os_error(error, place, "check again; or another --save-dir")
        return [failed("run directory", cause, remedy)]
    finally:
        with suppress(OSError):
            trial.unlink()
    free = shutil.disk_usage(place).free
    mounts = host.root / MOUNTS.relative_to("/")
    kind = file_system(place, mounts)
    figure = f"{show_bytes(free)} free in {place}" + (f" ({kind})" if kind else "")
    remedy = "free some space there (`df -h`), or --save-dir on another disk"
    note = network_note(place, mounts)
    network = [warned("file system of runs", *note)] if note else []
    if free < _LEAST_DISK:
        return [failed("run directory", f"{figure}: no room for checkpoints", remedy), *network]
    if free < _ENOUGH_DISK:
        small = f"{figure}: room for checkpoints of small models"
        return [warned("run directory", small, remedy), *network]
    return [passed("run directory", figure), *network]


def _clock(now: float) -> Check:
    """Whether the clock is behind the files of this program, which were written in the past."""
    written = max(path.stat().st_mtime for path in Path(__file__).parent.glob("*.py"))
    shown = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(now))
    if now >= written:
        return passed("clock", shown)
    return warned(
        "clock",
        f"{shown}, which is before this program was installed: the clock is wrong",
        "set it (`sudo timedatectl set-ntp true`): journals, downloads and several machines need"
        " the right time",
    )


def load_note() -> str:
    """A line where other programs keep the cores busy, since figures are lower then; ''."""
    load, cores = os.getloadavg()[0], os.cpu_count() or 1
    if load <= cores:
        return ""
    return f"busy   other programs want the cores (load {load:.1f} on {cores}): rates are too low"
