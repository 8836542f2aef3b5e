"""Traffic between devices in one optimizer step, and its duration.

Bytes are those that torch_engine sends. Durations follow NCCL's own model.

Bytes: fsdp cuts a parameter along its first dimension into equal parts, so what is sent is padded
to a multiple of the shards. tests/torch_engine/test_traffic.py compares these bytes with
torch's collectives. Time: alpha + beta (Hockney 1994; Thakur et al. 2005,
"Optimization of collective communication operations in MPICH") for rings and trees under each of
NCCL's protocols, the fastest taken, as NCCL chooses (src/graph/tuning.cc at b647562: latencies,
shares of the bandwidth, steps).
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from samecurve.core.planning.hardware import Medium
from samecurve.core.planning.memory import autocast_itemsize
from samecurve.core.planning.optimizer import itemsize
from samecurve.core.strategies import BUCKET_BYTES
from samecurve.seam import Facts, Plan
from samecurve_products.lab.simulation.cluster import Cluster

Kind = Literal["all-reduce", "all-gather", "reduce-scatter"]
# numbers of 8 bytes in a step's metrics: requests; a loss sum and a weight; two waits and a peak of
# memory
_REQUESTS, _BY_MICROBATCH, _BY_DEVICE = 4, 2, 3
_US = 1e-6

# Microseconds, by protocol (LL, LL128, Simple): before anything is sent, and for each step over a
# medium.
_BASE = {"ring": (6.6, 14.0, 8.4), "tree": (6.8, 14.0, 0.0)}
_STEP: Mapping[str, Mapping[Medium, tuple[float, float, float]]] = {
    "ring": {"nvlink": (0.6, 1.9, 3.4), "pcie": (1.0, 2.5, 5.7), "network": (2.7, 4.0, 14.0)},
    "tree": {"nvlink": (0.6, 1.25, 28.0), "pcie": (1.0, 1.9, 28.0), "network": (5.0, 8.5, 28.0)},
}
# bytes a second over 1, 2, more hosts (Ampere and later; AMD hosts)
_LL_MOST = (87.7e9, 22.5e9, 19.0e9)


@dataclass(frozen=True, kw_only=True)
class Group:
    """Devices that take part in one collective."""

    members: int
    hosts: int
    inside: Medium  # medium within a host
    # bytes a second, one way, of each device: the lower of the link within a host and the links
    # from its devices to other hosts
    bandwidth: float


@dataclass(frozen=True, kw_only=True)
class Collective:
    """Messages of one kind in one step.

    role: what they are for: metrics; gradients "reduced" in buckets; weights "gathered" and
        gradients "scattered" of a block, or "gathered outside" and "scattered outside" of blocks;
        gradients "copied", and "copied outside", over copies of the model in the last round
    """

    role: str
    kind: Kind
    what: str
    # bytes of the whole buffer: input of all-reduce and reduce-scatter, output of all-gather
    payload: float
    messages: int
    group: Group

    @property
    def sent(self) -> float:
        """Bytes that each device sends in a step over a ring, which is the minimum."""
        passes = 2 if self.kind == "all-reduce" else 1
        share = (self.group.members - 1) / self.group.members
        return self.messages * self.payload * share * passes

    @property
    def each(self) -> float:
        """The seconds of one message."""
        return seconds(self.kind, self.payload, self.group)

    @property
    def seconds(self) -> float:
        return self.messages * self.each


@dataclass(frozen=True)
class Traffic:
    """Collectives of one step."""

    all: tuple[Collective, ...] = ()

    @property
    def sent(self) -> float:
        """The bytes that a device sends."""
        return sum(part.sent for part in self.all)

    @property
    def seconds(self) -> float:
        return sum(part.seconds for part in self.all)

    def seconds_of(self, role: str) -> float:
        """The seconds of all messages in a role."""
        return sum(part.seconds for part in self.all if part.role == role)

    def seconds_of_each(self, role: str) -> float:
        """The seconds of one message of each collective in a role."""
        return sum(part.each for part in self.all if part.role == role)


def traffic(plan: Plan, facts: Facts, cluster: Cluster) -> Traffic:
    """The traffic of a step. plan: a plan made for cluster.machine."""
    if plan.layout.num_devices == 1:
        return Traffic()
    width, everybody = itemsize(plan.compute.precision), group(cluster, plan.layout.num_devices, 1)
    of_loss = _BY_MICROBATCH * plan.batch.num_microbatches
    numbers = _REQUESTS + of_loss + _BY_DEVICE * plan.layout.num_devices
    metrics = Collective(
        role="metrics",
        kind="all-reduce",
        what="metrics of the step (loss, weights; waits, memory of each device)",
        payload=8 * numbers,
        messages=1,
        group=everybody,
    )
    if plan.layout.spec.traffic == "gradients":
        total = facts.trainable * plan.bytes_sent(width)
        buckets = math.ceil(facts.trainable * width / BUCKET_BYTES["cuda"])
        reduced = Collective(
            role="reduced",
            kind="all-reduce",
            what="gradients",
            payload=total / buckets,
            messages=buckets,
            group=everybody,
        )
        return Traffic((metrics, reduced))
    norm = Collective(
        role="metrics",
        kind="all-reduce",
        what="norm of the gradient",
        payload=8,
        messages=1,
        group=group(cluster, plan.layout.shards, 1),
    )
    undivided = _undivided(facts, norm.group)
    return Traffic((metrics, norm, *undivided, *_sharded_traffic(plan, facts, cluster)))


def _undivided(facts: Facts, shards: Group) -> Iterator[Collective]:
    """The gradients of parameters of one number, which the first device of a copy sums in f64."""
    arrays, left_out = facts.model.arrays, {*facts.model.frozen, *facts.model.buffers}
    count = sum(1 for name, shape in arrays.items() if not shape and name not in left_out)
    if count:
        yield Collective(
            role="metrics",
            kind="all-reduce",
            what="gradients of parameters of one number",
            payload=8 * count,
            messages=1,
            group=shards,
        )


def _sharded_traffic(plan: Plan, facts: Facts, cluster: Cluster) -> Iterator[Collective]:
    """Traffic of weights and gradients under fsdp and hsdp."""
    shards = group(cluster, plan.layout.shards, 1)
    copies = group(cluster, plan.layout.num_devices // plan.layout.shards, plan.layout.shards)
    rounds, blocks = plan.batch.accumulation_steps, max(1, facts.blocks)
    gathers = blocks  # in a round
    if plan.layout.gathers_once:
        rounds = 1
    elif plan.layout.reshards_by_block:
        gathers += blocks - 1  # the last block stays whole for the backward pass
    block = _Part(plan, facts, "of a block")
    outside = _Part(plan, facts, "outside of blocks")
    yield from block.gathers("gathered", rounds * gathers, shards)
    yield from outside.gathers("gathered outside", rounds, shards)
    yield from block.sums("scattered", rounds * blocks, shards)
    yield from outside.sums("scattered outside", rounds, shards)
    if copies.members > 1:
        yield from block.sums("copied", blocks, copies)
        yield from outside.sums("copied outside", 1, copies)


@dataclass(frozen=True)
class _Part:
    """A part of the model: one of equal blocks, or everything outside of blocks."""

    plan: Plan
    facts: Facts
    where: Literal["of a block", "outside of blocks"]

    def gathers(self, role: str, messages: int, over: Group) -> Iterator[Collective]:
        """The weights, and apart from them those that are packed, in their own type of a byte."""
        width = itemsize(self.plan.compute.precision)
        narrow = autocast_itemsize(self.plan.compute.precision)
        rounded, packed = self._rounded(), set(self.facts.quantized.packed)
        names = self._names()
        plain = {name: narrow if name in rounded else width for name in names}
        kinds = {
            "weights": {name: plain[name] for name in names if name not in packed},
            "packed weights": {name: 1 for name in names if name in packed},
        }
        for what, sizes in kinds.items():
            payload = sum(self._numbers(name) * size for name, size in sizes.items())
            if payload:
                yield Collective(
                    role=role,
                    kind="all-gather",
                    what=f"{what} {self.where}",
                    payload=payload,
                    messages=messages,
                    group=over,
                )

    def sums(self, role: str, messages: int, over: Group) -> Iterator[Collective]:
        """Collectives that sum gradients: over the copies of the model one shard of them."""
        width, of_copies = itemsize(self.plan.compute.precision), role.startswith("copied")
        frozen = self.facts.model.frozen
        numbers = sum(self._numbers(name) for name in self._names() if name not in frozen)
        if numbers:
            yield Collective(
                role=role,
                kind="all-reduce" if of_copies else "reduce-scatter",
                what=f"gradients {self.where}",
                payload=numbers * width / (self.plan.layout.shards if of_copies else 1),
                messages=messages,
                group=over,
            )

    def _numbers(self, name: str) -> float:
        """How many numbers of an array one collective moves; of a block, by block."""
        blocks = max(1, self.facts.blocks) if self.where == "of a block" else 1
        return padded(self.facts.model.arrays[name], self.plan.layout.shards) / blocks

    def _rounded(self) -> set[str]:
        compute = self.plan.compute
        is_narrow = autocast_itemsize(compute.precision) < itemsize(compute.precision)
        return set(self.facts.model.rounded) if is_narrow and compute.reducer != "tree" else set()

    def _names(self) -> list[str]:
        inside, buffers = set(self.facts.model.block_arrays), set(self.facts.model.buffers)
        in_block = self.where == "of a block"
        return [
            name
            for name in self.facts.model.arrays
            if (name in inside) == in_block and name not in buffers
        ]


def padded(shape: tuple[int, ...], shards: int) -> int:
    """The size of a parameter with its first dimension padded to a multiple of the shards."""
    if not shape:
        return shards
    return -(-shape[0] // shards) * shards * math.prod(shape[1:])


def group(cluster: Cluster, members: int, apart: int) -> Group:
    """A group of `members` devices, each `apart` from the next one.

    Several groups that leave a host at once share its links: each has those of its own devices.
    """
    here = max(1, min(members, cluster.devices_per_host // apart))  # members on one host
    hosts = -(-members // here)
    bandwidth = cluster.inside.bandwidth
    if here == 1 and hosts > 1:
        bandwidth = cluster.between.bandwidth
    elif hosts > 1:
        bandwidth = min(bandwidth, here * cluster.between.bandwidth)
    return Group(members=members, hosts=hosts, inside=cluster.inside.medium, bandwidth=bandwidth)


def seconds(kind: Kind, payload: float, over: Group) -> float:
    """The seconds of the fastest algorithm and protocol that NCCL may choose."""
    if over.members == 1:
        return 0.0
    times = [_ring(kind, payload, over, protocol) for protocol in range(3)]
    if kind == "all-reduce":
        times += [_tree(payload, over, protocol) for protocol in range(3)]
    return min(times)


def _ring(kind: Kind, payload: float, over: Group, protocol: int) -> float:
    """Seconds of a ring: steps x alpha + steps / members x payload / bandwidth."""
    n, hosts = over.members, over.hosts
    steps, hops = n - 1, hosts - 1  # all steps, and the steps that leave a host
    if kind == "all-reduce":
        steps, hops = 2 * (n - 1), 2 * hosts
    if hosts == 1:
        hops = 0
    hops = min(steps, hops)
    base, step = _BASE["ring"][protocol], _STEP["ring"]
    alpha = base + (steps - hops) * step[over.inside][protocol] + hops * step["network"][protocol]
    ll_share = 1 / 3 if hosts == 1 and kind != "all-reduce" else 1 / 4
    shares = (
        min(ll_share, _LL_MOST[min(hosts, 3) - 1] / over.bandwidth),
        0.92 if n > hosts else 0.7,
        1.0,
    )
    return alpha * _US + steps / n * payload / (over.bandwidth * shares[protocol])


def _tree(payload: float, over: Group, protocol: int) -> float:
    """Seconds of two trees that share the data, up and down: 2 payload / bandwidth.

    Sanders, Speck and Traff 2009.
    """
    alpha = _BASE["tree"][protocol] + 2 * (
        (over.members / over.hosts - 1) * _STEP["tree"][over.inside][protocol]
        + math.log2(over.hosts) * _STEP["tree"]["network"][protocol]
    )
    shares = (
        min(1 / 3.8, _LL_MOST[min(over.hosts, 3) - 1] / over.bandwidth),
        7 / 9 if over.hosts == 1 else 120 / 128,
        1.0,
    )
    return alpha * _US + 2 * payload / (over.bandwidth * (0.92 * shares[protocol]))
