"""What exact steps cost on one device of this machine, by which train.exact: measured chooses, and
auto on GPUs.

Before a run's first plan a few of its steps are timed on one device, ordinary and exact ones in
turn, in a throw-away process. Exact steps are trained twice from the same start, and must give the
same bits. What was measured does not follow from the number of devices, and is cached, so that
runs of one config on more or fewer devices of this machine are decided alike.
"""

import hashlib
import json
import shutil
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import samecurve
from samecurve.core.config.sections import Config
from samecurve.core.measurement.profile_types import ProfileSchedule, durations
from samecurve.core.planning.exact_choice import (
    MOST_COST,
    exact_candidates,
    exact_hindrance,
    is_measured,
)
from samecurve.core.planning.facts import ExactCost, Facts
from samecurve.core.planning.fixed import parse_dataclass
from samecurve.core.planning.machine import Device, Machine, choose_devices
from samecurve.core.planning.planner import plan
from samecurve.core.system.cache import cache_home
from samecurve.core.system.files import write_json
from samecurve.errors import RunError, UserError
from samecurve.experiments.profile.profile import run_profile, shorten
from samecurve.experiments.scratch import scratch
from samecurve.launch.pool import Pool, pool
from samecurve.observe.journal import read_events
from samecurve.tasks import entry_of
from samecurve.terminal import echo
from samecurve.worker.jobs.profile_job import watch_rank

_FIRST = ProfileSchedule(warm=1, timed=1, traced=0)  # shows how long a step takes
_SCHEDULE = ProfileSchedule(warm=2, timed=6, traced=0)
_OF_LONG_STEPS = ProfileSchedule(warm=1, timed=2, traced=0)
_LONG, _TOO_LONG = 1.0, 10.0  # seconds of a step
_TURNS = 2  # of ordinary and exact steps; the second exact one must repeat the first
_PATIENCE = 180.0  # seconds for the steps of one turn
_ENOUGH = 120.0  # seconds after which no other number of microbatches is tried


def with_exact_cost(
    config: Config,
    machine: Machine,
    facts: Facts,
    *,
    measures: bool,
    job: Callable[..., Any] = watch_rank,
) -> Facts:
    """Add what exact steps cost to the facts, where the plan chooses by it: cached, or measured.

    measures: what is not cached is measured now; else it stays unknown
    job: the work of a rank; tests replace it to simulate faults

    UserError: the config can't be planned.
    """
    device = choose_devices(config.devices, config.engine, machine).value[0]
    if not is_measured(config, device.kind) or exact_hindrance(config, facts):
        return facts
    plan(config, machine, facts)  # refused by name before anything is measured
    alone = replace(machine, started=1, hosts=1)
    experiment = _Experiment(_on_one_device(config, device), alone, facts)
    path = experiment.cache_path(device)
    cost = _read_cached(path)
    if cost is None and not measures:
        return facts
    if cost is None:
        where = "one CPU rank" if device.kind == "cpu" else device.place
        echo(f"exact  a few steps on {where}, to see what exactness costs there", err=True)
        cost = experiment.measure(job)
        if not cost.failure:  # which may pass, as where a GPU's memory was taken
            path.parent.mkdir(parents=True, exist_ok=True)
            write_json(path, asdict(cost))
            echo(f"exact  measured; without {path} it is measured anew", err=True)
    return replace(facts, exact_cost=cost)


def _on_one_device(config: Config, device: Device) -> Config:
    use = "cpu" if device.kind == "cpu" else str(device.index)
    alone = {"shards": None, "compress": "none", "balance": "even", "strategy": "auto"}
    return config.with_values(devices={**alone, "use": use})


@dataclass(frozen=True)
class _Turn:
    """Some steps of one kind."""

    seconds: Sequence[float]  # of the timed ones
    lines: Sequence[tuple[float | None, float | None]]  # loss and norm of all steps


