"""How the CPU ranks of an exact run use their cores: threads inside an operation, and lanes.

The number of threads changes the order in which an operation adds, so it follows from the machine
and the microbatches of a step, never from the ranks: the whole cores that each microbatch can have,
and at least one. Lanes are the microbatches that a rank computes side by side, on all the cores of
its share. They change no bit.
"""

from dataclasses import dataclass

from samecurve.core.planning import Decision
from samecurve.core.planning.batch import BatchSplit
from samecurve.core.planning.facts import Facts
from samecurve.core.planning.fixed import Fixed
from samecurve.core.planning.machine import Machine
from samecurve.core.planning.memory import MemoryOptions, MemoryTerm
from samecurve.core.planning.plan import StepMemory
from samecurve.errors import NotExactError
from samecurve.units import counted

# terms of a device's peak that every lane has for itself; where weights are sharded, "summed" are
# the whole gradients
_OWN_TERMS = {"gradients", "copies", "scratch", "exact", "activations"}
_OWN_TERMS_SHARDED = (_OWN_TERMS - {"gradients"}) | {"summed"}
# share of them that malloc keeps for a thread beside: measured were 0.11 (1M parameters) and 0.35
# (13M)
_KEPT = 0.35


def exact_threads(cores: int, num_microbatches: int) -> int:
    """Threads inside an operation: the cores that each microbatch of a step can have for itself."""
    return max(1, cores // num_microbatches)


def busy_share(cores: int, num_microbatches: int, *, has_lanes: bool) -> float:
    """The share of a machine's cores that one rank keeps busy in a step."""
    threads = exact_threads(cores, num_microbatches)
    if not has_lanes:
        return threads / cores
    rounds = -(-num_microbatches // (cores // threads))
    return num_microbatches * threads / (rounds * cores)


def choose_exact_threads(
    threads: int | None, machine: Machine, split: BatchSplit, fixed: Fixed | None
) -> Decision[int]:
    """Threads inside the operations of an exact run's CPU ranks (torch).

    Their number changes the order in which a CPU adds. So it is the same on any number of ranks,
    and a run keeps it.

    threads: devices.threads
    """
    if fixed is None and threads:
        return Decision(threads, {"threads": "devices.threads"})
    if fixed is None:
        cores, count = machine.cores, split.num_microbatches
        each = exact_threads(cores, count)
        reason = f"{each} in an operation on any number of ranks, so that all add in the same order"
        if each > 1:
            reason += f"; {cores} cores for {counted(count, 'microbatch')}"
        return Decision(each, {"threads": reason}, _beyond_variable(machine, each))
    warnings: tuple[str, ...] = ()
    if threads and threads != fixed.threads:
        warning = (
            f"devices.threads {threads}: this run began with {fixed.threads} threads a rank, and"
            " train.exact keeps them"
        )
        warnings = (warning,)
    return Decision(fixed.threads, {"threads": "as this run began"}, warnings)


def _beyond_variable(machine: Machine, threads: int) -> tuple[str, ...]:
    """A warning of more threads than OMP_NUM_THREADS asks for, which would change the bits."""
    if not machine.threads or machine.threads >= threads:
        return ()
    return (
        f"OMP_NUM_THREADS asks for {machine.threads}, and an operation has"
        f" {counted(threads, 'thread')}, as on any number of ranks:"
        f" devices.threads={machine.threads} gives fewer, on all of them, and other bits",
    )


@dataclass(frozen=True)
class RankShare:
    """The part of a machine that one CPU rank may use."""

    cores: int
    threads: int  # inside an operation
    usable: float  # bytes


@dataclass(frozen=True)
class Lanes:
    """How many lanes a rank has, and the terms of its memory with all of them."""

    count: int
    terms: tuple[MemoryTerm, ...]


def choose_lanes(
    step: StepMemory, options: MemoryOptions, facts: Facts, share: RankShare, *, must_fill: bool
) -> Decision[Lanes]:
    """The lanes of an exact run's CPU ranks.

    step: with one lane
    must_fill: the plan chose train.exact, which must not leave cores idle

    NotExactError: lanes can't have the cores that an ordinary run would use.
    """
    most = step.split.accumulation_steps
    wanted = _busy(min(share.cores // share.threads, most), most)
    if wanted < 2:
        return Decision(Lanes(1, step.terms))
    own_terms = _OWN_TERMS_SHARDED if step.layout.shards > 1 else _OWN_TERMS
    each = sum(term.bytes for term in step.terms if term.name in own_terms)
    each += int(_KEPT * each)
    fitting = max(1, 1 + int((share.usable - step.bytes) // max(1, each)))
    if why := _why_one(step, options, facts):
        fitting = 1
    elif fitting < wanted:
        why = "memory holds no more microbatches side by side"
    count = _busy(min(wanted, fitting), most)
    busy = count * share.threads
    if why and must_fill:
        raise NotExactError(
            f"{busy} of a device's {counted(share.cores, 'core')} would compute: {why}",
            "devices.threads=1",
            "devices.threads",
        )
    reason = f"on {busy} of its {counted(share.cores, 'core')}"
    if why:
        reason += f": {why}"
    elif share.cores // share.threads > wanted:
        rounds = counted(-(-most // wanted), "round")
        reason += f": {most} microbatches in {rounds} (train.exact_devices)"
    terms = step.terms
    if count > 1:
        formula = (
            f"{count - 1} x {each} B: gradients, sums and activations of the other lanes, and"
            f" {_KEPT:.0%} that malloc keeps"
        )
        terms = (*terms, MemoryTerm("lanes", (count - 1) * each, formula))
    return Decision(Lanes(count, terms), {"lanes": reason})


def why_no_lanes(facts: Facts, *, offload_frozen: float) -> str:
    """Why no rank computes microbatches of this model side by side; empty: nothing is in the
    way.
    """
    if facts.whole_batch:
        return "the loss looks at the whole batch"
    if facts.packed or offload_frozen:
        return "each lane would copy the frozen weights"
    return ""


def _busy(lanes: int, microbatches: int) -> int:
    """How many lanes have work, where each takes as many microbatches as the others at most."""
    if lanes < 2:
        return 1
    return -(-microbatches // -(-microbatches // lanes))


def _why_one(step: StepMemory, options: MemoryOptions, facts: Facts) -> str:
    """Why a rank computes one microbatch at a time; empty: it need not."""
    layout = step.layout
    if layout.shards > 1 and not layout.gathers_once:
        return (
            f"{layout.strategy} gathers weights for one microbatch at a time"
            " (devices.gather=step: for several)"
        )
    return why_no_lanes(facts, offload_frozen=options.offload_frozen)
