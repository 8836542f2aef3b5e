"""What this process may use of the host: cores and memory, control groups applied."""

import os
import platform
from pathlib import Path

import psutil


def cores() -> int:
    """Cores that this process may run on, a container's quota applied."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
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


def name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or "CPU"
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine() + " CPU")
