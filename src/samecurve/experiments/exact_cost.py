"""What exact steps cost on one device of this machine, by which train.exact: measured chooses.

Before a run's first plan a few of its steps are timed on one device, ordinary and exact ones each
in a throw-away process of their own: in one process ordinary steps with several threads become
slower after exact ones. Exact steps are trained from the same start each time, and must give the
same bits. What was found does not follow from the number of devices, and is kept in the cache, so
that runs of one config on more or fewer devices of this machine are decided alike. That nothing
could be measured is kept, too, as the reason in a plan; the next run tries again.
"""

import json
import math
import shutil
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, Protocol

import samecurve
from samecurve.core.config.sections import Config
from samecurve.core.measurement.profile_types import ProfileSchedule, durations
from samecurve.core.planning.batch import with_even_balance
from samecurve.core.planning.exact_choice import (
    MOST_COST,
    exact_candidates,
    exact_hindrance,
    exact_on,
)
from samecurve.core.planning.facts import ExactCost, Facts
from samecurve.core.planning.fixed import parse_dataclass
from samecurve.core.planning.machine import Device, Machine, choose_devices
from samecurve.core.planning.plan import Plan
from samecurve.core.planning.planner import plan
from samecurve.core.system.cache import measured_path
from samecurve.core.system.files import one_at_a_time, write_json
from samecurve.errors import NotExactError, RunError, UserError
from samecurve.experiments.profile.profile import run_profile, shorten
from samecurve.experiments.scratch import scratch
from samecurve.launch.pool import Pool, pool
from samecurve.observe.journal import read_events
from samecurve.tasks import entry_of
from samecurve.terminal import echo
from samecurve.worker.jobs.profile_job import watch_rank

_FIRST = ProfileSchedule(warm=1, timed=2, traced=0)  # shows how long a step takes
_LONG, _TOO_LONG = 1.0, 10.0  # seconds of a step
_TIMED_SECONDS, _MOST_TIMED = 0.5, 50  # of steps that are timed at once, short ones
_TURNS, _MOST_TURNS = 2, 4  # of ordinary and exact steps
_SPREAD = 0.1  # between two turns; more is another program's work
_PATIENCE = 240.0  # seconds for everything, and for the steps of one turn


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
    if facts.exact_cost is not None or config.train.exact != "measured":
        return facts
    device = choose_devices(config.devices, config.engine, machine).value[0]
    if exact_hindrance(config, facts, device.kind):
        return facts
    config = with_even_balance(config)
    plan(config, machine, facts)  # refused by name before anything is measured
    if hindrance := _hindrance_here(config, machine, facts, device):
        return replace(facts, exact_cost=ExactCost(failure=hindrance))
    try:
        experiment = _Experiment.of(config, machine, facts, device)
    except UserError as refusal:
        failure = f"its cost could not be measured on one device: {refusal.cause}"
        return replace(facts, exact_cost=ExactCost(failure=failure))
    cost = experiment.read_cached()
    if measures and (cost is None or cost.failure):
        cost = experiment.measured_and_kept(job, cost)
    return replace(facts, exact_cost=cost)


def _hindrance_here(config: Config, machine: Machine, facts: Facts, device: Device) -> str:
    """What stands in the way of an exact run in the config's own layout; '': nothing."""
    number = exact_candidates(config, facts, [device])[0]
    try:
        plan(exact_on(config, number), machine, facts)
    except NotExactError as refusal:
        return refusal.reason
    except UserError as refusal:  # the ordinary plan was not refused
        return refusal.cause
    return ""


@dataclass(frozen=True)
class _Turn:
    """Some steps of one kind."""

    seconds: float  # of a step: the median of the timed ones
    lines: Sequence[tuple[float | None, float | None]]  # loss and norm of all steps


