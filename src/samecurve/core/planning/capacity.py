"""How many samples fit in flight beside what a device holds anyway: the part of plan() that looks
at memory.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from samecurve.core.config.sections import Config
from samecurve.core.planning.decision import Decision
from samecurve.core.planning.facts import Facts
from samecurve.core.planning.layout import Layout
from samecurve.core.planning.machine import Device
from samecurve.core.planning.memory import (
    USABLE,
    MemoryTerm,
    PassingTerm,
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
        """All the time."""
        return sum(term.bytes for term in self.terms if not isinstance(term, PassingTerm))

    @property
    def left(self) -> float:
        """For activations; less than nothing if it does not even fit without any."""
        room = self.usable - self.held
        passing = [term for term in self.terms if isinstance(term, PassingTerm)]
        missing = min((room - term.bytes for term in passing), default=0.0)
        if missing < 0:
            return missing
        partly = [term for term in passing if term.absent < 1]
        return min([room, *((room - term.bytes) / (1 - term.absent) for term in partly)])

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


@dataclass(frozen=True, kw_only=True)
class _Way:
    """Another config under which a model might fit."""

    flags: str
    why: str
    config: Config
    facts: Facts
    spec: StrategySpec
    shards: int

    def bytes_needed(self, layout: Layout) -> int | None:
        """With one sample in flight; None: it does not fit either."""
        room = memory_room(
            self.config, self.facts, layout.devices, spec=self.spec, shards=self.shards
        )
        each = sample_bytes(self.config, self.facts) or 0
        return room.needed(each) if room.left >= each else None


def _what_needs_less(config: Config, facts: Facts, layout: Layout) -> str:
    """A remedy where the model does not fit: what would, with what that needs."""
    here = _Way(
        flags="", why="", config=config, facts=facts, spec=layout.spec, shards=layout.shards
    )
    num_devices = layout.num_devices
    sharded = auto_strategy(config.engine, "only a shard fits")
    ways = []
    if layout.shards < num_devices:
        shared_out = replace(
            here,
            flags=f"--strategy {sharded.name}",
            why="shares the state out",
            spec=sharded,
            shards=num_devices,
        )
        ways += _fitting(layout, [shared_out])
    ways += _fitting(layout, _recomputed(here))
    if layout.devices[0].kind == "cpu" and num_devices > 1 and not config.devices.memory:
        ways.append("fewer ranks on this host, since they share its memory")
    if not ways:
        for other in (*_smaller_optimizers(here), *_adapters(here)):
            ways += _fitting(layout, [other, *_recomputed(other)])
    if not ways:
        return (
            f"a smaller model, more devices with --strategy {sharded.name}, or a device with more"
            " memory"
        )
    return "; or ".join(ways)


def _fitting(layout: Layout, ways: Iterable[_Way]) -> list[str]:
    """The first that fits, in words, if one does."""
    for way in ways:
        needed = way.bytes_needed(layout)
        if needed is not None:
            return [f"{way.flags} {way.why} ({show_bytes(needed)})"]
    return []


def _recomputed(way: _Way) -> Iterator[_Way]:
    """With more of the blocks run again, the least first."""
    options = ("selective", "block")
    now = way.config.train.recompute
    for how in options if now == "none" else options[options.index(now) + 1 :]:
        if how in way.facts.recompute_bytes:
            train = way.config.train.model_copy(update={"recompute": how})
            yield replace(
                way,
                flags=f"{way.flags} --set train.recompute={how}".strip(),
                why=way.why or "keeps less for backward",
                config=way.config.model_copy(update={"train": train}),
            )


def _smaller_optimizers(way: _Way) -> Iterator[_Way]:
    """In place of adamw."""
    is_adamw = way.config.optimizer.name == "adamw" and not way.facts.user_optimizer
    if way.config.engine != "torch" or not is_adamw or not way.facts.arrays:
        return
    for name in ("adamw8bit", "adafactor"):
        optimizer = way.config.optimizer.model_copy(update={"name": name})
        yield replace(
            way,
            flags=f"--set optimizer.name={name}",
            why="keeps less of each parameter: another curve",
            config=way.config.model_copy(update={"optimizer": optimizer}),
        )


def _adapters(way: _Way) -> Iterator[_Way]:
    for setting, trained in way.facts.adapters.items():
        yield replace(
            way,
            flags=f"--set {setting}",
            why=f"trains {show_params(trained)} parameters beside frozen ones",
            facts=replace(way.facts, params=way.facts.params + trained, trainable=trained),
        )
