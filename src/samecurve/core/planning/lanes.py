"""Lanes: the microbatches that a CPU rank of an exact run computes side by side, one on each core.

Inside an operation an exact rank has one thread, whatever the machine, since other threads add in
another order. The other cores of its share compute other microbatches. Lanes change no bit.
"""

from dataclasses import dataclass

from samecurve.core.config.sections import Devices
from samecurve.core.planning import Decision
from samecurve.core.planning.batch import BatchSplit
from samecurve.core.planning.capacity import Capacity
from samecurve.core.planning.facts import Facts
from samecurve.core.planning.layout import Layout
from samecurve.core.planning.machine import Machine
from samecurve.core.planning.memory import MemoryOptions, MemoryTerm
from samecurve.errors import NotExactError
from samecurve.units import counted

# terms of a device's peak that every lane has for itself
_OWN_TERMS = {"gradients", "copies", "scratch", "exact", "activations"}


@dataclass(frozen=True)
class Lanes:
    """How many lanes a rank has, and the terms of its memory with all of them."""

    count: int
    terms: tuple[MemoryTerm, ...]


def choose_lanes(
    section: Devices,
    options: MemoryOptions,
    facts: Facts,
    machine: Machine,
    layout: Layout,
    split: BatchSplit,
    *,
    terms: tuple[MemoryTerm, ...],
    usable: float,
    threads: int,
    must_fill: bool,
) -> Decision[Lanes]:
    """The lanes of an exact run's CPU ranks.

    terms: of one lane
    usable: bytes that the plan counts on; threads: inside an operation
    must_fill: the plan chose train.exact, which must not leave cores idle

    NotExactError: lanes can't have the cores that an ordinary run would use.
    """
    one = Lanes(1, terms)
    cores = machine.threads or machine.cores // layout.num_devices
    wanted = min(cores // threads, split.accumulation_steps)
    if section.threads or wanted < 2:
        return Decision(one)
    why, count = _why_one(options, facts, layout), wanted
    each = sum(term.bytes for term in terms if term.name in _OWN_TERMS)
    if why:
        count = 1
    else:
        free = usable - sum(term.bytes for term in terms)
        count = max(1, min(wanted, 1 + int(free // max(1, each))))
        why = "memory holds no more microbatches side by side" if count < wanted else ""
    if why and must_fill:
        idle = f"{counted(count, 'core')} of {cores} would compute"
        raise NotExactError(f"{idle}: {why}", "devices.threads=1", "devices.threads")
    reason = f"{counted(count, 'microbatch')} side by side, on {count} of {counted(cores, 'core')}"
    if why:
        reason = f"{reason}: {why}"
    elif cores // threads > wanted:
        reason += f": a rank has no more than {wanted} in a step (train.exact_devices)"
    if count == 1:
        return Decision(one, {"lanes": reason})
    formula = f"{count - 1} x {each} B: gradients, activations and sums of the other lanes"
    more = MemoryTerm("lanes", (count - 1) * each, formula)
    return Decision(Lanes(count, (*terms, more)), {"lanes": reason})


def _why_one(options: MemoryOptions, facts: Facts, layout: Layout) -> str:
    """Why a rank computes one microbatch at a time; empty: it need not."""
    if layout.shards > 1:
        return f"{layout.strategy} gathers weights for one microbatch at a time"
    if layout.num_devices > layout.world_size:
        return f"{layout.strategy} has a thread for each device"
    if facts.whole_batch:
        return "the loss looks at the whole batch"
    if facts.packed or options.offload_frozen:
        return "frozen weights would be copied"
    return ""