@dataclass(frozen=True)
class _Experiment:
    """Steps of one config, on one device of one machine."""

    config: Config  # for one device, ordinary steps
    ordinary: Plan
    exact: Mapping[int, tuple[Config, Plan]]  # by train.exact_devices, those that can be planned
    path: Path  # the cache file
    place: str  # where it is measured, in words

    @classmethod
    def of(cls, config: Config, machine: Machine, facts: Facts, device: Device) -> "_Experiment":
        """UserError: one device can't hold ordinary steps, or no exact ones."""
        machine = replace(machine, started=1, hosts=1)
        use = "cpu" if device.kind == "cpu" else str(device.index)
        alone = {"shards": None, "compress": "none", "strategy": "auto", "use": use}
        config = config.with_values(devices=alone, train={"exact": False})
        ordinary = plan(config, machine, facts)
        exact: dict[int, tuple[Config, Plan]] = {}
        refusals: list[UserError] = []
        for number in exact_candidates(config, facts, [device]):
            in_number = exact_on(config, number)
            try:
                exact[number] = in_number, plan(in_number, machine, facts)
            except UserError as refusal:
                refusals.append(refusal)
        if not exact:
            raise refusals[0]
        plans = [ordinary, *(one for _, one in exact.values())]
        path = _cache_path(config, machine, facts, device, plans)
        place = "one CPU rank" if device.kind == "cpu" else device.place
        return cls(config, ordinary, exact, path, place)

    def read_cached(self) -> ExactCost | None:
        try:
            value = json.loads(self.path.read_text())
            ratios = {int(number): float(ratio) for number, ratio in value["ratios"].items()}
            cost = parse_dataclass(ExactCost, {**value, "ratios": ratios})
        except (OSError, ValueError, KeyError, AttributeError, TypeError):
            return None
        is_sound = all(math.isfinite(ratio) and ratio > 0 for ratio in ratios.values())
        is_of_these = list(ratios) == list(self.exact)[: len(ratios)]
        return cost if (ratios or cost.failure) and is_sound and is_of_these else None

    def measured_and_kept(self, job: Callable[..., Any], before: ExactCost | None) -> ExactCost:
        """What is measured now, unless another start has done that meanwhile. before: was cached"""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with one_at_a_time(self.path.with_suffix(".lock")):
                meanwhile = self.read_cached()
                if meanwhile and meanwhile != before:
                    return meanwhile
                echo(
                    f"exact  a few steps on {self.place}, to see what exactness costs there",
                    err=True,
                )
                cost = self._measure(job)
                write_json(self.path, asdict(cost))
                ending = "could not be measured" if cost.failure else "measured"
                echo(f"exact  {ending}; without {self.path} it is tried anew", err=True)
                return cost
        except OSError as error:
            return ExactCost(failure=f"its cost could not be measured or kept: {error}")

    def _measure(self, job: Callable[..., Any]) -> ExactCost:
        """Time ordinary steps, then exact ones, in their own processes."""
        until = time.monotonic() + _PATIENCE
        try:
            with _trainer(job) as train:
                seconds = train(self.config, self.ordinary, _FIRST).seconds
                if seconds > _TOO_LONG:
                    raise RunError(f"a step takes {seconds:.0f} s there", "--exact asks for it")
                schedule = _schedule(seconds)
                ordinary = _take_turns(partial(train, self.config, self.ordinary, schedule), until)
            with _trainer(job) as train:
                return self._compare(_fastest(ordinary), train, schedule, until)
        except RunError as error:
            first_line = error.cause.partition("\n")[0]
            why = f"{first_line} (train.exact=measured tries again)"
            return ExactCost(failure=f"its cost could not be measured on one device: {why}")

    def _compare(
        self, ordinary_seconds: float, train: "_Train", schedule: ProfileSchedule, until: float
    ) -> ExactCost:
        """Time steps in one number of microbatches after another, until one costs little.

        until: when nothing more is to be begun

        RunError: as _take_turns() raises it.
        """
        ratios: dict[int, float] = {}
        for number, (config, exact) in self.exact.items():
            if ratios and time.monotonic() > until:
                break
            turns = _take_turns(partial(train, config, exact, schedule), until)
            if failure := _difference(turns):
                return ExactCost(failure=failure)
            ratios[number] = _fastest(turns) / ordinary_seconds
            if ratios[number] <= 1 + MOST_COST:
                break
        return ExactCost(ratios=ratios)


