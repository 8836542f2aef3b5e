"""devices.balance: measured.

The time that each device needs for a microbatch and for a sample is measured in throw-away
processes before the run is planned, and cached for the next time.

All devices compute at once, as in the run, with the run's own engine, feed and loop. A few steps
have one large microbatch for each device, a few have several small ones. The difference separates
the time of a microbatch from the time of its samples.
"""

import json
import shutil
import socket
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import samecurve
from samecurve.core.config.sections import Batch, Config
from samecurve.core.measurement.profile_types import ProfileSchedule, durations
from samecurve.core.planning.facts import Facts, Speed, Speeds
from samecurve.core.planning.fixed import parse_dataclass
from samecurve.core.planning.machine import Machine
from samecurve.core.planning.plan import Plan
from samecurve.core.planning.planner import plan
from samecurve.core.system import write_json
from samecurve.core.system.cache import measured_path
from samecurve.errors import UserError
from samecurve.experiments.layout_runner import with_bits_settled
from samecurve.experiments.profile.profile import run_profile, shorten
from samecurve.experiments.profile.profile_text import Profile
from samecurve.experiments.scratch import scratch
from samecurve.features.balance import balance_of, with_even_balance
from samecurve.features.balance.uneven_split import microbatch_seconds
from samecurve.launch.pool import Pool, pool
from samecurve.terminal import echo
from samecurve.units import join_words
from samecurve.worker.jobs.profile_job import watch_rank

_SCHEDULE = ProfileSchedule(warm=2, timed=6, traced=0)
_PARTS = 4  # small microbatches in place of a large one
_PATIENCE = 1800.0  # seconds for the steps of one size


def measure_speeds(
    config: Config, machine: Machine, facts: Facts, job: Callable[..., Any] = watch_rank
) -> Facts:
    """Add the devices' speeds to the facts, if the config asks for them: cached, or measured now.

    job: the work of a rank; tests replace it to simulate slow ranks

    UserError: the plan can't assign microbatches by speed.
    """
    if balance_of(config) != "measured":
        return facts
    # refused by name before anything is measured
    plan(config, machine, facts.having(speeds=Speeds()))
    config = with_bits_settled(config, machine, facts.having(speeds=Speeds()))
    experiment = _Experiment(with_even_balance(config), machine, facts)
    large, size = experiment.plan_large()
    path = _cache_path(config, machine, facts, large, size)
    speeds = _read_cached(path)
    if speeds is None:
        sizes = f"{size} samples at once"
        if size > 1:
            sizes += f", and of {size // _parts(size)}"
        echo(
            f"balance {_SCHEDULE.steps} steps of {sizes}, on {large.layout.num_devices} devices in"
            " throw-away processes",
            err=True,
        )
        with (
            scratch("balance") as home,
            pool(large.layout.world_size, home / "ranks.log", _PATIENCE) as ranks,
        ):
            speeds = experiment.measure(ranks, home, job)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, asdict(speeds))
    rates = [f"{size / seconds:.3g}" for seconds in microbatch_seconds(speeds, size)]
    echo(
        f"balance {join_words(rates)} samples/s {speeds.origin}; without {path} they are measured"
        " anew",
        err=True,
    )
    return facts.having(speeds=speeds)


