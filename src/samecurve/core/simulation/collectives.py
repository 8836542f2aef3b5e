"""What passes between devices in one optimizer step, and how long it takes: bytes counted as
torch_engine sends them, time by NCCL's own model.

Bytes: fully_shard cuts a parameter along its first dimension into equal parts, so what it gathers
is padded to a multiple of the shards; held against torch's collectives in
tests/torch_engine/test_traffic.py. Time: alpha + beta (Hockney 1994; Thakur et al. 2005,
"Optimization of collective communication operations in MPICH") for rings and trees under each of
NCCL's protocols, the fastest taken, as NCCL chooses (src/graph/tuning.cc at b647562: latencies,
shares of the bandwidth, steps).
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Literal

from samecurve.core.planning.facts import Facts
from samecurve.core.planning.memory import itemsize
from samecurve.core.planning.plan import Plan
from samecurve.core.simulation.cluster import Cluster
from samecurve.core.simulation.hardware import Medium

Kind = Literal["all-reduce", "all-gather", "reduce-scatter"]
BUCKET = 25 << 20  # bytes of gradients that DistributedDataParallel reduces at once, its default
_FIGURES, _BY_DEVICE = (
    6,
    3,
)  # numbers of 8 bytes: two sums and four requests; two waits and a peak of memory
_COMPRESSED = {"bf16": 2, "fp16": 2}
_US = 1e-6

# Microseconds, by protocol (LL, LL128, Simple): before anything is sent, and for each step over a
# medium.
_BASE = {"ring": (6.6, 14.0, 8.4), "tree": (6.8, 14.0, 0.0)}
_STEP: Mapping[str, Mapping[Medium, tuple[float, float, float]]] = {
    "ring": {"nvlink": (0.6, 1.9, 3.4), "pcie": (1.0, 2.5, 5.7), "network": (2.7, 4.0, 14.0)},
    "tree": {"nvlink": (0.6, 1.25, 28.0), "pcie": (1.0, 1.9, 28.0), "network": (5.0, 8.5, 28.0)},
}
_LL_MOST = (
    87.7e9,
    22.5e9,
    19.0e9,
)  # bytes a second over 1, 2, more hosts (Ampere and later; AMD hosts)


@dataclass(frozen=True, kw_only=True)
class Group:
    """Devices that add up or gather together, on so many hosts.

    bandwidth: bytes a second, one way, of each: the narrower of the wire within a host and its
    devices' way out of it.
    """

    members: int
    hosts: int
    inside: Medium
    bandwidth: float


@dataclass(frozen=True, kw_only=True)
class Collective:
    """kind, of what.

    payload: bytes of the whole buffer (what all-reduce and reduce-scatter take in, what all-gather
    gives). messages: how many such buffers in a step, over which group.
    """

    kind: Kind
    what: str
    payload: float
    messages: int
    group: Group

    @property
    def sent(self) -> float:
        """Bytes that each device sends in a step: those of a ring, the least there can be."""
        share = (self.group.members - 1) / self.group.members
        return self.messages * self.payload * share * (2 if self.kind == "all-reduce" else 1)

    @property
    def each(self) -> float:
        """Seconds of one message."""
        return seconds(self.kind, self.payload, self.group)

    @property
    def seconds(self) -> float:
        return self.messages * self.each


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """Of one step.

    reduced: gradients of a device that holds all of them, in buckets. gathered, scattered: of a
    block; copied: summed over copies of the model, in the last round; outside: of what lies outside
    of blocks. figures: what the journal's line of a step is made of.
    """

    reduced: tuple[Collective, ...] = ()
    gathered: tuple[Collective, ...] = ()
    scattered: tuple[Collective, ...] = ()
    gathered_outside: tuple[Collective, ...] = ()
    scattered_outside: tuple[Collective, ...] = ()
    copied: tuple[Collective, ...] = ()
    copied_outside: tuple[Collective, ...] = ()
    figures: tuple[Collective, ...] = ()

    @property
    def all(self) -> tuple[Collective, ...]:
        return (
            self.figures
            + self.reduced
            + self.gathered
            + self.gathered_outside
            + self.scattered
            + self.scattered_outside
            + self.copied
            + self.copied_outside
        )

    @property
    def sent(self) -> float:
        """Bytes that a device sends."""
        return sum(part.sent for part in self.all)

    @property
    def seconds(self) -> float:
        return sum(part.seconds for part in self.all)


def traffic(plan: Plan, facts: Facts, setup: Cluster) -> Traffic:
    """plan: one made for setup.machine."""
    if plan.num_devices == 1:
        return Traffic()
    width, whole_group = itemsize(plan.precision), group(setup, plan.num_devices, 1)
    figures = (
        Collective(
            kind="all-reduce",
            what="figures of the step (loss, weights; waits, memory of each device)",
            payload=8 * (_FIGURES + _BY_DEVICE * plan.num_devices),
            messages=1,
            group=whole_group,
        ),
    )
    if plan.spec.traffic == "gradients":
        whole = facts.trainable * _COMPRESSED.get(plan.compress, width)
        buckets = math.ceil(facts.trainable * width / BUCKET)
        return Traffic(
            figures=figures,
            reduced=(
                Collective(
                    kind="all-reduce",
                    what="gradients",
                    payload=whole / buckets,
                    messages=buckets,
                    group=whole_group,
                ),
            ),
        )
    return replace(
        _sharded(plan, facts, setup, width),
        figures=(
            *figures,
            Collective(
                kind="all-reduce",
                what="norm of the gradient",
                payload=8,
                messages=1,
                group=group(setup, plan.shards, 1),
            ),
        ),
    )


def _sharded(plan: Plan, facts: Facts, setup: Cluster, width: int) -> Traffic:
    shards, copies = (
        group(setup, plan.shards, 1),
        group(setup, plan.num_devices // plan.shards, plan.shards),
    )
    narrow = 2 if plan.precision in {"bf16", "f16"} else width
    inside, rounded, blocks = (
        set(facts.block_arrays),
        set(facts.rounded) if narrow < width else set(),
        max(1, facts.blocks),
    )
    sizes = {
        name: padded(shape, plan.shards)
        for name, shape in facts.arrays.items()
        if name not in facts.buffers
    }

    def kinds(within: bool, left_out: Iterable[str] = ()) -> list[tuple[str, int, float]]:
        """(words, bytes a number as gathered, numbers) of the groups that fully_shard makes of a
        block, or of the rest.
        """
        parts = [("in two bytes", narrow, rounded), ("whole", width, sizes.keys() - rounded)]
        found = [
            (
                words,
                item,
                sum(
                    sizes[name]
                    for name in (names & sizes.keys()) - set(left_out)
                    if (name in inside) == within
                ),
            )
            for words, item, names in parts
        ]
        return [
            (words, item, numbers / blocks if within else numbers)
            for words, item, numbers in found
            if numbers
        ]

    def gathers(within: bool, times: int) -> tuple[Collective, ...]:
        return tuple(
            Collective(
                kind="all-gather",
                what=f"weights {'of a block' if within else 'outside of blocks'}, {words}",
                payload=numbers * item,
                messages=times,
                group=shards,
            )
            for words, item, numbers in kinds(within)
        )

    def sums(
        within: bool, times: int, kind: Kind, over: Group, part: int
    ) -> tuple[Collective, ...]:
        return tuple(
            Collective(
                kind=kind,
                what=f"gradients {'of a block' if within else 'outside of blocks'}",
                payload=numbers * width / part,
                messages=times,
                group=over,
            )
            for _, _, numbers in kinds(within, facts.frozen)
        )

    rounds = plan.accumulation_steps
    return Traffic(
        gathered=gathers(True, rounds * blocks * (2 if plan.reshard else 1)) if inside else (),
        gathered_outside=gathers(False, rounds),
        scattered=sums(True, rounds * blocks, "reduce-scatter", shards, 1) if inside else (),
        scattered_outside=sums(False, rounds, "reduce-scatter", shards, 1),
        copied=(
            sums(True, blocks, "all-reduce", copies, plan.shards)
            if inside and copies.members > 1
            else ()
        ),
        copied_outside=(
            sums(False, 1, "all-reduce", copies, plan.shards) if copies.members > 1 else ()
        ),
    )


def padded(shape: tuple[int, ...], shards: int) -> int:
    """Numbers of a parameter whose first dimension is rounded up to a multiple of the shards."""
    return -(-shape[0] // shards) * shards * math.prod(shape[1:]) if shape else shards


def group(setup: Cluster, members: int, apart: int) -> Group:
    """Every `apart`-th device, so many of them.

    Groups that leave a host side by side share its ways out: each has those of its own devices.
    """
    here = max(1, min(members, setup.devices_per_host // apart))  # of them on one host
    hosts = -(-members // here)
    if hosts == 1:
        return Group(
            members=members, hosts=1, inside=setup.inside.medium, bandwidth=setup.inside.bandwidth
        )
    out = here * setup.between.bandwidth
    return Group(
        members=members,
        hosts=hosts,
        inside=setup.inside.medium,
        bandwidth=out if here == 1 else min(setup.inside.bandwidth, out),
    )


def seconds(kind: Kind, payload: float, over: Group) -> float:
    """The fastest of what NCCL may choose."""
    if over.members == 1:
        return 0.0
    found = [_ring(kind, payload, over, protocol) for protocol in range(3)]
    if kind == "all-reduce":
        found += [_tree(payload, over, protocol) for protocol in range(3)]
    return min(found)


def _ring(kind: Kind, payload: float, over: Group, protocol: int) -> float:
    """steps x alpha + steps / members x payload / bandwidth."""
    n, hosts = over.members, over.hosts
    steps, hops = (2 * (n - 1), 2 * hosts) if kind == "all-reduce" else (n - 1, hosts - 1)
    hops = min(steps, hops) if hosts > 1 else 0
    alpha = (
        _BASE["ring"][protocol]
        + (steps - hops) * _STEP["ring"][over.inside][protocol]
        + hops * _STEP["ring"]["network"][protocol]
    )
    narrow = 1 / 3 if hosts == 1 and kind != "all-reduce" else 1 / 4
    share = (
        min(narrow, _LL_MOST[min(hosts, 3) - 1] / over.bandwidth),
        0.92 if n > hosts else 0.7,
        1.0,
    )[protocol]
    return alpha * _US + steps / n * payload / (over.bandwidth * share)


def _tree(payload: float, over: Group, protocol: int) -> float:
    """Up and down two trees that share the data: 2 payload / bandwidth.

    Sanders, Speck and Traff 2009.
    """
    alpha = _BASE["tree"][protocol] + 2 * (
        (over.members / over.hosts - 1) * _STEP["tree"][over.inside][protocol]
        + math.log2(over.hosts) * _STEP["tree"]["network"][protocol]
    )
    share = (
        0.92
        * (
            min(1 / 3.8, _LL_MOST[min(over.hosts, 3) - 1] / over.bandwidth),
            7 / 9 if over.hosts == 1 else 120 / 128,
            1.0,
        )[protocol]
    )
    return alpha * _US + 2 * payload / (over.bandwidth * share)
