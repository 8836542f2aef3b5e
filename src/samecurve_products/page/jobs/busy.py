"""The devices that are in use: by running jobs, and by live runs that somebody else has started."""

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from samecurve.seam import Run
from samecurve_products.page.jobs.job import ENDED, Job
from samecurve_products.page.lock_file import holds_lock
from samecurve_products.page.plan_file import read_plan_file


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
            if home.resolve() not in own and holds_lock(Run(home)):
                taken |= dict.fromkeys(devices_of(home), f"run {home.name} uses it")
        return taken


def runs_below(root: Path) -> Callable[[], list[Path]]:
    """The run directories of a folder, for Devices."""

    def runs() -> list[Path]:
        return [path.parent for path in (root / "runs").glob("*/lock")]

    return runs


def devices_of(home: Path) -> list[str]:
    """The devices of a run's plan, as jobs name them; empty: it can't be read."""
    with suppress(OSError):
        devices = read_plan_file(Run(home).plan).devices
        return ["cpu" if d.kind == "cpu" else f"{d.kind}:{d.index}" for d in devices]
    return []


def device_words(devices: Sequence[str]) -> str:
    """['cuda:0', 'cuda:1'] -> 'GPU 0, 1'; ['cpu'] -> 'the CPU'."""
    indices = [device.partition(":")[2] for device in devices if ":" in device]
    words = [f"GPU {', '.join(indices)}"] if indices else []
    words += ["the CPU"] if "cpu" in devices else []
    return " and ".join(words) or "no device"
