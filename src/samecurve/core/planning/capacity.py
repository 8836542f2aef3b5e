"""How many samples fit in flight beside what a device holds anyway: the part of plan() that looks
at memory.
"""

from samecurve.core.config.sections import Config
from samecurve.core.planning.facts import Facts
from samecurve.core.planning.machine import Device
from samecurve.core.planning.memory import (
    USABLE,
    MemoryTerm,
    num_optimizer_states,
    sample_bytes,
    state_terms,
)
from samecurve.core.planning.strategies import Layout
from samecurve.errors import UserError
from samecurve.units import show_bytes, show_params


def memory_room(
    config: Config, facts: Facts, devices: tuple[Device, ...], shards: int, processes: int = 1
) -> tuple[list[MemoryTerm], float]:
    """What the smallest device holds besides activations, and bytes left for these.

    processes: of engine jax, which share the devices.
    """
    device = min(devices, key=lambda d: d.memory)
    terms = state_terms(
        config,
        facts,
        device.kind,
        shards,
        len(devices) // processes if config.engine == "jax" and device.kind == "cpu" else 1,
    )
    return terms, _usable(config, device) - sum(term.bytes for term in terms)


def _usable(config: Config, device: Device) -> float:
    return min(device.memory * USABLE, config.devices.memory or float("inf"))


def capacity(
    config: Config, facts: Facts, layout: Layout, because: dict[str, str]
) -> tuple[int | None, list[MemoryTerm]]:
    """Samples that fit in flight on the smallest device (None unknown), and what it holds besides."""
    device = min(layout.devices, key=lambda d: d.memory)
    terms, left = memory_room(config, facts, layout.devices, layout.shards, layout.world_size)
    held, each = sum(term.bytes for term in terms), sample_bytes(config, facts)
    usable = (
        f"{show_bytes(_usable(config, device))} to use (devices.memory)"
        if config.devices.memory
        else f"{show_bytes(device.memory)}, of which {USABLE:.0%} are planned with"
    )
    if left < (each or 0):
        raise UserError(
            f"{show_params(facts.params)} parameters with their gradients and"
            f" {num_optimizer_states(config, facts)[1]} state need {show_bytes(held + (each or 0))} on"
            f" each device under {layout.strategy}; {device.name} has {usable}",
            _smaller(config, facts, layout),
            "model",
        )
    because["memory"] = (
        f"{show_bytes(held)} held, {show_bytes(left)} left for activations; {device.name} has"
        f" {usable}"
    )
    if facts.largest_tried is not None:
        because["memory"] += f"; {facts.largest_tried} samples at once were tried and fitted"
        return facts.largest_tried, terms
    return (int(left // each) if each else None), terms


def _smaller(config: Config, facts: Facts, layout: Layout) -> str:
    """What would need less."""
    ways = []
    world, need = len(layout.devices), sample_bytes(config, facts) or 0
    if layout.shards < world and memory_room(config, facts, layout.devices, world)[1] >= need:
        ways.append("--strategy fsdp shares the state out")
    if (
        config.train.recompute == "none"
        and facts.recompute_bytes
        and memory_room(config, facts, layout.devices, layout.shards)[1]
        >= facts.recompute_bytes["block"]
    ):
        ways.append("--set train.recompute=block keeps less for backward")
    if layout.devices[0].kind == "cpu" and world > 1 and not config.devices.memory:
        ways.append("fewer ranks on this host, since they share its memory")
    return "; or ".join(
        ways or ["a smaller model, more devices with --strategy fsdp, or a device with more memory"]
    )