@dataclass(frozen=True)
class _Experiment:
    """Steps of one config, on one device of one machine."""

    config: Config  # for one device
    machine: Machine
    facts: Facts

    def cache_path(self, device: Device) -> Path:
        """The cache file. Its name depends on everything known to affect what is measured."""
        config = self.config
        task = [
            samecurve.__version__,
            version("torch"),
            config.task,
            entry_of(config.task).code_stamp(config),
            config.model.model_dump(mode="json"),
            config.optimizer.model_dump(mode="json"),
            asdict(replace(self.facts, largest_tried=None, speeds=None, exact_cost=None)),
        ]
        computation = [
            config.batch.model_dump(mode="json"),
            config.devices.memory,
            config.devices.threads,
            config.train.precision,
            config.train.amp,
            config.train.recompute,
            config.train.compile,
            config.train.ema,
            config.train.exact_devices,
        ]
        where: list[object] = [device.kind, device.name, device.driver]
        if device.kind == "cpu":
            where += [self.machine.cores, self.machine.threads]
        key = json.dumps([task, computation, where], sort_keys=True)
        name = hashlib.sha256(key.encode()).hexdigest()[:24]
        return cache_home() / "exact-costs" / f"{name}.json"

    def measure(self, job: Callable[..., Any]) -> ExactCost:
        """Time steps in one number of microbatches after another, until one costs little."""
        try:
            with (
                scratch("exact-cost") as home,
                pool(1, home / "ranks.log", _PATIENCE) as ranks,
            ):
                return self._measure(partial(self._train, ranks=ranks, home=home, job=job))
        except (UserError, RunError) as error:
            first_line = error.cause.partition("\n")[0]
            return ExactCost(failure=f"its cost could not be measured on one device: {first_line}")

    def _measure(self, train: Callable[..., _Turn]) -> ExactCost:
        """RunError: steps take too long; and what train() raises."""
        began = time.monotonic()
        ordinary = {"exact": False}
        (seconds,) = train(ordinary, _FIRST).seconds
        if seconds > _TOO_LONG:
            raise RunError(f"a step takes {seconds:.0f} s there", "--exact asks for it")
        schedule = _OF_LONG_STEPS if seconds > _LONG else _SCHEDULE
        ratios: dict[int, float] = {}
        for number in exact_candidates(self.config):
            turns = [
                (train(ordinary, schedule), train(_exact_in(number), schedule))
                for _ in range(_TURNS)
            ]
            ordinary_turns, exact_turns = zip(*turns, strict=True)
            if failure := _difference(exact_turns):
                return ExactCost(failure=failure)
            ratios[number] = _median(exact_turns) / _median(ordinary_turns)
            if ratios[number] <= 1 + MOST_COST or time.monotonic() - began > _ENOUGH:
                break
        return ExactCost(ratios=ratios)

    def _train(
        self,
        changes: Mapping[str, Any],
        schedule: ProfileSchedule,
        *,
        ranks: Pool,
        home: Path,
        job: Callable[..., Any],
    ) -> _Turn:
        """Train some steps. changes: values of `train`

        UserError: they can't be planned; RunError: the rank failed.
        """
        config = self.config.with_values(train=changes)
        short = shorten(plan(config, self.machine, self.facts), schedule)
        profile = run_profile(config, short, schedule, ranks=ranks, home=home, job=job)
        run = home / "run"
        events = read_events(run / "journal.jsonl")
        steps = [event.values for event in events if event.kind == "step"]
        shutil.rmtree(run)
        lines = [(values["loss"], values["grad_norm"]) for values in steps]
        return _Turn(durations(profile.ranks), lines)


def _exact_in(number: int) -> dict[str, Any]:
    return {"exact": True, "exact_devices": number}


def _median(turns: Sequence[_Turn]) -> float:
    """The median of a step's seconds over all turns."""
    return statistics.median(second for turn in turns for second in turn.seconds)


def _difference(turns: Sequence[_Turn]) -> str:
    """What differs between turns of exact steps, which must give the same bits; '': nothing."""
    first, second = turns
    for number, (one, other) in enumerate(zip(first.lines, second.lines, strict=True), start=1):
        if one != other:
            return (
                f"the same exact steps gave other bits the second time (step {number}: loss and"
                f" norm {one[0]}, {one[1]}, then {other[0]}, {other[1]})"
            )
    return ""


def _read_cached(path: Path) -> ExactCost | None:
    try:
        value = json.loads(path.read_text())
        ratios = {int(number): ratio for number, ratio in value["ratios"].items()}
        return parse_dataclass(ExactCost, {**value, "ratios": ratios})
    except (OSError, ValueError, KeyError, AttributeError, TypeError):
        return None
