"""`samecurve bench`: a config's own steps in several layouts of this machine, by the clock alone.

What is measured is what `samecurve profile` measures, without its profiler. Each layout has
processes of its own: what a process has held at most never goes down again (nor does jax's peak on
a GPU), and a layout that fails takes no other with it.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import click
import psutil

from samecurve.core.config.sections import Config, LoadedConfig
from samecurve.core.planning.facts import Facts
from samecurve.core.planning.layout import choose_devices
from samecurve.core.planning.machine import Device, Machine
from samecurve.core.profile_types import ProfileSchedule
from samecurve.errors import SamecurveError, UserError
from samecurve.experiments.balance import measured as with_speeds
from samecurve.experiments.bench_page import UNDRAWN, drawable, files
from samecurve.experiments.benched import (
    Bench,
    Row,
    Trial,
    Values,
    as_json,
    dumped,
    head,
    line,
    notes,
    row_json,
)
from samecurve.experiments.layouts import (
    OF_ONE_DEVICE,
    Layout,
    bench_layouts,
    default_worlds,
    parse_strategies,
    parse_worlds,
)
from samecurve.experiments.profile import plan_profile, run_profile
from samecurve.experiments.results import Results
from samecurve.experiments.scratch import scratch
from samecurve.launch.pool import Pool, pool
from samecurve.probe import probe
from samecurve.run.describe import describe
from samecurve.run.provenance import surroundings
from samecurve.worker.jobs.profile import watch_rank

_PATIENCE = 3600.0  # seconds for all steps of a layout
_CPU_RANKS = 8  # the most that are tried where nobody says
_OWN = {
    "shards": None,
    "offload": False,
    "compress": "none",
    "balance": "even",
}  # what some strategies have, and how it is said that it is not wanted


def bench(
    loaded: LoadedConfig,
    worlds: str | None,
    strategies: str | None,
    course: ProfileSchedule,
    to: Path | None,
    json: bool,
) -> int:
    """Prints as it goes; returns the exit code: 1 if a layout failed.

    UserError: none of them can be.
    """
    machine = probe()
    results = None if json and to is None else Results.at(to, "bench", loaded.name)
    layouts = wanted_layouts(loaded.config, machine, worlds, strategies)
    facts = describe(loaded.config)
    trials = [laid_out(loaded.config, machine, facts, layout, course) for layout in layouts]
    about = about_all(loaded, machine, facts, trials, course)
    width = max(len(str(layout)) for layout in layouts)
    rows: list[Values] = []
    for note in (*loaded.notes, *([UNDRAWN] if results and not drawable() else [])):
        click.echo(f"note   {note}", err=True)
    if not json:
        click.echo(head(about, width))
    for row in measured(trials, course):
        rows.append(row)
        if not json:
            click.echo(line(about, row, width))
    written = (
        results.publish(files(about, rows))
        if results and any(row["status"] == "measured" for row in rows)
        else []
    )
    click.echo(
        dumped(as_json(about, rows))
        if json
        else "\n".join([*notes(about, rows), *(f"wrote  {path}" for path in written)])
    )
    return 1 if any(row["status"] == "failed" for row in rows) else 0


def wanted_layouts(
    config: Config, machine: Machine, worlds: str | None, strategies: str | None
) -> list[Layout]:
    """UserError: what was asked for is none, or leaves nothing to measure."""
    own = None if config.devices.strategy == "auto" else [config.devices.strategy]
    names = parse_strategies(strategies) if strategies is not None else own
    there = _devices(config, machine)
    alone = names is not None and all(name in OF_ONE_DEVICE for name in names)
    count = (
        1
        if alone
        else (
            min(max(2, machine.cores), _CPU_RANKS)
            if there[0].kind == "cpu" and len(there) == 1
            else len(there)
        )
    )
    layouts = bench_layouts(
        parse_worlds(worlds) if worlds is not None else default_worlds(count), names, config.engine
    )
    if not layouts:
        raise UserError(
            f"--worlds {worlds}: strategy single takes one device",
            "--worlds 1, or other --strategies",
            "--worlds",
        )
    return layouts


def _devices(config: Config, machine: Machine) -> tuple[Device, ...]:
    """What there is to use: the GPUs that the config names, or CPU ranks."""
    return choose_devices(config, machine).value


def laid_out(
    config: Config, machine: Machine, facts: Facts, layout: Layout, course: ProfileSchedule
) -> Trial:
    """The config on the first devices of those it names.

    Its batch is its own; what belongs to another strategy is left out, and that is said.
    """
    there = _devices(config, machine)
    gpus = there[0].kind == "cuda"
    if gpus and layout.num_devices > len(there):
        return Trial(
            layout,
            config,
            refused=UserError(
                f"{layout.num_devices} GPUs are asked for, {len(there)} are there",
                "--devices cpu tries it with CPU ranks",
                "--worlds",
            ),
        )
    use = (
        ",".join(str(device.index) for device in there[: layout.num_devices])
        if gpus
        else f"cpu:{layout.num_devices}"
    )
    placed = {"use": use, "strategy": layout.strategy}
    quiet = {
        "train": config.train.model_copy(update={"eval_every": 0})
    }  # nothing is evaluated here, so that nothing is said of it
    asked = {name: off for name, off in _OWN.items() if getattr(config.devices, name) != off}
    refused: list[UserError] = []
    for left_out in ({}, asked) if asked else ({},):
        tried = config.model_copy(
            update={**quiet, "devices": config.devices.model_copy(update={**placed, **left_out})}
        )
        try:
            return Trial(
                layout,
                tried,
                plan_profile(tried, machine, with_speeds(tried, machine, facts), course),
                without=tuple(f"devices.{name}: {refused[0].cause}" for name in left_out),
            )
        except UserError as error:
            refused.append(error)
    return Trial(layout, config, refused=refused[-1])


def about_all(
    loaded: LoadedConfig,
    machine: Machine,
    facts: Facts,
    trials: Sequence[Trial],
    course: ProfileSchedule,
) -> Bench:
    """UserError: not one of them can be."""
    plans = tuple(trial.made for trial in trials if trial.made)
    refused = next((trial.refused for trial in trials if trial.refused), None)
    if not plans and refused:
        raise refused
    return Bench(
        loaded.name,
        loaded.config,
        course,
        plans,
        machine.cores,
        psutil.getloadavg()[0],
        facts.formulas,
        surroundings(loaded.config.engine, machine),
        time.time(),
    )


def measured(
    trials: Sequence[Trial],
    course: ProfileSchedule,
    ranks: Pool | None = None,
    watched: Callable[..., Any] = watch_rank,
) -> Iterator[Values]:
    """One row after the other.

    ranks, watched: other processes than its own, and what they do; for tests.
    """
    base = None
    with scratch("bench") as home:
        for number, trial in enumerate(trials):
            row = _tried(trial, course, home / str(number), ranks, watched)
            base = base or row.found
            yield row_json(row, base)


def _tried(
    trial: Trial,
    course: ProfileSchedule,
    home: Path,
    ranks: Pool | None,
    watched: Callable[..., Any],
) -> Row:
    if trial.made is None:
        return Row(trial)
    home.mkdir()
    try:
        with (
            nullcontext(ranks)
            if ranks
            else pool(trial.made.world_size, home / "ranks.log", _PATIENCE)
        ) as warm:
            return Row(
                trial,
                run_profile(trial.config, trial.made, course, ranks=warm, home=home, job=watched),
            )
    except SamecurveError as error:
        return Row(trial, failed=error)
