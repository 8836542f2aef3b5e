"""Where an experiment's runs lie while it lasts, and how its warm ranks are given work."""

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

from samecurve.core.config.sections import Config
from samecurve.core.planning.plan import Plan
from samecurve.launch.pool import Pool
from samecurve.run.directory import Run
from samecurve.system import cache_home


@contextmanager
def scratch(name: str) -> Iterator[Path]:
    """A directory that goes with the block.

    What an experiment that was killed left is taken away, too.
    """
    home = cache_home() / name
    home.mkdir(parents=True, exist_ok=True)
    for leftover in home.iterdir():
        pid = leftover.name.partition("-")[0]
        if pid.isdigit() and not psutil.pid_exists(int(pid)):
            shutil.rmtree(leftover, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=f"{os.getpid()}-", dir=home) as directory:
        yield Path(directory)


def make_run(home: Path, config: Config, plan: Plan) -> Run:
    """A run directory from which ranks read what to do."""
    run = Run(home)
    for directory in (run.home, run.checkpoints, run.logs):
        directory.mkdir(parents=True, exist_ok=True)
    run.write(config, plan)
    return run


def run_on_ranks(pool: Pool, plan: Plan, job: Callable[..., Any], *arguments: Any) -> list[Any]:
    """job(rank, group, *arguments) on the ranks of a plan; their results by rank.

    JobFailedError: one of them raised, ended, or took too long.
    """
    backend = plan.backend if plan.backend in {"gloo", "nccl"} else "gloo"
    return pool.run(plan.world_size, job, *arguments, backend=backend)
