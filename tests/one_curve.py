"""A config trained by several layouts, each compared with one device."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from samecurve.core.config.sections import Config
from samecurve.experiments.layout_runner import LayoutRunner
from samecurve.experiments.layouts import parse_layout
from samecurve.experiments.verify.verdicts import Verdict, compare_layouts
from samecurve.tasks import open_task
from samecurve.worker.jobs.train_job import rehearse
from tiny import MACHINE
from worlds import Pool


def compare(
    config: Config,
    layouts: Sequence[str],
    pool: Pool,
    home: Path,
    *,
    steps: int,
    near: float,
    job: Callable[..., Any] = rehearse,
) -> list[Verdict]:
    """A verdict a layout. near: how far from one device it may be, relative; 0: not at all.

    job: what a rank does, replaced only to plant faults
    """
    facts = open_task(config, str(home / "cache")).facts()
    runner = LayoutRunner(
        config, MACHINE, facts, steps=steps, kind="cpu", pool=pool, home=home, job=job
    )
    return list(compare_layouts(runner, [parse_layout(layout) for layout in layouts], near))


def check_one_curve(
    config: Config, layouts: Sequence[str], pool: Pool, home: Path, *, steps: int, near: float
) -> list[Verdict]:
    """The verdicts, of which each is a PASS."""
    verdicts = compare(config, layouts, pool, home, steps=steps, near=near)
    assert [verdict.verdict for verdict in verdicts] == ["PASS"] * len(layouts), verdicts
    return verdicts
