"""devices.balance: measured.

What a slot and a sample take each device, tried in throw-away processes before the run is planned,
and kept for the next time.

All devices compute at once, as in the run, by its own engine, feed and loop: a few steps in which
each takes one large slot, and a few in which it takes several small ones. The difference tells what
a slot takes from what its samples take.
"""

import hashlib
import json
import shutil
import socket
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import click

import samecurve
from samecurve.core.config.sections import Batch, Config
from samecurve.core.planning.balance import microbatch_seconds, with_even_balance
from samecurve.core.planning.facts import Facts, Speed, Speeds
from samecurve.core.planning.machine import Machine
from samecurve.core.planning.plan import Plan, plan
from samecurve.core.profile_types import ProfileSchedule, durations
from samecurve.errors import UserError
from samecurve.experiments.profile import run_profile, shorten
from samecurve.experiments.profile_text import Profile
from samecurve.experiments.scratch import scratch
from samecurve.launch.pool import Pool, pool
from samecurve.system import cache_home, write_json
from samecurve.units import join_words
from samecurve.worker.jobs.profile import watch_rank

_COURSE = ProfileSchedule(warm=2, timed=6, traced=0)
_PARTS = 4  # small slots for a large one
_PATIENCE = 1800.0  # seconds for the steps of one size


def measured(
    config: Config, machine: Machine, facts: Facts, watched: Callable[..., Any] = watch_rank
) -> Facts:
    """Facts with the devices' speeds, if the config asks for them: as they were kept, or measured
    now. watched: what a rank does, replaced only to plant slow ones. UserError: they could not be
    dealt by.
    """
    if config.devices.balance != "measured":
        return facts
    plan(
        config, machine, replace(facts, speeds=Speeds())
    )  # refused by name before anything is measured
    made, size = _trial(config, machine, facts, None, 1)
    kept = _place(config, machine, facts, made, size)
    found = _read(kept)
    if found is None:
        click.echo(
            f"balance {_COURSE.steps} steps of {size} samples at"
            f" once{f', and of {size // _parts(size)}' if size > 1 else ''}, on {made.num_devices}"
            " devices in throw-away processes",
            err=True,
        )
        with (
            scratch("balance") as home,
            pool(made.world_size, home / "ranks.log", _PATIENCE) as ranks,
        ):
            found = _measure(config, machine, facts, ranks, home, watched)
        kept.parent.mkdir(parents=True, exist_ok=True)
        write_json(kept, asdict(found))
    click.echo(
        f"balance {join_words([f'{size / seconds:.3g}' for seconds in microbatch_seconds(found, size)])}"
        f" samples/s {found.origin}; without {kept} they are measured anew",
        err=True,
    )
    return replace(facts, speeds=found)


def _measure(
    config: Config,
    machine: Machine,
    facts: Facts,
    ranks: Pool,
    home: Path,
    watched: Callable[..., Any],
) -> Speeds:
    """RunError: a rank failed."""
    large, size = _trial(config, machine, facts, None, 1)
    parts = _parts(size)
    rest, whole = _tried(config, large, ranks, home, watched)
    when = time.strftime("%Y-%m-%d %H:%M")
    if parts == 1:
        return Speeds(
            devices=tuple(Speed(0.0, seconds) for seconds in whole),
            rest=rest,
            origin=f"(measured {when})",
        )
    small, part = _trial(config, machine, facts, size // parts, parts)
    _, cut = _tried(config, small, ranks, home, watched)
    speeds = [
        _line(size, one, part, several / parts) for one, several in zip(whole, cut, strict=True)
    ]
    return Speeds(
        devices=tuple(speeds),
        rest=rest,
        origin=f"(measured {when}, microbatches of {size} and of {part})",
    )


def _parts(size: int) -> int:
    return min(_PARTS, size)


def _line(large: int, whole: float, small: int, part: float) -> Speed:
    """Through the seconds of a slot of either size.

    Noise may tilt it below what is possible: then all is the slot's, or the samples'.
    """
    each = min(max(0.0, (whole - part) / (large - small)), whole / large)
    return Speed(whole - large * each, each)


def _trial(
    config: Config, machine: Machine, facts: Facts, size: int | None, parts: int
) -> tuple[Plan, int]:
    """The config with so many slots of this size for each device (None: what an even deal gives it
    at once), and that size.
    """
    config = with_even_balance(config)
    made = plan(config, machine, facts)
    size = size or min(made.micro_batch_size, facts.samples // made.num_devices)
    if not size:
        raise UserError(
            f"devices.balance measured: {facts.samples} training samples are too few to try"
            f" {made.num_devices} devices",
            "--balance even",
            "devices.balance",
        )
    fields = {
        "batch": Batch(samples=made.num_devices * size * parts, per_device=size),
        "schedule": config.schedule.model_copy(update={"scale_lr": "none"}),
    }
    return shorten(plan(config.model_copy(update=fields), machine, facts), _COURSE), size


def _tried(
    config: Config, made: Plan, ranks: Pool, home: Path, watched: Callable[..., Any]
) -> tuple[float, list[float]]:
    """(seconds of a step beside forward and backward, those of each device's forward and backward
    in a step).
    """
    found = run_profile(
        with_even_balance(config), made, _COURSE, ranks=ranks, home=home, job=watched
    )
    shutil.rmtree(home / "run")
    own = _computing(found)
    return max(0.0, statistics.median(durations(found.ranks)) - max(own)), own


def _computing(found: Profile) -> list[float]:
    """By device: medians, since a machine may be busy with something else for a moment."""
    if found.ranks[0].steps[0].devices:
        return _medians([step.devices for step in found.ranks[0].steps])
    return [
        statistics.median(step.parts["forward"] + step.parts["backward"] for step in one.steps)
        for one in found.ranks
    ]


def _medians(rows: Sequence[Sequence[float]]) -> list[float]:
    return [statistics.median(column) for column in zip(*rows, strict=True)]


def _place(config: Config, machine: Machine, facts: Facts, made: Plan, size: int) -> Path:
    """Where speeds are kept, by what they follow from, as far as that can be told without running
    it.
    """
    task = [
        samecurve.__version__,
        config.task,
        config.engine,
        config.model.model_dump(mode="json"),
        asdict(replace(facts, largest_tried=None, speeds=None)),
    ]
    devices = [[device.kind, device.index, device.name, device.driver] for device in made.devices]
    how = [
        made.strategy,
        made.backend,
        made.precision,
        made.threads,
        made.recompute,
        made.compress,
        made.exact,
        config.optimizer.model_dump(mode="json"),
    ]
    follows = [task, socket.gethostname(), machine.cores, devices, how, size]
    return (
        cache_home()
        / "speeds"
        / f"{hashlib.sha256(json.dumps(follows, sort_keys=True).encode()).hexdigest()[:24]}.json"
    )


def _read(path: Path) -> Speeds | None:
    try:
        return Speeds.from_json(json.loads(path.read_text()))
    except (OSError, ValueError, KeyError, TypeError):
        return None
