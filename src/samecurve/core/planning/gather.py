"""How often a step gathers sharded weights.

A step of several rounds may gather its weights in each round, or once: then weights and gradients
stay whole on each device through all rounds, and gradients are summed once. That is chosen after
the microbatch, which never becomes smaller for it.
"""

from dataclasses import replace

from samecurve.core.config.sections import Devices
from samecurve.core.planning import Decision
from samecurve.core.planning.capacity import Capacity, room_of_layout
from samecurve.core.planning.facts import Facts
from samecurve.core.planning.memory import (
    MemoryOptions,
    MemoryTerm,
    gathered_by_block,
    peak_terms,
)
from samecurve.core.planning.plan import StepMemory
from samecurve.errors import UserError
from samecurve.units import counted, show_bytes

# share of the memory to plan with that must stay free for whole weights and gradients to be held:
# they make a step faster, and an estimate that is a little too low must not end a run
_SPARE = 0.1
# share of it that must stay free for unknown activations, where CPU ranks give the same bits
_SPARE_UNKNOWN = 0.5


def choose_gather(
    section: Devices,
    options: MemoryOptions,
    facts: Facts,
    capacity: Capacity,
    by_round: StepMemory,
) -> Decision[StepMemory]:
    """Whether the weights are gathered, and gradients summed, in each round or once a step.

    by_round: the memory where they are in each round

    UserError: once a step is asked for, and whole weights and gradients don't fit.
    """
    once = _gathered_once(options, facts, by_round)
    rounds = counted(by_round.split.accumulation_steps, "round")
    how = f"whole weights and gradients through the {rounds} of a step"
    need, usable = show_bytes(once.bytes), show_bytes(capacity.usable)
    if section.gather == "step":
        if once.bytes > capacity.usable:
            raise UserError(
                f"devices.gather step: {how} need {need} on each device, of {usable} to use",
                "devices.gather=auto, which gathers in each round where memory is short; or a"
                " smaller microbatch: --batch-size",
                "devices.gather",
            )
        return _once(once, f"as asked; {how}, {need} of {usable} to use")
    if section.gather == "round":
        return Decision(by_round, {"gather": "as asked"})
    if why := _why_by_round(once, capacity, options):
        return Decision(by_round, {"gather": f"{how} {why}"})
    unknown = "" if once.is_known else ", activations not counted"
    return _once(once, f"{how} fit: {need} of {usable} to use{unknown}")


def _gathered_once(options: MemoryOptions, facts: Facts, by_round: StepMemory) -> StepMemory:
    """The memory where weights are gathered once a step."""
    layout = replace(by_round.layout, gathers_once=True)
    split = replace(by_round.split, interleaved=1)
    room = room_of_layout(options, facts, layout, split.micro_batch_size)
    held = _with_whole(room.terms, options, facts)
    if by_round.same_bits:
        held += by_round.same_bits.memory(options, facts, layout, split)
    terms = peak_terms(held, options, facts, split, layout.shards)
    return StepMemory(layout, split, terms, by_round.same_bits)


def _with_whole(terms: list[MemoryTerm], options: MemoryOptions, facts: Facts) -> list[MemoryTerm]:
    """The terms with all weights and gradients whole through a step's rounds."""
    whole = {term.name: term for term in gathered_by_block(options, facts, reshard=False)}
    formula = f"{facts.trainable} x {options.itemsize} B: whole, added over the rounds of a step"
    summed = MemoryTerm("summed", facts.trainable * options.itemsize, formula)
    return [*(whole.get(term.name, term) for term in terms), summed]


def _once(once: StepMemory, why: str) -> Decision[StepMemory]:
    reasons = {"gather": why}
    if once.same_bits:
        reasons |= once.same_bits.reasons(once.split)
    return Decision(once, reasons)


def _why_by_round(once: StepMemory, capacity: Capacity, options: MemoryOptions) -> str:
    """Why memory may not hold whole weights and gradients; empty: it holds them."""
    for row in options.config.named_features:
        if row.load().keeps_state_on_host:
            return f"are what {row.keys[0]} is to avoid"
    if capacity.was_tried:
        return "were not there when the microbatch was tried"
    spare = _SPARE
    if not once.is_known:
        # such a step is cut into microbatches in any case: gathering in each costs it most
        if not (once.same_bits and once.layout.devices[0].kind == "cpu"):
            return "may not fit: the activations are not known; devices.gather=step asks for it"
        spare = _SPARE_UNKNOWN
    if once.bytes > (1 - spare) * capacity.usable:
        return (
            f"would need {show_bytes(once.bytes)}; of {show_bytes(capacity.usable)} to use,"
            f" {spare:.0%} are to stay free"
        )
    return ""
