"""What this process may use of the host: cores and memory, control groups applied."""

import os
import platform
from pathlib import Path

import psutil


def cores() -> int:
    """Cores that this process may run on, a container's quota applied."""
    allowed = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
    except (OSError, ValueError):
        return allowed
    return allowed if quota == "max" else max(1, min(allowed, int(quota) // int(period)))


def memory() -> int:
    """Bytes of host memory, a container's limit applied."""
    total = int(psutil.virtual_memory().total)
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
    except OSError:
        return total
    return total if limit == "max" else min(total, int(limit))


def oom_kills(root: Path = Path("/")) -> int | None:
    """Processes that the kernel has ended so far for want of memory: of this control group where it
    counts them, else of the whole machine. None: it can't be known.
    """
    for path, key in (*_counters(root), (root / "proc/vmstat", "oom_kill")):
        try:
            return next(
                int(line.split()[1])
                for line in path.read_text().splitlines()
                if line.split()[:1] == [key]
            )
        except (OSError, StopIteration, ValueError, IndexError):
            continue
    return None


def oom_kills_since(before: int | None) -> int | None:
    """How many more than `before`. None: it can't be known."""
    now = oom_kills()
    return None if now is None or before is None else now - before


def _counters(root: Path) -> list[tuple[Path, str]]:
    """Where a control group counts them: (file, key), version 2 first; a container may see its own
    group as the root.
    """
    try:
        lines = [
            line.split(":", 2) for line in (root / "proc/self/cgroup").read_text().splitlines()
        ]
    except OSError:
        return []
    group = root / "sys/fs/cgroup"
    unified = [
        group / place
        for _, controllers, path in lines
        if not controllers
        for place in (path.lstrip("/"), "")
    ]
    older = [
        group / "memory" / place
        for _, controllers, path in lines
        if controllers == "memory"
        for place in (path.lstrip("/"), "")
    ]
    return [
        *((path / "memory.events", "oom_kill") for path in unified),
        *((path / "memory.oom_control", "oom_kill") for path in older),
    ]


def model_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or "CPU"
    return next(
        (line.partition(":")[2].strip() for line in lines if line.startswith("model name")),
        platform.machine() + " CPU",
    )