@dataclass(frozen=True)
class _Experiment:
    """An experiment with one config on one machine, with microbatches of two sizes."""

    config: Config  # that assigns them evenly
    machine: Machine
    facts: Facts

    def plan_large(self) -> tuple[Plan, int]:
        """Plan one large microbatch for each device, as an even assignment has; and its size."""
        even = plan(self.config, self.machine, self.facts)
        size = min(even.micro_batch_size, self.facts.data.samples // even.num_devices)
        if not size:
            raise UserError(
                f"devices.balance measured: {self.facts.data.samples} training samples are too few"
                f" to try {even.num_devices} devices",
                "--balance even",
                "devices.balance",
            )
        return self.plan_microbatches(size, 1), size

    def plan_microbatches(self, size: int, count: int) -> Plan:
        """Plan `count` microbatches of this size for each device."""
        num_devices = plan(self.config, self.machine, self.facts).layout.num_devices
        config = self.config.with_values(
            batch=Batch(samples=num_devices * size * count, per_device=size),
            schedule={"scale_lr": "none"},
        )
        return shorten(plan(config, self.machine, self.facts), _SCHEDULE)

    def measure(self, ranks: Pool, home: Path, job: Callable[..., Any]) -> Speeds:
        """RunError: a rank failed."""
        large, size = self.plan_large()
        parts = _parts(size)
        rest, large_seconds = self._run(large, ranks, home, job)
        when = time.strftime("%Y-%m-%d %H:%M")
        if parts == 1:
            devices = tuple(Speed(0.0, seconds) for seconds in large_seconds)
            return Speeds(devices=devices, rest=rest, origin=f"(measured {when})")
        part = size // parts
        small = self.plan_microbatches(part, parts)
        _, parts_seconds = self._run(small, ranks, home, job)
        devices = tuple(
            _speed_through(size, seconds, part, all_parts / parts)
            for seconds, all_parts in zip(large_seconds, parts_seconds, strict=True)
        )
        origin = f"(measured {when}, microbatches of {size} and of {part})"
        return Speeds(devices=devices, rest=rest, origin=origin)

    def _run(
        self, plan: Plan, ranks: Pool, home: Path, job: Callable[..., Any]
    ) -> tuple[float, list[float]]:
        """Seconds of a step outside forward and backward, and each device's seconds in them."""
        profile = run_profile(self.config, plan, _SCHEDULE, ranks=ranks, home=home, job=job)
        shutil.rmtree(home / "run")
        computing = _computing_seconds(profile)
        step = statistics.median(durations(profile.ranks))
        return max(0.0, step - max(computing)), computing


def _parts(size: int) -> int:
    return min(_PARTS, size)


def _speed_through(large: int, large_seconds: float, small: int, small_seconds: float) -> Speed:
    """Fit a line to the seconds of a microbatch of either size.

    If noise makes a coefficient negative, all time is given to the other coefficient.
    """
    slope = (large_seconds - small_seconds) / (large - small)
    per_sample = min(max(0.0, slope), large_seconds / large)
    return Speed(large_seconds - large * per_sample, per_sample)


def _computing_seconds(profile: Profile) -> list[float]:
    """Seconds of each device: medians, since a machine may be busy for a moment."""
    steps = profile.ranks[0].steps
    if steps[0].devices:
        columns = zip(*(step.devices for step in steps), strict=True)
        return [statistics.median(column) for column in columns]
    return [
        statistics.median(step.parts["forward"] + step.parts["backward"] for step in rank.steps)
        for rank in profile.ranks
    ]


def _cache_path(config: Config, machine: Machine, facts: Facts, plan: Plan, size: int) -> Path:
    """The cache file of the speeds."""
    task = [
        samecurve.__version__,
        config.task,
        config.engine,
        config.model.model_dump(mode="json"),
        facts.having(largest_tried=None, speeds=None).to_json(),
    ]
    devices = [
        [device.kind, device.index, device.name, device.driver] for device in plan.layout.devices
    ]
    written = plan.to_json()
    features = {row.plan_key: written.get(row.plan_key) for row in config.named_features}
    computation = [
        plan.layout.strategy,
        plan.layout.backend,
        plan.compute.precision,
        plan.compute.threads,
        features,
        plan.compute.same_bits,
        config.optimizer.model_dump(mode="json"),
    ]
    key = [task, socket.gethostname(), machine.cores, devices, computation, size]
    return measured_path("speeds", key)


def _read_cached(path: Path) -> Speeds | None:
    try:
        return parse_dataclass(Speeds, json.loads(path.read_text()))
    except (OSError, ValueError):
        return None
