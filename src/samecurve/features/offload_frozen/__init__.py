"""devices.offload_frozen: frozen weights of blocks lie in host memory, and are copied to the device
ahead of use.
"""

from collections.abc import Sequence
from dataclasses import replace

from pydantic import Field

from samecurve.core.config import Section
from samecurve.core.config.sections import Config
from samecurve.core.events import Activity
from samecurve.core.feature import Feature, Planned
from samecurve.core.feature_list import why_twice
from samecurve.core.planning import Decision
from samecurve.core.planning.facts import Facts
from samecurve.core.planning.hardware import ASSUMED_MFU, host_link, slowest_host_link
from samecurve.core.planning.layout import Layout
from samecurve.core.planning.memory import HostCopies, MemoryOptions, MemoryTerm, Way, usable_share
from samecurve.core.strategies import StrategySpec
from samecurve.errors import UserError
from samecurve.features.offload_frozen.host_blocks import HostBlocks, host_blocks
from samecurve.units import counted, show_bytes, show_time

KEY = "devices.offload_frozen"
_SHARES = (0.25, 0.5, 0.75, 1.0)  # that a remedy tries


class OffloadFrozenFields(Section):
    """The keys of `devices`."""

    offload_frozen: float = Field(0.0, ge=0, le=1)
    """single, dp, ddp with engine torch: share of the blocks whose frozen weights (the base beneath
    an adapter) lie in host memory and are copied to the device ahead of use; same results, less
    memory, slower where the copies take longer than the computation"""


class OffloadFrozen(Feature[OffloadFrozenFields, float]):
    """The feature. Its value is the share of the blocks."""

    order = 100
    section = "devices"
    fields = OffloadFrozenFields
    value = float
    plan_off = 0.0
    is_in_each_plan = True
    banner = {"offload": "offload: "}
    remedy_order = 20
    of_some_strategies = True
    hooks = ("torch",)

    def serves(self, spec: StrategySpec) -> bool:
        return spec.engine == "torch" and spec.sharding == "none"

    def check(self, config: Config, layout: Layout | None) -> None:
        """UserError: the config asks for what has not been built together with it."""
        if layout and not self.serves(layout.spec):
            cause, remedy = f"{KEY} is for engine torch", "leave it out, or --engine torch"
            if layout.engine == "torch":
                cause = (
                    f"{KEY} is for strategies with the whole model on each device;"
                    f" {layout.strategy} shares the frozen weights out, too"
                )
                remedy = (
                    "devices.offload=true, which keeps its shards in host memory; or --strategy ddp"
                )
            raise UserError(cause, remedy, KEY)
        for key in config.excluding(KEY):
            raise UserError(
                f"{KEY} with {key} is not built: it is not known what a compiler, or products in"
                " eight bits, keep of weights that come and go",
                f"leave {key} out (--set {key}=false, where a file asks for it), or {KEY}",
                KEY,
            )

    def check_model(self, _config: Config, facts: Facts) -> None:
        """UserError: the model has nothing that could lie in host memory."""
        if facts.model.frozen_block_params:
            return
        cause = "the plan knows of no repeated block that has frozen weights of its own"
        if facts.trainable == facts.params:
            cause = "nothing is frozen: every weight is trained, on its device"
        raise UserError(
            f"{KEY}: {cause}",
            "an adapter (model.adapter), which freezes the model's own weights; or leave it out",
            KEY,
        )

    def decide(self, planned: Planned) -> Decision[float | None]:
        """What lies in host memory, and what it should cost.

        UserError: the host's memory does not hold it.
        """
        options, layout = planned.options, planned.layout
        share, host = self._share(options), self._host_blocks(options, planned.facts)
        on_cpu = layout.devices[0].kind == "cpu"
        ranks = 1 if on_cpu else _check_room(host, share, planned)
        copies = self.host_copies(options, planned.facts, planned.split.accumulation_steps)
        where = "host memory" if on_cpu else "pinned host memory"
        each = f" for each of {ranks} ranks of a host" if ranks > 1 else ""
        reason = (
            f"the frozen weights of {host.blocks} of {counted(host.of, 'block')} lie in {where}"
            f" ({show_bytes(host.bytes)}{each}); each block is copied to one of"
            f" {counted(host.buffers, 'buffer')} of {show_bytes(host.largest)} while the block"
            f" before it computes, {show_bytes(copies.bytes)} for a microbatch"
        )
        if not on_cpu:
            link = host_link(layout.devices[0].name) or slowest_host_link()
            reason += (
                f": {show_time(copies.bytes / link.bandwidth)} at {link.bandwidth / 1e9:g} GB/s"
                f" ({link.name}), beside {_computing(planned)}; not measured"
            )
        return Decision(share, {"offload": reason}, _warnings(host, share, on_cpu=on_cpu))

    def ways(self, options: MemoryOptions, facts: Facts, spec: StrategySpec) -> Sequence[Way]:
        """Larger shares."""
        excluded = any(KEY in feature.excludes for feature in options.features)
        can_be = options.kind == "cuda" and self.serves(spec) and not excluded
        if not can_be or not facts.model.frozen_block_params:
            return ()
        return [
            Way(
                {"offload_frozen": share},
                f"{KEY}={share:g}",
                "keeps frozen weights in host memory",
            )
            for share in _SHARES
            if share > self._share(options)
        ]

    def remedy(self, value: float | None, _activity: Activity) -> str:
        if value is None or value == 1:
            return ""
        return f"--set {KEY}=1 keeps all frozen blocks in host memory"

    def placed(
        self, terms: list[MemoryTerm], options: MemoryOptions, facts: Facts, spec: StrategySpec
    ) -> list[MemoryTerm]:
        """The terms without the frozen weights that lie in host memory, and with their buffers.

        A CPU rank's memory is host memory: it holds the weights and the buffers.
        """
        if not self.serves(spec):
            return terms
        host = self._host_blocks(options, facts)
        blocks = counted(host.blocks, "block")
        formula = f"{host.buffers} x {host.largest} B: the largest of {blocks} in host memory"
        buffers = MemoryTerm("buffers", host.buffers * host.largest, formula)
        moved = {"weights": host.numbers * host.width, "packed": host.packed}
        if options.kind == "cpu":
            moved = {}
        left = [
            replace(
                term,
                bytes=term.bytes - moved[term.name],
                formula=f"{term.formula} - {moved[term.name]} B in host memory",
            )
            if moved.get(term.name)
            else term
            for term in terms
        ]
        return [*left, buffers]

    def host_copies(self, options: MemoryOptions, facts: Facts, rounds: int) -> HostCopies:
        """Each block is copied once for its forward and once for its backward pass.

        A part of a block that runs again as a whole is copied for that, too: its other parts take
        the buffers before the backward pass comes to it. Some features go forward twice.
        """
        host = self._host_blocks(options, facts)
        forward = 2 if rounds > 1 and why_twice(facts.features) else 1
        is_part = host.of > facts.blocks
        backward = 2 if options.rerun != "none" and is_part else 1
        return HostCopies(forward * host.bytes, backward * host.bytes, host.largest)

    def _share(self, options: MemoryOptions) -> float:
        return self.fields_of(options.config).offload_frozen

    def _host_blocks(self, options: MemoryOptions, facts: Facts) -> HostBlocks:
        return host_blocks(facts, self._share(options), options.itemsize)


