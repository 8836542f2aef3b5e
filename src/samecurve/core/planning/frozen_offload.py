"""devices.offload_frozen: where it is refused, what it moves, and what the copies should cost."""

from dataclasses import dataclass

from samecurve.core.config.section import Recompute
from samecurve.core.config.sections import Config
from samecurve.core.feature_list import why_twice
from samecurve.core.planning import Decision
from samecurve.core.planning.batch import BatchSplit
from samecurve.core.planning.facts import Facts
from samecurve.core.planning.frozen_blocks import HostBlocks, host_blocks
from samecurve.core.planning.hardware import (
    ASSUMED_MFU,
    LinkSpec,
    host_link,
    slowest_host_link,
)
from samecurve.core.planning.layout import Layout
from samecurve.core.planning.machine import Machine
from samecurve.core.planning.memory import MemoryOptions, usable_share
from samecurve.errors import UserError
from samecurve.units import counted, show_bytes, show_time

_WHERE = "devices.offload_frozen"


@dataclass(frozen=True)
class HostCopies:
    """The copies of one microbatch from host memory to one device."""

    forward: int  # bytes
    backward: int  # bytes, with those of blocks that run again

    @property
    def bytes(self) -> int:
        return self.forward + self.backward


def host_copies(host: HostBlocks, facts: Facts, recompute: Recompute, rounds: int) -> HostCopies:
    """Each block is copied once for its forward and once for its backward pass.

    A part of a block that runs again as a whole is copied for that, too: its other parts take the
    buffers before the backward pass comes to it. Some features go forward twice.

    rounds: accumulation steps
    """
    forward = 2 if rounds > 1 and why_twice(facts.features) else 1
    is_part = host.of > facts.blocks
    backward = 2 if recompute != "none" and is_part else 1
    return HostCopies(forward * host.bytes, backward * host.bytes)


def link_to_host(device: str) -> LinkSpec:
    """The link over which a device's blocks are copied. device: its name"""
    return host_link(device) or slowest_host_link()


def check_frozen_offload(config: Config, facts: Facts | None = None) -> None:
    """Refuse what frozen weights in host memory can't serve. facts: None: not known yet

    UserError: the config asks for what has not been built together with it; or the model
    has nothing that could lie in host memory.
    """
    for key in config.excluding(_WHERE):
        raise UserError(
            f"{_WHERE} with {key} is not built: it is not known what a compiler, or products in"
            " eight bits, keep of weights that come and go",
            f"leave {key} out (--set {key}=false, where a file asks for it), or {_WHERE}",
            _WHERE,
        )
    if facts is None:
        return
    if words := facts.features.get("after_step"):
        raise UserError(
            f"{_WHERE}: {words['after_step']} is called after each update and may change frozen"
            " weights, of which the device may have a copy",
            "leave it out",
            _WHERE,
        )
    if facts.model.frozen_block_params:
        return
    cause = "the plan knows of no repeated block that has frozen weights of its own"
    if facts.trainable == facts.params:
        cause = "nothing is frozen: every weight is trained, on its device"
    raise UserError(
        f"{_WHERE}: {cause}",
        "an adapter (model.adapter), which freezes the model's own weights; or leave it out",
        _WHERE,
    )


def choose_frozen_offload(
    options: MemoryOptions, facts: Facts, layout: Layout, split: BatchSplit, machine: Machine
) -> Decision[None]:
    """Say what lies in host memory, and what it should cost.

    UserError: the host's memory does not hold it.
    """
    host = host_blocks(facts, options.offload_frozen, options.itemsize)
    on_cpu = layout.devices[0].kind == "cpu"
    ranks = 1 if on_cpu else _check_room(host, options, layout, machine)
    copies = host_copies(host, facts, options.recompute, split.accumulation_steps)
    where = "host memory" if on_cpu else "pinned host memory"
    each = f" for each of {ranks} ranks of a host" if ranks > 1 else ""
    reason = (
        f"the frozen weights of {host.blocks} of {counted(host.of, 'block')} lie in {where}"
        f" ({show_bytes(host.bytes)}{each}); each block is copied to one of"
        f" {counted(host.buffers, 'buffer')} of {show_bytes(host.largest)} while the block before"
        f" it computes, {show_bytes(copies.bytes)} for a microbatch"
    )
    if not on_cpu:
        link = link_to_host(layout.devices[0].name)
        reason += (
            f": {show_time(copies.bytes / link.bandwidth)} at {link.bandwidth / 1e9:g} GB/s"
            f" ({link.name}), beside {_computing(options, facts, layout, split)}; not measured"
        )
    return Decision(None, {"offload": reason}, _warnings(host, options, on_cpu=on_cpu))


def _warnings(host: HostBlocks, options: MemoryOptions, *, on_cpu: bool) -> tuple[str, ...]:
    setting = f"{_WHERE} {options.offload_frozen:g}"
    if on_cpu:
        return (
            f"{setting}: these are CPU ranks, whose own memory is the host's: nothing is saved",
        )
    if host.saves > 0:
        return ()
    return (
        f"{setting} saves nothing: {counted(host.buffers, 'buffer')} of {show_bytes(host.largest)}"
        f" for the {show_bytes(host.bytes)} that lie in host memory",
    )


def _check_room(host: HostBlocks, options: MemoryOptions, layout: Layout, machine: Machine) -> int:
    """Return how many copies of the blocks a host holds: one for each of its processes.

    UserError: its memory does not hold them.
    """
    ranks = max(1, layout.world_size // machine.hosts)
    share = usable_share("cpu", machine.host_bytes)
    usable, needed = share * machine.host_bytes, ranks * host.bytes
    if needed <= usable:
        return ranks
    fitting = int(100 * options.offload_frozen * usable / needed) / 100
    ways = [f"--set {_WHERE}={fitting:g}"] if fitting else []
    if ranks > 1 and host.bytes <= usable:
        ways.append("--strategy dp, one process whose devices share the host's copy")
    each = f" for each of {ranks} ranks" if ranks > 1 else ""
    raise UserError(
        f"{_WHERE} {options.offload_frozen:g}: {show_bytes(host.bytes)} of frozen weights{each} are"
        f" to lie in host memory; a host has {show_bytes(machine.host_bytes)}, of which"
        f" {share:.0%} are planned with",
        "; or ".join([*ways, "leave it out"]),
        _WHERE,
    )


def _computing(options: MemoryOptions, facts: Facts, layout: Layout, split: BatchSplit) -> str:
    """The time of a microbatch's computation, in words."""
    peak = layout.devices[0].peak(options.precision)
    if facts.flops_per_sample is None or peak is None:
        return "a computation whose time is not known"
    flops = facts.flops_per_sample * split.micro_batch_size
    again = 4 / 3 if options.recompute == "block" else 1.0
    seconds = flops * again / (peak * ASSUMED_MFU)
    return f"{show_time(seconds)} of computation at {ASSUMED_MFU:.0%} of the peak"
