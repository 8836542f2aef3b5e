"""How many samples fit into a device's memory beside weights, gradients and optimizer state."""

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, chain

from samecurve.core.feature_list import (
    ListedFeature,
    listed_and_installed,
    listed_optimizers,
    saving_memory,
    spec_of,
)
from samecurve.core.planning import Decision
from samecurve.core.planning.facts import Facts
from samecurve.core.planning.layout import Fit, FitCheck, Layout
from samecurve.core.planning.machine import Device
from samecurve.core.planning.memory import (
    MemoryOptions,
    MemoryTerm,
    PassingTerm,
    sample_bytes,
    settled,
    state_terms,
    usable_share,
)
from samecurve.core.planning.optimizer import optimizer_state
from samecurve.core.strategies import StrategySpec, auto_strategy
from samecurve.errors import UserError
from samecurve.units import show_bytes, show_params


@dataclass(frozen=True)
class MemoryRoom:
    """The memory of the smallest device: what it holds besides activations, and what is left."""

    device: Device
    terms: list[MemoryTerm]
    usable: float  # bytes

    @property
    def held(self) -> int:
        """Bytes held during the whole step."""
        return sum(term.bytes for term in self.terms if not isinstance(term, PassingTerm))

    @property
    def left(self) -> float:
        """Bytes for activations; negative if not even the terms fit."""
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
    """How many samples fit at once on the smallest device."""

    samples: int | None = None  # None: not known
    usable: float = 0.0  # bytes of that device that the plan counts on
    was_tried: bool = False  # --probe-batch measured it


def memory_room(
    options: MemoryOptions,
    facts: Facts,
    devices: tuple[Device, ...],
    *,
    spec: StrategySpec,
    shards: int,
    world_size: int = 1,
    samples: int = 1,
) -> MemoryRoom:
    """The memory of one device under a strategy, with so many samples at once.

    world_size: processes of engine jax, which share the devices.
    """
    device = min(devices, key=lambda device: device.memory)
    one_process = spec.engine == "jax" and device.kind == "cpu"
    terms = state_terms(
        options,
        facts,
        spec,
        kind=device.kind,
        shards=shards,
        samples=samples,
        sharing_process=len(devices) // world_size if one_process else 1,
    )
    usable = min(
        device.memory * usable_share(device.kind, device.memory), options.limit or float("inf")
    )
    return MemoryRoom(device, terms, usable)


def fits_on(options: MemoryOptions, facts: Facts, devices: tuple[Device, ...]) -> FitCheck:
    """The check whether one device's part of the model fits, with one sample."""

    def fits(spec: StrategySpec, shards: int) -> Fit:
        room = memory_room(options, facts, devices, spec=spec, shards=shards)
        each = sample_bytes(options, facts) or 0
        return Fit(room.left >= each, room.needed(each), room.usable)

    return fits


def room_of_layout(
    options: MemoryOptions, facts: Facts, layout: Layout, samples: int = 1
) -> MemoryRoom:
    """The memory of one device of a layout, with so many samples at once."""
    return memory_room(
        options,
        facts,
        layout.devices,
        spec=layout.spec,
        shards=layout.shards,
        world_size=layout.world_size,
        samples=samples,
    )


def choose_capacity(options: MemoryOptions, facts: Facts, layout: Layout) -> Decision[Capacity]:
    """UserError: not even one sample fits."""
    room = room_of_layout(options, facts, layout)
    device, each = room.device, sample_bytes(options, facts)
    share = usable_share(device.kind, device.memory)
    usable = f"{show_bytes(device.memory)}, and the plan uses at most {share:.0%} of it"
    if options.limit:
        usable = f"{show_bytes(room.usable)} to use (devices.memory)"
    if room.left < (each or 0):
        needed = show_bytes(room.needed(each or 0))
        optimizer = optimizer_state(options.optimizer, options.precision, facts).optimizer
        raise UserError(
            f"{show_params(facts.params)} parameters with their gradients and {optimizer} state"
            f" need {needed} on each device under {layout.strategy}; {device.name} has {usable}",
            _what_needs_less(options, facts, layout),
            "model",
        )
    samples, tried = facts.measured.largest_tried, facts.measured.largest_tried is not None
    if each and not tried:
        samples = _most_samples(options, facts, layout, each)
    room = room_of_layout(options, facts, layout, samples or 1)
    reason = (
        f"{show_bytes(room.held)} held, {show_bytes(room.left)} left for activations;"
        f" {device.name} has {usable}"
    )
    if tried:
        reason += f"; {samples} samples at once were tried and fitted"
    capacity = Capacity(samples, room.usable, was_tried=tried)
    return Decision(capacity, {"memory": reason})


