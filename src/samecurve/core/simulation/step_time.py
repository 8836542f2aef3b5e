"""Seconds of one optimizer step on a machine one doesn't have: computing, updating, and what of the
collectives computing doesn't hide. Each with its formula.
"""

from dataclasses import dataclass

from samecurve.core.config.sections import Config
from samecurve.core.planning.facts import Facts
from samecurve.core.planning.memory import itemsize, num_optimizer_states
from samecurve.core.planning.plan import Plan
from samecurve.core.simulation.cluster import Cluster
from samecurve.core.simulation.collectives import Collective, Traffic, traffic
from samecurve.units import show_bytes, show_count, show_time

MFU = 0.4


@dataclass(frozen=True)
class Utilization:
    """Of a device's peak, while it computes. source: where the figure comes from."""

    value: float
    source: str


ASSUMED = Utilization(
    MFU,
    "assumed; decoders of 3 to 30 billion parameters reach 0.36 to 0.46 on H100, 0.51 to 0.64 on"
    " A100 (sequences up to 4096; llm-foundry, scripts/train/benchmarking/README.md), small ones"
    " less; --mfu N or --from BENCH.json says better",
)


@dataclass(frozen=True, kw_only=True)
class StepCost:
    """Seconds of a step, and what they are made of.

    exposed: of the collectives, what nothing hides. mfu: model FLOPs of the step over the devices'
    peak. efficiency: speed-up over one such device that makes the same step, over the number of
    devices. formulas: by figure.
    """

    seconds: float
    compute: float
    update: float
    exposed: float
    efficiency: float
    mfu: float
    traffic: Traffic
    formulas: dict[str, str]


def step_cost(
    config: Config, plan: Plan, facts: Facts, setup: Cluster, share: Utilization
) -> StepCost | None:
    """plan: one made for setup.machine.

    None: what a sample costs, or what the device can do, is not known.
    """
    peak = setup.device.peaks.get(plan.precision)
    if facts.flops_per_sample is None or peak is None:
        return None
    forward = plan.micro_batch_size * facts.flops_per_sample / 3 / (peak * share.value)
    again = forward if plan.recompute == "block" else 0.0
    compute = _busiest(plan) / plan.micro_batch_size * (3 * forward + again)
    found = traffic(plan, facts, setup)
    exposed, hidden = (
        _reduced(found, 2 * forward + again)
        if plan.shards == 1
        else _shared(found, facts.blocks, plan, forward, again)
    )
    figures = sum(part.seconds for part in found.figures)
    update, touched = _update(config, plan, facts, setup)
    whole = compute + update + exposed + figures
    alone = (
        plan.global_batch_size / plan.micro_batch_size * (3 * forward + again)
        + _update(config, plan, facts, setup, 1)[0]
    )
    again_said = "; blocks run forward again: x 4/3" if again else ""
    return StepCost(
        seconds=whole,
        compute=compute,
        update=update,
        exposed=exposed + figures,
        efficiency=alone / plan.num_devices / whole,
        mfu=facts.flops_per_sample * plan.global_batch_size / (whole * plan.num_devices * peak),
        traffic=found,
        formulas={
            "compute": (
                f"{_busiest(plan)} samples of the busiest device, in {plan.accumulation_steps}"
                f" round{'s' if plan.accumulation_steps > 1 else ''}, x"
                f" {show_count(facts.flops_per_sample)}FLOP / ({show_count(peak)}FLOP/s of"
                f" {plan.precision} x {share.value:.3g}){again_said}; forward is a third"
            ),
            "update": f"{touched} / {setup.device.bandwidth / 1e12:.3g} TB/s of memory",
            "sync": hidden,
            "efficiency": (
                f"speed-up over one such device that takes the same {plan.global_batch_size} samples a step,"
                f" with memory for all of it ({show_time(alone)}), / {plan.num_devices} devices"
            ),
            "mfu": (
                f"{show_count(facts.flops_per_sample)}FLOP x {plan.global_batch_size} samples / (a step x"
                f" {plan.num_devices} x {show_count(peak)}FLOP/s)"
            ),
        },
    )


def _busiest(plan: Plan) -> int:
    """Samples of the device that has most of a step, as dealing.py deals them: the last one, which
    has the short slot, where no other has as many slots.
    """
    count = -(-plan.global_batch_size // plan.micro_batch_size)
    return (
        plan.global_batch_size
        - plan.micro_batch_size * (count * (plan.num_devices - 1) // plan.num_devices)
        if plan.num_devices == 1 or count % plan.num_devices == 1
        else plan.accumulation_steps * plan.micro_batch_size
    )


def _update(
    config: Config, plan: Plan, facts: Facts, setup: Cluster, shards: int | None = None
) -> tuple[float, str]:
    """Seconds, and the bytes in words: the weights are read and written, gradients read; each slot
    of the optimizer read and written; the norm reads, clipping reads and writes gradients.
    """
    slots, name = num_optimizer_states(config, facts)
    times = 3 + 2 * slots + 1 + (2 if config.optimizer.clip else 0)
    cut = plan.shards if shards is None else shards
    held = facts.trainable * itemsize(plan.precision) / cut
    return (
        times * held / setup.device.bandwidth,
        (
            f"{times} passes ({name}, norm{', clipping' if config.optimizer.clip else ''}) over"
            f" {show_bytes(held)}{f' ({cut} shards)' if cut > 1 else ''}"
        ),
    )


def _reduced(found: Traffic, backward: float) -> tuple[float, str]:
    """(seconds not hidden, how).

    Buckets are reduced while the last round's backward goes on; the last bucket is ready when it
    ends.
    """
    sync, last = (
        sum(part.seconds for part in found.reduced),
        sum(part.each for part in found.reduced),
    )
    return (
        max(sync - backward, last),
        (
            f"figures + max(all buckets - the last round's backward of {show_time(backward)}, the"
            " last bucket)"
        ),
    )


def _shared(
    found: Traffic, blocks: int, plan: Plan, forward: float, again: float
) -> tuple[float, str]:
    """A block's weights are gathered while the one before it computes; its gradients are summed
    while the next one's are made.
    """
    blocks = max(1, blocks)
    gather, scatter, copied = _each(found.gathered), _each(found.scattered), _each(found.copied)
    outside, scatter_outside, copied_outside = (
        _each(found.gathered_outside),
        _each(found.scattered_outside),
        _each(found.copied_outside),
    )
    regather = gather if plan.reshard else 0.0

    def exposed(copies: float, copies_outside: float) -> float:
        ahead = outside + gather + (blocks - 1) * max(0.0, gather - forward / blocks)
        behind = regather + (blocks - 1) * max(
            0.0, regather + scatter + copies - (2 * forward + again) / blocks
        )
        return ahead + behind + scatter + copies + scatter_outside + copies_outside

    how = (
        f"figures + each round: weights outside of blocks + first block + {blocks - 1} x max(0,"
        f" gathering a block - its forward of {show_time(forward / blocks)}) + {blocks - 1} x"
        f" max(0, {'gathering again + ' if plan.reshard else ''}scattering a"
        f" block{' + its copies' if copied else ''} - its backward of"
        f" {show_time((2 * forward + again) / blocks)}) +"
        f" {'the last block gathered again + ' if plan.reshard else ''}the first block's and the"
        " outer gradients, for which nothing is left to hide behind"
    )
    return (plan.accumulation_steps - 1) * exposed(0.0, 0.0) + exposed(copied, copied_outside), how


def _each(parts: tuple[Collective, ...]) -> float:
    return sum(part.each for part in parts)
