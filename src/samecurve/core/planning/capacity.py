"""How many samples fit in flight beside what a device holds anyway: the part of plan() that looks
at memory.
"""

from dataclasses import dataclass

from samecurve.core.config.sections import Config
from samecurve.core.planning.decision import Decision
from samecurve.core.planning.facts import Facts
from samecurve.core.planning.layout import Layout
from samecurve.core.planning.machine import Device
from samecurve.core.planning.memory import (
    USABLE,
    LateTerm,
    MemoryTerm,
    sample_bytes,
    settled,
    state_terms,
)
from samecurve.core.planning.optimizer_state import optimizer_state
from samecurve.core.planning.strategies import StrategySpec, auto_strategy
from samecurve.errors import UserError
from samecurve.units import show_bytes, show_params


@dataclass(frozen=True)
class MemoryRoom:
    """What the smallest device holds besides activations, and bytes left for these."""

    terms: list[MemoryTerm]
    usable: float

    @property
    def held(self) -> int:
        """While there are activations."""
        return sum(term.bytes for term in self.terms if not isinstance(term, LateTerm))

    @property
    def left(self) -> float:
        """For activations; less than nothing if it does not even fit once these are gone."""
        late = self.needed(0) - self.held
        room = self.usable - self.held
        return room if room >= late else room - late

    def needed(self, activations: int) -> int:
        return sum(term.bytes for term in settled(self.terms, activations)) + activations


@dataclass(frozen=True)
class Capacity:
    """How many samples fit in flight on the smallest device, and what it holds besides."""

    samples: int | None  # None: not known
    terms: list[MemoryTerm]
    was_tried: bool  # --probe-batch found it out


def memory_room(
    config: Config,
    facts: Facts,
    devices: tuple[Device, ...],
    *,
    spec: StrategySpec,
    shards: int,
    world_size: int = 1,
) -> MemoryRoom:
    """world_size: processes of engine jax, which share the devices."""
    device = _smallest(devices)
    one_process = config.engine == "jax" and device.kind == "cpu"
    terms = state_terms(
        config,
        facts,
        spec,
        kind=device.kind,
        shards=shards,
        sharing_process=len(devices) // world_size if one_process else 1,
    )
    return MemoryRoom(terms, _usable(config, device))


def _smallest(devices: tuple[Device, ...]) -> Device:
    return min(devices, key=lambda device: device.memory)


def _usable(config: Config, device: Device) -> float:
    return min(device.memory * USABLE, config.devices.memory or float("inf"))


def choose_capacity(config: Config, facts: Facts, layout: Layout) -> Decision[Capacity]:
    """UserError: not even one sample fits."""
    device = _smallest(layout.devices)
    room = memory_room(
        config,
        facts,
        layout.devices,
        spec=layout.spec,
        shards=layout.shards,
        world_size=layout.world_size,
    )
    each = sample_bytes(config, facts)
    usable = f"{show_bytes(device.memory)}, of which {USABLE:.0%} are planned with"
    if config.devices.memory:
        usable = f"{show_bytes(_usable(config, device))} to use (devices.memory)"
    if room.left < (each or 0):
        needed = show_bytes(room.needed(each or 0))
        optimizer = optimizer_state(config, facts).optimizer
        raise UserError(
            f"{show_params(facts.params)} parameters with their gradients and {optimizer} state"
            f" need {needed} on each device under {layout.strategy}; {device.name} has {usable}",
            _what_needs_less(config, facts, layout),
            "model",
        )
    reason = (
        f"{show_bytes(room.held)} held, {show_bytes(room.left)} left for activations;"
        f" {device.name} has {usable}"
    )
    tried = facts.largest_tried
    if tried is not None:
        reason += f"; {tried} samples at once were tried and fitted"
        return Decision(Capacity(tried, room.terms, was_tried=True), {"memory": reason})
    samples = None
    if each:
        samples = int(room.left // each)
    return Decision(Capacity(samples, room.terms, was_tried=False), {"memory": reason})


def _what_needs_less(config: Config, facts: Facts, layout: Layout) -> str:
    """A remedy where the model does not fit."""
    ways = []
    num_devices, needed = layout.num_devices, sample_bytes(config, facts) or 0
    sharded = auto_strategy(config.engine, "only a shard fits")
    if layout.shards < num_devices:
        room = memory_room(config, facts, layout.devices, spec=sharded, shards=num_devices)
        if room.left >= needed:
            ways.append(f"--strategy {sharded.name} shares the state out")
    if config.train.recompute == "none" and facts.recompute_bytes:
        room = memory_room(config, facts, layout.devices, spec=layout.spec, shards=layout.shards)
        if room.left >= facts.recompute_bytes["block"]:
            ways.append("--set train.recompute=block keeps less for backward")
    if layout.devices[0].kind == "cpu" and num_devices > 1 and not config.devices.memory:
        ways.append("fewer ranks on this host, since they share its memory")
    smaller = _smaller_optimizer(config, facts, layout, needed)
    if not ways and smaller:
        ways.append(f"--set optimizer.name={smaller} keeps less of each parameter: another curve")
    if not ways:
        return (
            f"a smaller model, more devices with --strategy {sharded.name}, or a device with more"
            " memory"
        )
    return "; or ".join(ways)


def _smaller_optimizer(config: Config, facts: Facts, layout: Layout, needed: int) -> str:
    """That fits where adamw does not; '': none does, or another one is trained with."""
    is_adamw = config.optimizer.name == "adamw" and not facts.user_optimizer
    if config.engine != "torch" or not is_adamw or not facts.arrays:
        return ""
    for name in ("adamw8bit", "adafactor"):
        optimizer = config.optimizer.model_copy(update={"name": name})
        smaller = config.model_copy(update={"optimizer": optimizer})
        room = memory_room(smaller, facts, layout.devices, spec=layout.spec, shards=layout.shards)
        if room.left >= needed:
            return name
    return ""
