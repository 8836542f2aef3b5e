"""Seconds of one optimizer step on a machine one doesn't have, each part with its formula.

A step consists of computation, the update, and communication that computation does not hide.
"""

from dataclasses import dataclass

from samecurve.core.feature_list import why_twice
from samecurve.core.planning.hardware import ASSUMED_MFU
from samecurve.core.planning.memory import memory_options
from samecurve.core.planning.optimizer import itemsize, optimizer_state
from samecurve.seam import Config, Facts, Plan, counted, show_bytes, show_count, show_time
from samecurve_products.lab.simulation.cluster import Cluster
from samecurve_products.lab.simulation.collectives import Traffic, traffic


@dataclass(frozen=True)
class Utilization:
    """The share of its peak FLOP/s that a device attains while it computes."""

    value: float  # of its peak
    source: str  # source of the number


ASSUMED = Utilization(
    ASSUMED_MFU,
    "assumed; decoders of 3 to 30 billion parameters reach 0.36 to 0.46 on H100, 0.51 to 0.64 on"
    " A100 (sequences up to 4096; llm-foundry, scripts/train/benchmarking/README.md), small ones"
    " less; --mfu N or --from BENCH.json says better",
)


@dataclass(frozen=True, kw_only=True)
class StepCost:
    """The seconds of a step, and their parts."""

    seconds: float
    compute: float
    update: float
    exposed: float  # communication that computation does not hide
    efficiency: (
        float  # speed-up over one such device with the same step, divided by the number of devices
    )
    mfu: float  # model FLOPs of the step over the devices' peak
    traffic: Traffic
    formulas: dict[str, str]  # by the name of the number
    copies: float = 0.0  # from host memory, not hidden by computation


@dataclass(frozen=True)
class _RoundTime:
    """Seconds of one microbatch on one device."""

    forward: float
    recompute: float  # forward of blocks that run again in the backward pass
    first_pass: float  # forward for features of the whole batch, before any backward pass

    @property
    def backward(self) -> float:
        return 2 * self.forward + self.recompute

    @property
    def total(self) -> float:
        return 3 * self.forward + self.recompute + self.first_pass


def step_cost(
    config: Config, plan: Plan, facts: Facts, cluster: Cluster, utilization: Utilization
) -> StepCost | None:
    """The cost of one step.

    plan: a plan made for cluster.machine

    None: the FLOPs of a sample or the device's peak are unknown.
    """
    peak = cluster.device.peaks.get(plan.compute.precision)
    if facts.flops_per_sample is None or peak is None:
        return None
    micro, global_batch_size = plan.batch.micro_batch_size, plan.batch.global_batch_size
    one_round = _round_time(plan, micro * facts.flops_per_sample / 3 / (peak * utilization.value))
    compute = _busiest(plan) / micro * one_round.total
    sent = traffic(plan, facts, cluster)
    if plan.layout.spec.traffic == "weights and gradients" and plan.layout.shards > 1:
        exposed, hidden = _expose_sharded(sent, facts.blocks, plan, one_round)
    else:
        exposed, hidden = _expose_reduced(sent, one_round)
    metrics = sent.seconds_of("metrics")
    update, touched = _update(config, plan, facts, cluster, plan.layout.shards)
    copies, copying = _expose_copies(config, plan, facts, cluster, one_round)
    seconds = compute + update + exposed + metrics + copies
    alone_update, _ = _update(config, plan, facts, cluster, 1)
    alone = global_batch_size / micro * one_round.total + alone_update
    flops, used = facts.flops_per_sample, utilization
    computing, of_peak = _compute_formulas(plan, flops, peak, utilization=used, one_round=one_round)
    return StepCost(
        seconds=seconds,
        compute=compute,
        update=update,
        exposed=exposed + metrics,
        efficiency=alone / plan.layout.num_devices / seconds,
        mfu=flops * global_batch_size / (seconds * plan.layout.num_devices * peak),
        traffic=sent,
        copies=copies,
        formulas={
            "compute": computing,
            "update": f"{touched} / {cluster.device.bandwidth / 1e12:.3g} TB/s of memory",
            "sync": hidden,
            "efficiency": (
                f"speed-up over one such device that takes the same {global_batch_size} samples a"
                f" step, with memory for all of it ({show_time(alone)}), /"
                f" {plan.layout.num_devices} devices"
            ),
            "mfu": of_peak,
            **({"copies": copying} if copying else {}),
        },
    )


def _round_time(plan: Plan, forward: float) -> _RoundTime:
    """The seconds of a microbatch on one device. forward: seconds of its forward pass."""
    goes_twice = plan.batch.accumulation_steps > 1 and why_twice(plan.features)
    return _RoundTime(
        forward,
        recompute=plan.rerun_share * forward,
        first_pass=forward if goes_twice else 0.0,
    )


def _compute_formulas(
    plan: Plan,
    flops_per_sample: float,
    peak: float,
    *,
    utilization: Utilization,
    one_round: _RoundTime,
) -> tuple[str, str]:
    """The formulas of the computing time and of the MFU."""
    flops, peak_flops = show_count(flops_per_sample), show_count(peak)
    rounds = counted(plan.batch.accumulation_steps, "round")
    computing = (
        f"{_busiest(plan)} samples of the busiest device, in {rounds}, x {flops}FLOP /"
        f" ({peak_flops}FLOP/s of {plan.compute.precision} x {utilization.value:.3g})"
    )
    if one_round.recompute:
        computing += "; blocks run forward again: x 4/3"
    if one_round.first_pass:
        computing += "; features of the whole batch come first: a forward pass more"
    of_peak = (
        f"{flops}FLOP x {plan.batch.global_batch_size} samples / (a step x"
        f" {plan.layout.num_devices} x {peak_flops}FLOP/s)"
    )
    return f"{computing}; forward is a third", of_peak