def _warnings(host: HostBlocks, share: float, *, on_cpu: bool) -> tuple[str, ...]:
    setting = f"{KEY} {share:g}"
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


def _check_room(host: HostBlocks, share: float, planned: Planned) -> int:
    """Return how many copies of the blocks a host holds: one for each of its processes.

    UserError: its memory does not hold them.
    """
    machine = planned.machine
    ranks = max(1, planned.layout.world_size // machine.hosts)
    of_host = usable_share("cpu", machine.host_bytes)
    usable, needed = of_host * machine.host_bytes, ranks * host.bytes
    if needed <= usable:
        return ranks
    fitting = int(100 * share * usable / needed) / 100
    ways = [f"--set {KEY}={fitting:g}"] if fitting else []
    if ranks > 1 and host.bytes <= usable:
        ways.append("--strategy dp, one process whose devices share the host's copy")
    each = f" for each of {ranks} ranks" if ranks > 1 else ""
    raise UserError(
        f"{KEY} {share:g}: {show_bytes(host.bytes)} of frozen weights{each} are to lie in host"
        f" memory; a host has {show_bytes(machine.host_bytes)}, of which {of_host:.0%} are planned"
        " with",
        "; or ".join([*ways, "leave it out"]),
        KEY,
    )


def _computing(planned: Planned) -> str:
    """The time of a microbatch's computation, in words."""
    facts, options = planned.facts, planned.options
    peak = planned.layout.devices[0].peak(options.precision)
    if facts.flops_per_sample is None or peak is None:
        return "a computation whose time is not known"
    flops = facts.flops_per_sample * planned.split.micro_batch_size
    again = 4 / 3 if options.rerun == "block" else 1.0
    seconds = flops * again / (peak * ASSUMED_MFU)
    return f"{show_time(seconds)} of computation at {ASSUMED_MFU:.0%} of the peak"


FEATURE = OffloadFrozen()
