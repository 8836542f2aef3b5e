"""Where an experiment's runs lie while it lasts, and how its warm ranks are given work."""

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil

from samecurve.core.config.sections import Config
from samecurve.core.planning.plan import Plan
from samecurve.core.planning.schedule import Intervals
from samecurve.core.system.cache import cache_home
from samecurve.launch.pool import Pool
from samecurve.run.directory.run_directory import Run


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


def for_steps_alone(plan: Plan) -> Plan:
    """The plan without what a run does beside its steps, whatever the config has of that.

    Nothing is evaluated or sampled, and saved is what the experiment itself asks for, all of which
    stays.
    """
    every = Intervals(log=plan.every.log, evaluate=0, save=0, sample=0)
    return replace(plan, eval_samples=0, test_samples=0, every=every, keep=0)


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
    backend = plan.layout.backend if plan.layout.backend in {"gloo", "nccl"} else "gloo"
    return pool.run(plan.layout.world_size, job, *arguments, backend=backend)
