"""How the CPU ranks of an exact run use their cores: threads inside an operation, and lanes.

The number of threads changes the order in which an operation adds, so it follows from the machine
and the microbatches of a step, never from the ranks: the whole cores that each microbatch can have,
and at least one. Lanes are the microbatches that a rank computes side by side, on all the cores of
its share. They change no bit.
"""

from dataclasses import dataclass

from samecurve.core.planning import Decision
from samecurve.core.planning.batch import BatchSplit
from samecurve.core.planning.exact_foreseen import slowdown_by_calls
from samecurve.core.planning.facts import Facts
from samecurve.core.planning.fixed import Fixed
from samecurve.core.planning.machine import Machine
from samecurve.core.planning.memory import MemoryOptions, MemoryTerm
from samecurve.core.planning.plan import Lanes, StepMemory
from samecurve.errors import NotExactError
from samecurve.units import counted

# terms of a device's peak that every lane has for itself; where weights are sharded, "summed" are
# the whole gradients
_OWN_TERMS = {"gradients", "copies", "scratch", "exact", "activations"}
_OWN_TERMS_SHARDED = (_OWN_TERMS - {"gradients"}) | {"summed"}
# share of them that malloc keeps for a thread beside: measured were 0.11 (1M parameters) and 0.35
# (13M)
_KEPT = 0.35
_BUSY = 0.95  # the share of the cores that should compute


def exact_threads(cores: int, num_microbatches: int) -> int:
    """Threads inside an operation: the cores that each microbatch of a step can have for itself,
    and one more where too many cores would idle.
    """
    whole = max(1, cores // num_microbatches)
    return whole if whole * num_microbatches >= _BUSY * cores else whole + 1


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

    def slowdown(self, lanes: int, microbatches: int) -> float:
        """How many times as long microbatches take in lanes as on cores that all compute.

        Lanes take equally many, but for the last one (torch_engine/step/lanes.py).
        """
        each = -(-microbatches // lanes)
        full, rest = divmod(microbatches, each)
        until_rest = rest * self._pace(full + 1)
        took = until_rest + (each - rest) * self._pace(full)
        return round(took * self.cores / microbatches, 6)

    def _pace(self, lanes: int) -> float:
        """How long a microbatch takes, of that with one thread, where so many are computed."""
        return max(1, lanes * self.threads / self.cores) / self.threads

    def best_lanes(self, microbatches: int, most: int) -> int:
        """The fewest lanes, at most so many, with which microbatches take least time.

        They may have more threads than there are cores, which then share them out: 3 lanes on 2
        cores waste none of them, where 2 would wait for the third microbatch (benchmarks/lanes.py).
        """
        lanes = range(1, min(most, microbatches) + 1)
        return min(lanes, key=lambda count: self.slowdown(count, microbatches))


def choose_lanes(
    step: StepMemory, options: MemoryOptions, facts: Facts, share: RankShare, *, must_fill: bool
) -> Decision[Lanes]:
    """The lanes of an exact run's CPU ranks.

    step: with one lane
    must_fill: the plan chose train.exact, which must not leave cores idle

    NotExactError: lanes can't have the cores that an ordinary run would use.
    """
    microbatches = step.split.accumulation_steps
    wanted, each = share.best_lanes(microbatches, microbatches), _bytes_of_lane(step)
    fitting = max(1, 1 + int((share.usable - step.bytes) // max(1, each)))
    why = _why_one(step, options, facts) if wanted > 1 else ""
    if why:
        fitting = 1
    elif fitting < wanted:
        why = "memory holds no more microbatches side by side"
    count = share.best_lanes(microbatches, fitting)
    slowdown, busy = share.slowdown(count, microbatches), min(share.cores, count * share.threads)
    cores = counted(share.cores, "core")
    if why and must_fill:
        raise NotExactError(
            f"{busy} of a device's {cores} would compute: {why}",
            "devices.threads=1",
            "devices.threads",
        )
    reasons = {}
    if share.cores > share.threads:
        reasons["lanes"] = f"on {busy} of its {cores}"
        if why:
            reasons["lanes"] += f": {why}"
        elif slowdown > 1:
            rounds = counted(-(-microbatches // count), "round")
            reasons["lanes"] += f": {microbatches} microbatches in {rounds} (train.exact_devices)"
    terms = step.terms if count == 1 else (*step.terms, _lanes_term(count, each))
    slowdown = max(slowdown, _slowdown_by_calls(step, facts, share.cores))
    return Decision(Lanes(count, terms, slowdown), reasons)


def _bytes_of_lane(step: StepMemory) -> int:
    """The memory that each lane has for itself. step: with one lane"""
    own_terms = _OWN_TERMS_SHARDED if step.layout.shards > 1 else _OWN_TERMS
    own = sum(term.bytes for term in step.terms if term.name in own_terms)
    return own + int(_KEPT * own)


def _lanes_term(lanes: int, each: int) -> MemoryTerm:
    formula = (
        f"{lanes - 1} x {each} B: gradients, sums and activations of the other lanes, and"
        f" {_KEPT:.0%} that malloc keeps"
    )
    return MemoryTerm("lanes", (lanes - 1) * each, formula)


def _slowdown_by_calls(step: StepMemory, facts: Facts, cores: int) -> float:
    """How many times as long as an ordinary step the calls of a process's microbatches take.

    cores: of a device
    """
    layout, split = step.layout, step.split
    devices = layout.num_devices if layout.is_one_process else 1
    samples = split.global_batch_size * devices / layout.num_devices
    count = split.accumulation_steps * devices
    return slowdown_by_calls(facts, samples, count, cores * devices)


def why_no_lanes(facts: Facts, offload_frozen: float) -> str:
    """Why no rank computes microbatches of this model side by side; empty: nothing is in the
    way.
    """
    if facts.whole_batch:
        return "the loss looks at the whole batch"
    if facts.packed or offload_frozen:
        return "each lane would copy the frozen weights"
    return ""


def _why_one(step: StepMemory, options: MemoryOptions, facts: Facts) -> str:
    """Why a rank computes one microbatch at a time; empty: it need not."""
    layout = step.layout
    if layout.shards > 1 and not layout.gathers_once:
        return (
            f"{layout.strategy} gathers weights for one microbatch at a time"
            " (devices.gather=step: for several)"
        )
    return why_no_lanes(facts, options.offload_frozen)