def _take_turns(train: Callable[[], _Turn], until: float) -> list[_Turn]:
    """Turns of the same steps, until two agree on how long one takes.

    RunError: none do, since other programs disturb; it takes too long; or train() raises it.
    """
    turns: list[_Turn] = []
    while len(turns) < _TURNS or (len(turns) < _MOST_TURNS and _is_disturbed(turns)):
        if time.monotonic() > until:
            raise RunError(f"that takes more than {_PATIENCE:.0f} s", "--exact asks for it")
        turns.append(train())
    if _is_disturbed(turns):
        raise RunError("other programs wanted its time", "--exact asks for it")
    return turns


def _cache_path(
    config: Config, machine: Machine, facts: Facts, device: Device, plans: Sequence[Plan]
) -> Path:
    """The cache file. plans: those whose steps are timed"""
    task = [
        samecurve.__version__,
        version("torch"),
        config.task,
        entry_of(config.task).code_stamp(config),
        config.model.model_dump(mode="json"),
        config.optimizer.model_dump(mode="json"),
        asdict(replace(facts, largest_tried=None, speeds=None, exact_cost=None)),
    ]
    computation = [
        config.batch.model_dump(mode="json"),
        [config.devices.offload, config.devices.offload_frozen],
        [asdict(one.compute) for one in plans],
        [one.batch.micro_batch_size for one in plans],
    ]
    where: list[object] = [device.kind, device.name, device.driver]
    if device.kind == "cpu":
        where += [machine.cores, machine.threads]
    return measured_path("exact-costs", [task, computation, where])


class _Train(Protocol):
    """Trains some steps of a plan."""

    def __call__(self, config: Config, whole: Plan, schedule: ProfileSchedule, /) -> _Turn: ...


@contextmanager
def _trainer(job: Callable[..., Any]) -> Iterator[_Train]:
    """Train in a process that ends with the block."""
    with scratch("exact-cost") as home, pool(1, home / "ranks.log", _PATIENCE) as ranks:
        yield partial(_train, ranks=ranks, home=home, job=job)


def _train(
    config: Config,
    whole: Plan,
    schedule: ProfileSchedule,
    *,
    ranks: Pool,
    home: Path,
    job: Callable[..., Any],
) -> _Turn:
    """Train some steps of a plan. RunError: the rank failed."""
    plan = shorten(whole, schedule)
    profile = run_profile(config, plan, schedule, ranks=ranks, home=home, job=job)
    run = home / "run"
    steps = [one.values for one in read_events(run / "journal.jsonl") if one.kind == "step"]
    shutil.rmtree(run)
    lines = [(values["loss"], values["grad_norm"]) for values in steps]
    return _Turn(statistics.median(durations(profile.ranks)), lines)


def _schedule(seconds: float) -> ProfileSchedule:
    """The steps of a turn. seconds: of a step"""
    if seconds > _LONG:
        return ProfileSchedule(warm=1, timed=2, traced=0)
    timed = min(max(6, round(_TIMED_SECONDS / max(seconds, 1e-6))), _MOST_TIMED)
    return ProfileSchedule(warm=2, timed=timed, traced=0)


def _fastest(turns: Sequence[_Turn]) -> float:
    """Seconds of a step in the fastest turn: what other programs did to others does not count."""
    return min(turn.seconds for turn in turns)


def _is_disturbed(turns: Sequence[_Turn]) -> bool:
    """Whether no second turn has come near the fastest."""
    fastest, second, *_ = sorted(turn.seconds for turn in turns)
    return second > fastest * (1 + _SPREAD)


def _difference(turns: Sequence[_Turn]) -> str:
    """What differs between turns of exact steps, which must give the same bits; '': nothing."""
    first = turns[0]
    for later in turns[1:]:
        for number, (one, other) in enumerate(zip(first.lines, later.lines, strict=False), start=1):
            if one != other:
                return (
                    f"the same exact steps gave other bits another time (step {number}: loss and"
                    f" norm {one[0]}, {one[1]}, then {other[0]}, {other[1]})"
                )
    return ""
