"""Temporary directories for an experiment's runs, and work for its warm ranks."""

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
from samecurve.core.feature_list import rows_of
from samecurve.core.planning.plan import Plan
from samecurve.core.planning.schedule import Intervals
from samecurve.core.system.cache import cache_home
from samecurve.launch.pool import Pool
from samecurve.run.directory import Run


@contextmanager
def scratch(name: str) -> Iterator[Path]:
    """A directory that is removed at the end of the block.

    Directories that killed experiments left are removed, too.
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
    """The plan without evaluation, samples and what only watches a run, whatever the config says.

    Only checkpoints that the experiment requests are saved, and all of them are kept.
    """
    every = Intervals(log=plan.every.log, evaluate=0, save=0, sample=0)
    rows = [row for row in rows_of(plan.features) if row.changes_results]
    features = {row.name: plan.features[row.name] for row in rows}
    data = replace(plan.data, eval_samples=0, test_samples=0)
    return replace(plan, data=data, every=every, keep=0, features=features)


def make_run(home: Path, config: Config, plan: Plan) -> Run:
    """Make a run directory, from which ranks read their plan and config."""
    run = Run(home)
    for directory in (run.home, run.checkpoints, run.logs):
        directory.mkdir(parents=True, exist_ok=True)
    run.write(config, plan)
    return run


def run_on_ranks(pool: Pool, plan: Plan, job: Callable[..., Any], *arguments: Any) -> list[Any]:
    """Run job(rank, group, *arguments) on the ranks of a plan; return the results by rank.

    JobFailedError: a rank raised an exception, ended, or took too long.
    """
    backend = plan.layout.backend if plan.layout.backend in {"gloo", "nccl"} else "gloo"
    return pool.run(plan.layout.world_size, job, *arguments, backend=backend)
