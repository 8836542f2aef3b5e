"""What each strategy, with each way of recomputing, would do on a machine one doesn't have: plan()
asked for each, and what its step would cost.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from samecurve.core.config.sections import Config, Recompute
from samecurve.core.planning.capacity import memory_room
from samecurve.core.planning.facts import Facts
from samecurve.core.planning.memory import sample_bytes
from samecurve.core.planning.plan import Plan, plan
from samecurve.core.simulation.cluster import Cluster
from samecurve.core.simulation.collectives import Traffic, traffic
from samecurve.core.simulation.step_time import StepCost, Utilization, step_cost
from samecurve.errors import UserError

MOST = 1024  # devices of the last point of a curve


@dataclass(frozen=True, kw_only=True)
class StrategyForecast:
    """One strategy.

    need: bytes of a device for one sample at once; None: activations are not known. plan None:
    refused, and why. cost None: not known (core/simulation/step_time.py).
    """

    name: str
    shards: int
    recompute: Recompute
    need: int | None
    room: int
    plan: Plan | None
    traffic: Traffic | None
    cost: StepCost | None
    whole: bool  # one copy of the model on each device, or shared out among all
    refused: str = ""

    @property
    def held(self) -> int:
        return sum(term.bytes for term in self.plan.memory) if self.plan else 0

    @property
    def fits(self) -> bool:
        return self.need is None or self.need <= self.room

    @property
    def label(self) -> str:
        """With the devices that share a copy of the model, where they are some of them."""
        return self.name if self.whole else f"{self.name}/{self.shards}"


@dataclass(frozen=True)
class Curve:
    """Efficiency by devices. ends: why there is no point beyond the last, or none at all."""

    name: str
    points: tuple[tuple[int, float], ...]
    ends: str


def check_predictable(config: Config, setup: Cluster) -> None:
    """UserError: what is not predicted, by name."""
    where, section = "--machine", config.devices
    if config.engine != "torch":
        raise UserError(
            f"--machine predicts what engine torch sends; {config.engine} compiles its collectives"
            " into the step",
            "--engine torch, or leave --machine out",
            where,
        )
    if config.train.exact:
        raise UserError(
            "--machine does not predict --exact, whose sums go along a tree by other collectives",
            "leave one of them out",
            where,
        )
    if section.offload:
        raise UserError(
            "--machine does not predict devices.offload, whose updates are made by the host",
            "leave one of them out",
            where,
        )
    if section.balance != "even":
        raise UserError(
            "--machine predicts devices that are alike: speeds by hand (devices.balance) are of"
            " others",
            "--balance even, or leave --machine out",
            where,
        )
    if section.compress == "powersgd":
        raise UserError(
            "--machine does not predict --compress powersgd", "none, bf16 or fp16", where
        )
    if section.strategy == "dp":
        raise UserError(
            "--machine does not predict strategy dp, one process with a thread for each device",
            "--strategy ddp",
            where,
        )
    if section.sync in {"cpu", "gloo"}:
        raise UserError(
            f"--machine predicts NCCL's collectives, not sync {section.sync}",
            "--sync-backend auto",
            where,
        )
    if section.use.strip() not in {"auto", "all"}:
        raise UserError(
            f"--machine says which devices there are; devices.use {section.use} does too",
            "leave --devices and --gpus out",
            where,
        )
    if config.train.precision not in setup.device.peaks:
        raise UserError(
            f"no peak of {setup.device.name} is on file for {config.train.precision}:"
            f" {', '.join(setup.device.peaks)}",
            f"--dtype {next(iter(setup.device.peaks))}, or a JSON file with `tflops`",
            where,
        )


def plan_on_cluster(config: Config, facts: Facts, setup: Cluster) -> Plan:
    """plan() there. UserError: as train would refuse it there."""
    made = plan(config, setup.machine, facts)
    peak = setup.device.peaks.get(made.precision)
    return replace(made, peak_flops=peak * made.num_devices if peak else None)


def compare_strategies(
    config: Config, facts: Facts, setup: Cluster, share: Utilization
) -> list[StrategyForecast]:
    """Every strategy with every way of recomputing; just the config's, where what recomputing saves
    is not known.
    """
    ways: tuple[Recompute, ...] = (
        ("none", "selective", "block") if facts.recompute_bytes else (config.train.recompute,)
    )
    return [
        _row(_with(candidate, how), facts, setup, share, name, shards)
        for name, candidate, shards in _candidates(config, setup)
        for how in ways
    ]


def scaling_curves(config: Config, facts: Facts, setup: Cluster, share: Utilization) -> list[Curve]:
    """From one device to MOST, the batch as plan() has it there: fixed, or growing with the
    devices.
    """
    sizes = setup.sizes(MOST)
    points: dict[str, list[tuple[int, float]]] = {
        name: [] for name, _, _ in _candidates(config, setup.of(sizes[-1]), single=False)
    }
    why: dict[str, str] = {}
    for size in sizes:
        there = setup.of(size)
        for name, candidate, shards in _candidates(config, there, single=False):
            row = _row(candidate, facts, there, share, name, shards)
            why[name] = row.refused
            if row.plan and row.plan.global_batch_size < size:
                why[name] = (
                    f"a batch of {row.plan.global_batch_size} has no work for {size} devices"
                )
            elif row.cost:
                points[name].append((size, row.cost.efficiency))
    return [Curve(name, tuple(reached), why[name]) for name, reached in points.items()]


def _candidates(
    config: Config, setup: Cluster, single: bool = True
) -> Iterator[tuple[str, Config, int]]:
    """(name, config, shards).

    hsdp shares a copy of the model among a host's devices where there are several hosts, unless the
    config says how many.
    """
    world = setup.num_devices
    if world == 1 and single:
        yield "single", _of(config, strategy="auto", shards=None), 1
        return
    yield "ddp", _of(config, strategy="ddp", shards=None), 1
    groups = config.devices.shards or (
        setup.devices_per_host
        if setup.hosts > 1
        else max((count for count in range(2, world) if world % count == 0), default=0)
    )
    if groups > 1:
        yield "hsdp", _of(config, strategy="hsdp", shards=groups), groups
    yield "fsdp", _of(config, strategy="fsdp", shards=None), world


def _of(config: Config, **section: object) -> Config:
    return config.model_copy(update={"devices": config.devices.model_copy(update=section)})


def _with(config: Config, how: Recompute) -> Config:
    return config.model_copy(update={"train": config.train.model_copy(update={"recompute": how})})


def _row(
    config: Config, facts: Facts, setup: Cluster, share: Utilization, name: str, shards: int
) -> StrategyForecast:
    machine, each = setup.machine, sample_bytes(config, facts)
    terms, left = memory_room(config, facts, machine.devices * machine.hosts, shards)
    held = sum(term.bytes for term in terms)
    need, usable, whole = (
        None if each is None else held + each,
        held + int(left),
        shards in {1, setup.num_devices},
    )
    try:
        made = plan_on_cluster(config, facts, setup)
    except UserError as error:
        return StrategyForecast(
            name=name,
            shards=shards,
            recompute=config.train.recompute,
            need=need,
            room=usable,
            plan=None,
            traffic=None,
            cost=None,
            whole=whole,
            refused=error.cause,
        )
    return StrategyForecast(
        name=name,
        shards=shards,
        recompute=config.train.recompute,
        need=need,
        room=usable,
        plan=made,
        traffic=traffic(made, facts, setup),
        cost=step_cost(config, made, facts, setup, share),
        whole=whole,
    )
