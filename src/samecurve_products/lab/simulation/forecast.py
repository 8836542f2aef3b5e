"""Forecasts for a machine one doesn't have: each strategy with each setting of train.recompute.

plan() plans each combination, and the cost of its step is estimated.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from samecurve.core.planning.capacity import memory_room
from samecurve.core.planning.memory import memory_options, sample_bytes
from samecurve.core.planning.planner import plan
from samecurve.core.strategies import STRATEGIES, StrategySpec, auto_strategy
from samecurve.errors import ASK_SAME_BITS
from samecurve.seam import Config, Facts, Plan, UserError, strategies_of
from samecurve_products.lab.simulation.cluster import Cluster
from samecurve_products.lab.simulation.collectives import Traffic, traffic
from samecurve_products.lab.simulation.step_time import StepCost, Utilization, step_cost

MOST = 1024  # devices of the last point of a curve
_WHERE = "--machine"  # the flag that a UserError names
_BY_SHARDING = ("none", "groups", "all devices")  # the order of a table's rows


@dataclass(frozen=True, kw_only=True)
class StrategyForecast:
    """The forecast of one strategy."""

    name: str
    shards: int
    recompute: str
    need: int | None  # bytes of a device with one sample at once; None: activations are unknown
    room: int  # usable bytes of a device
    whole: bool  # one copy of the model on each device, or one copy shared among all devices
    plan: Plan | None = None  # None: refused
    traffic: Traffic | None = None
    cost: StepCost | None = None  # None: unknown (simulation/step_time.py)
    refused: str = ""  # why

    @property
    def held(self) -> int:
        """Bytes that a device holds; 0: the strategy is refused."""
        if self.plan is None:
            return 0
        return sum(term.bytes for term in self.plan.memory)

    @property
    def fits(self) -> bool:
        return self.need is None or self.need <= self.room

    @property
    def label(self) -> str:
        """The name, with the size of the groups that share a copy of the model."""
        if self.whole:
            return self.name
        return f"{self.name}/{self.shards}"


@dataclass(frozen=True)
class Curve:
    """Efficiency by number of devices."""

    name: str
    points: tuple[tuple[int, float], ...]
    ends: str  # why there are no further points


@dataclass(frozen=True)
class _Setting:
    """Values that all strategies of a table share."""

    facts: Facts
    cluster: Cluster
    utilization: Utilization


def check_predictable(config: Config, cluster: Cluster) -> None:
    """Refuse settings that are not predicted. The UserError names the setting."""
    for cause, remedy in _not_predicted(config, cluster):
        raise UserError(cause, remedy, _WHERE)


def _features_not_predicted(config: Config) -> Iterator[tuple[str, str]]:
    """The cause and the remedy for each feature that is not predicted."""
    for row in config.named_features:
        refusal = row.load().not_simulated(config)
        if refusal:
            yield refusal


def _not_predicted(config: Config, cluster: Cluster) -> Iterator[tuple[str, str]]:
    """The cause and the remedy for each setting that is not predicted."""
    section, precision = config.devices, config.train.precision
    spec = STRATEGIES.get((config.engine, section.strategy))
    if config.engine != "torch":
        yield (
            f"--machine predicts what engine torch sends; {config.engine} compiles its collectives"
            " into the step",
            "--engine torch, or leave --machine out",
        )
    if config.train.asks_same_bits:
        yield (
            f"--machine does not predict {ASK_SAME_BITS}, whose sums go along a tree by other"
            " collectives",
            "leave one of them out",
        )
    yield from _features_not_predicted(config)
    if spec and spec.traffic is None:
        yield (
            f"--machine does not predict strategy {spec.name}, {spec.summary}",
            f"--strategy {auto_strategy(config.engine, 'the model fits').name}",
        )
    if section.sync in {"cpu", "gloo"}:
        yield (
            f"--machine predicts NCCL's collectives, not sync {section.sync}",
            "--sync-backend auto",
        )
    if section.use.strip() not in {"auto", "all"}:
        yield (
            f"--machine says which devices there are; devices.use {section.use} does too",
            "leave --devices and --gpus out",
        )
    peaks = list(cluster.device.peaks)
    if precision not in peaks:
        yield (
            f"no peak of {cluster.device.name} is on file for {precision}: {', '.join(peaks)}",
            f"--dtype {peaks[0]}, or a JSON file with `tflops`",
        )


def plan_on_cluster(config: Config, facts: Facts, cluster: Cluster) -> Plan:
    """Plan for the cluster. UserError: train would refuse the config there, too."""
    planned = plan(config, cluster.machine, facts)
    peak = cluster.device.peaks.get(planned.compute.precision)
    of_all = peak * planned.layout.num_devices if peak else None
    return replace(planned, flops=replace(planned.flops, peak_flops=of_all))


def compare_strategies(
    config: Config, facts: Facts, cluster: Cluster, utilization: Utilization
) -> list[StrategyForecast]:
    """Forecast every strategy with every setting of train.recompute.

    If the savings of recomputation are unknown, only the config's own setting is used.
    """
    ways = [vars(config.train)["recompute"]]
    if facts.activations.recompute_bytes:
        ways = ["none", "selective", "block"]
    setting = _Setting(facts, cluster, utilization)
    return [
        _forecast(candidate.with_values(train={"recompute": how}), spec, shards, setting)
        for spec, candidate, shards in _candidates(config, cluster)
        for how in ways
    ]


def scaling_curves(
    config: Config, facts: Facts, cluster: Cluster, utilization: Utilization
) -> list[Curve]:
    """Curves from one device to MOST, with the batch of plan(): fixed or growing with devices."""
    sizes = cluster.sizes(MOST)
    largest = _candidates(config, cluster.of(sizes[-1]), one_device=False)
    points: dict[str, list[tuple[int, float]]] = {spec.name: [] for spec, _, _ in largest}
    ends: dict[str, str] = {}
    for size in sizes:
        there = cluster.of(size)
        setting = _Setting(facts, there, utilization)
        for spec, candidate, shards in _candidates(config, there, one_device=False):
            forecast = _forecast(candidate, spec, shards, setting)
            ends[spec.name] = forecast.refused
            if forecast.plan and forecast.plan.batch.global_batch_size < size:
                global_batch_size = forecast.plan.batch.global_batch_size
                ends[spec.name] = f"a batch of {global_batch_size} has no work for {size} devices"
            elif forecast.cost:
                points[spec.name].append((size, forecast.cost.efficiency))
    return [Curve(name, tuple(reached), ends[name]) for name, reached in points.items()]


def _candidates(
    config: Config, cluster: Cluster, *, one_device: bool = True
) -> list[tuple[StrategySpec, Config, int]]:
    """Candidates (strategy, config, shards), sorted by the devices that share a copy.

    A strategy of groups shares a copy of the model among a host's devices if there are several
    hosts, unless the config sets the number.
    """
    if cluster.num_devices == 1 and one_device:
        alone = auto_strategy(config.engine, "one device")
        return [(alone, _with_devices(config, strategy="auto", shards=None), 1)]
    candidates = []
    for spec in strategies_of(config.engine):
        if spec.traffic is None or spec.takes_one_device:
            continue
        groups = _group_size(config, cluster) if spec.sharding == "groups" else None
        if groups is not None and groups < 2:
            continue
        shards = {"none": 1, "all devices": cluster.num_devices}.get(spec.sharding, groups or 1)
        changed = _with_devices(config, strategy=spec.name, shards=groups)
        candidates.append((spec, changed, shards))
    return sorted(candidates, key=lambda candidate: _BY_SHARDING.index(candidate[0].sharding))


def _group_size(config: Config, cluster: Cluster) -> int:
    """Devices that share a copy of the model; 0: the devices can't be cut into groups."""
    if config.devices.shards:
        return config.devices.shards
    if cluster.hosts > 1:
        return cluster.devices_per_host
    num_devices = cluster.num_devices
    return max((n for n in range(2, num_devices) if num_devices % n == 0), default=0)


def _with_devices(config: Config, **section: object) -> Config:
    return config.model_copy(update={"devices": config.devices.model_copy(update=section)})


def _forecast(
    config: Config, spec: StrategySpec, shards: int, setting: _Setting
) -> StrategyForecast:
    facts, cluster = setting.facts, setting.cluster
    machine, options = cluster.machine, memory_options(config, None, "cuda", brought=facts.features)
    each = sample_bytes(options, facts)
    devices = machine.devices * machine.hosts
    room = memory_room(options, facts, devices, spec=spec, shards=shards)
    forecast = StrategyForecast(
        name=spec.name,
        shards=shards,
        recompute=options.rerun,
        need=None if each is None else room.needed(each),
        room=int(room.usable),
        whole=shards in {1, cluster.num_devices},
    )
    try:
        planned = plan_on_cluster(config, facts, cluster)
    except UserError as error:
        return replace(forecast, refused=error.cause)
    return replace(
        forecast,
        plan=planned,
        traffic=traffic(planned, facts, cluster),
        cost=step_cost(config, planned, facts, cluster, setting.utilization),
    )