def _most_samples(options: MemoryOptions, facts: Facts, layout: Layout, each: int) -> int:
    """The most samples that fit at once; at least one does. each: bytes of a sample's
    activations

    What else a device holds grows with the samples, up to a chunk of logits.
    """

    def is_too_many(samples: int) -> bool:
        return room_of_layout(options, facts, layout, samples).left < samples * each

    most = int(room_of_layout(options, facts, layout).left // each)
    return bisect_left(range(2, most + 1), True, key=is_too_many) + 1


@dataclass(frozen=True, kw_only=True)
class _Way:
    """Another configuration under which the model might fit."""

    flags: str
    why: str
    options: MemoryOptions
    facts: Facts
    spec: StrategySpec
    shards: int

    def bytes_needed(self, layout: Layout) -> int | None:
        """Bytes with one sample at once; None: this does not fit either."""
        room = memory_room(
            self.options, self.facts, layout.devices, spec=self.spec, shards=self.shards
        )
        each = sample_bytes(self.options, self.facts) or 0
        return room.needed(each) if room.left >= each else None


def _what_needs_less(options: MemoryOptions, facts: Facts, layout: Layout) -> str:
    """The remedy for a model that does not fit: what would fit, with the bytes that it needs."""
    here = _Way(
        flags="", why="", options=options, facts=facts, spec=layout.spec, shards=layout.shards
    )
    num_devices = layout.num_devices
    sharded = auto_strategy(layout.engine, "only a shard fits")
    ways = []
    if layout.shards < num_devices:
        flags = f"--strategy {sharded.name}"
        for row in options.config.named_features:
            if not row.load().serves(sharded):
                flags += f" {row.flags_off}"
        shared_out = replace(
            here, flags=flags, why="shares the state out", spec=sharded, shards=num_devices
        )
        ways += _fitting(layout, [shared_out])
        if ways and flags == f"--strategy {sharded.name}":
            ways[0] += "; --strategy auto takes what fits"
    saving = saving_memory(listed_and_installed())
    for features in accumulate([row] for row in saving):
        ways += _fitting(layout, _ways_of(here, features))
    if layout.devices[0].kind == "cpu" and num_devices > 1 and not options.limit:
        ways.append("fewer ranks on this host, since they share its memory")
    if not ways:
        for other in (*_smaller_optimizers(here), *_adapters(here)):
            more = [_ways_of(other, features) for features in accumulate([row] for row in saving)]
            ways += _fitting(layout, chain([other], *more))
    if not ways:
        return (
            f"a smaller model, more devices with --strategy {sharded.name}, or a device with more"
            " memory"
        )
    return "; or ".join(ways)


def _fitting(layout: Layout, ways: Iterable[_Way]) -> list[str]:
    """The first way that fits, in words; empty if none does."""
    for way in ways:
        needed = way.bytes_needed(layout)
        if needed is not None:
            return [f"{way.flags} {way.why} ({show_bytes(needed)})"]
    return []


def _ways_of(way: _Way, features: Sequence[ListedFeature]) -> Iterator[_Way]:
    """Ways by other values of the last feature's keys; beyond these, of the others' as well."""
    *before, row = features
    feature, here = row.load(), way
    for other in feature.ways(way.options, way.facts, way.spec):
        here = replace(
            way,
            flags=f"{way.flags} --set {other.flags}".strip(),
            why=way.why or other.why,
            options=way.options.having(feature, **{row.section: other.values}),
        )
        yield here
    if before and here is not way:
        yield from _ways_of(here, before)


def _smaller_optimizers(way: _Way) -> Iterator[_Way]:
    """Ways with an optimizer that keeps less than adamw."""
    section = way.options.optimizer
    is_adamw = section.name == "adamw" and not way.facts.updates.user_optimizer
    if way.spec.engine != "torch" or not is_adamw or not way.facts.model.arrays:
        return
    specs = [spec_of(name) for name in listed_optimizers()]
    smaller = sorted((spec.instead_of_adamw, spec.name) for spec in specs if spec.instead_of_adamw)
    for _, name in smaller:
        yield replace(
            way,
            flags=f"--set optimizer.name={name}",
            why="keeps less of each parameter: another curve",
            options=way.options.having(optimizer={"name": name}),
        )


def _adapters(way: _Way) -> Iterator[_Way]:
    """Ways that freeze the model and train adapters beside it."""
    for setting, trained in way.facts.adapters.items():
        yield replace(
            way,
            flags=f"--set {setting}",
            why=f"trains {show_params(trained)} parameters beside frozen ones",
            facts=_with_adapter(way.facts, trained),
        )


def _with_adapter(facts: Facts, trained: int) -> Facts:
    """The facts with a frozen model and an adapter of so many numbers; its blocks as if alike."""
    blocks = (facts.block_params,) * facts.blocks if facts.blocks > 1 else ()
    return facts.having(
        params=facts.params + trained,
        trainable=trained,
        frozen_block_params=blocks,
        frozen_block_packed=(0,) * len(blocks),
    )