def _busiest(plan: Plan) -> int:
    """The samples of the busiest device in a step.

    The last device has the short microbatch; it is the busiest if no other has as many.
    """
    micro, num_devices = plan.batch.micro_batch_size, plan.layout.num_devices
    global_batch_size = plan.batch.global_batch_size
    count = -(-global_batch_size // micro)
    if num_devices == 1 or count % num_devices == 1:
        return global_batch_size - micro * (count * (num_devices - 1) // num_devices)
    return plan.batch.accumulation_steps * micro


def _update(
    config: Config, plan: Plan, facts: Facts, cluster: Cluster, shards: int
) -> tuple[float, str]:
    """The time of the update: (seconds, the bytes in words).

    Weights are read and written, gradients read; each array of the optimizer's state is read and
    written; the norm reads gradients, clipping reads and writes them.
    """
    state = optimizer_state(config.optimizer, plan.compute.precision, facts)
    trained_bytes = facts.trainable * itemsize(plan.compute.precision)
    passes, by = 3 + 2 * state.bytes / trained_bytes + 1, f"{state.optimizer}, norm"
    if config.optimizer.clip:
        passes, by = passes + 2, f"{by}, clipping"
    array_bytes = trained_bytes / shards
    words = f"{passes:.3g} passes ({by}) over {show_bytes(array_bytes)}"
    if shards > 1:
        words += f" ({shards} shards)"
    return passes * array_bytes / cluster.device.bandwidth, words


def _expose_copies(
    config: Config, plan: Plan, facts: Facts, cluster: Cluster, one_round: _RoundTime
) -> tuple[float, str]:
    """Exposed copies of weights from host memory: (seconds, formula).

    A block is copied while the block before it computes; nothing computes ahead of the first one.
    """
    rounds, link = plan.batch.accumulation_steps, cluster.device.host
    options = memory_options(config, plan.compute.precision, "cuda", brought=facts.features)
    found = (feature.host_copies(options, facts, rounds) for feature in options.features)
    copies = next((one for one in found if one), None)
    if copies is None:
        return 0.0, ""
    forward, backward = copies.forward / link.bandwidth, copies.backward / link.bandwidth
    first = copies.first / link.bandwidth
    each = (
        max(0.0, forward - one_round.forward - one_round.first_pass)
        + max(0.0, backward - one_round.backward)
        + first
    )
    how = (
        f"{counted(rounds, 'round')} x (max(0, {show_bytes(copies.forward)} - forward) + max(0,"
        f" {show_bytes(copies.backward)} - backward) + the first block) at"
        f" {link.bandwidth / 1e9:g} GB/s ({link.name}; {link.source})"
    )
    return rounds * each, how


def _expose_reduced(sent: Traffic, one_round: _RoundTime) -> tuple[float, str]:
    """Exposed communication of replicated models: (seconds, formula).

    Buckets are reduced during the last round's backward pass. The last bucket is ready when that
    pass ends.
    """
    all_buckets = sent.seconds_of("reduced")
    last_bucket = sent.seconds_of_each("reduced")
    how = (
        "metrics + max(all buckets - the last round's backward of"
        f" {show_time(one_round.backward)}, the last bucket)"
    )
    return max(all_buckets - one_round.backward, last_bucket), how


def _expose_sharded(
    sent: Traffic, blocks: int, plan: Plan, one_round: _RoundTime
) -> tuple[float, str]:
    """Exposed communication of sharded models: (seconds, formula).

    A block's weights are gathered while the block before it computes. Its gradients are summed
    while the next block's gradients are computed, and over copies of the model after the last
    round.
    """
    blocks = max(1, blocks)
    forward, backward = one_round.forward / blocks, one_round.backward / blocks
    gather, scatter = sent.seconds_of_each("gathered"), sent.seconds_of_each("scattered")
    gather_outside = sent.seconds_of_each("gathered outside")
    scatter_outside = sent.seconds_of_each("scattered outside")
    once, rounds = plan.layout.gathers_once, plan.batch.accumulation_steps
    gathers_again = plan.layout.reshards_by_block
    regather = gather if gathers_again else 0.0

    ahead = gather_outside + gather + (blocks - 1) * max(0.0, gather - forward)
    behind = (blocks - 1) * max(0.0, regather + scatter - backward) + scatter + scatter_outside
    copies = sent.seconds_of("copied") + sent.seconds_of("copied outside")
    seconds = (1 if once else rounds) * (ahead + behind) + copies
    again = "gathering again + " if gathers_again else ""
    with_copies = "; once a step: the sums over copies of the model" if copies else ""
    how = (
        f"metrics + {'once a step' if once else 'each round'}: weights outside of blocks + first"
        f" block + {blocks - 1} x max(0, gathering a block - its forward of {show_time(forward)}) +"
        f" {blocks - 1} x max(0, {again}scattering a block - its backward of"
        f" {show_time(backward)}) + the first block's and the outer gradients, for which nothing is"
        f" left to hide behind{with_copies}"
    )
    return seconds, how
