"""The devices that are in use: by running jobs, and by live runs that somebody else has started."""

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from samecurve.core.system.files import read_file_bytes
from samecurve.run.directory.lock import is_live
from samecurve.run.directory.run_directory import Run
from samecurve.ui.jobs.job import ENDED, Job

_MOST_BYTES = 1 << 26  # of plan.json


@dataclass
class Devices:
    """The devices of this machine, as jobs and runs use them.

    runs: gives the run directories that may be live
    """

    runs: Callable[[], Iterable[Path]]

    def busy(self, jobs: Sequence[Job]) -> dict[str, str]:
        """Device -> what uses it, in words. jobs: those that were started."""
        taken: dict[str, str] = {}
        own = {job.run.resolve() for job in jobs if job.run}
        for job in jobs:
            if job.outcome().state not in ENDED:
                taken |= dict.fromkeys(job.devices, f"job {job.name} uses it")
        for home in self.runs():
            if home.resolve() not in own and _holds_lock(home):
                taken |= dict.fromkeys(devices_of(home), f"run {home.name} uses it")
        return taken


def runs_below(root: Path) -> Callable[[], list[Path]]:
    """The run directories of a folder, for Devices."""

    def runs() -> list[Path]:
        return [path.parent for path in (root / "runs").glob("*/lock")]

    return runs


def _holds_lock(home: Path) -> bool:
    """Whether a live process holds the run's lock. A lock that was released is an empty file."""
    try:
        return (home / "lock").stat().st_size > 0 and is_live(Run(home))
    except OSError:
        return False


def devices_of(home: Path) -> list[str]:
    """The devices of a run's plan, as jobs name them; empty: it can't be read."""
    try:
        values = json.loads(read_file_bytes(Run(home).plan, _MOST_BYTES))
        devices = values["plan"]["devices"]
        return [
            "cpu" if device["kind"] == "cpu" else f"{device['kind']}:{device['index']}"
            for device in devices
        ]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return []


def device_words(devices: Sequence[str]) -> str:
    """['cuda:0', 'cuda:1'] -> 'GPU 0, 1'; ['cpu'] -> 'the CPU'."""
    indices = [device.partition(":")[2] for device in devices if ":" in device]
    words = [f"GPU {', '.join(indices)}"] if indices else []
    words += ["the CPU"] if "cpu" in devices else []
    return " and ".join(words) or "no device"
