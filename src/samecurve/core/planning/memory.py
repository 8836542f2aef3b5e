"""Bytes that one device holds while training, term by term, each with its formula.

Source of the model-state terms: Rajbhandari et al., ZeRO, arXiv:1910.02054, section 3.1.
Activations: the task's own count of what its backward pass keeps (Facts.bytes_per_sample), scaled
by the width of the compute type.
"""

from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

from samecurve.core.planning.optimizer_state import itemsize, optimizer_state

if TYPE_CHECKING:
    from samecurve.core.config.sections import Config
    from samecurve.core.config.values import Precision
    from samecurve.core.planning.facts import Facts
    from samecurve.core.planning.strategies import StrategySpec

# Where a task has not counted them (Facts.autocast_bytes): under autocast matrix inputs are kept in
# 2 bytes, norms and the residual stream in 4: between 0.5 and 1 of f32, taken at 0.75.
_ACTIVATION_SHARE: "dict[Precision, float]" = {"f64": 2.0, "f32": 1.0, "bf16": 0.75, "f16": 0.75}
# the process itself: libraries, context, allocator slack
_RESERVED = {"cpu": 400 << 20, "cuda": 800 << 20}
USABLE = 0.9  # share of a device's memory that is planned with
# numbers of a chunk of logits: few enough for a CPU's cache, enough to keep a GPU busy
_LOGITS = {"cpu": 1 << 22, "cuda": 1 << 26}
# rows of a chunk, least and most: a two-byte gradient summed over more might overflow
_LOGIT_ROWS = (64, 8192)


def logit_rows(vocab: int, kind: str) -> int:
    """Rows whose logits are held at once (torch_engine/model/cross_entropy.py)."""
    least, most = _LOGIT_ROWS
    return min(most, max(least, _LOGITS[kind] // vocab))


@dataclass(frozen=True, kw_only=True)
class MemoryTerm:
    """One summand of what a device holds."""

    name: str
    bytes: int
    formula: str  # in words and numbers, for the plan's table


@dataclass(frozen=True, kw_only=True)
class PassingTerm(MemoryTerm):
    """Held at one moment of a step, when some of the activations are not."""

    absent: float  # share of the activations
    why: str  # for the plan's table

    def beyond(self, activations: int) -> int:
        """Bytes by which that moment exceeds the one of all activations."""
        return max(0, self.bytes - int(self.absent * activations))


def settled(terms: list[MemoryTerm], activations: int) -> list[MemoryTerm]:
    """What a device holds at its peak: of passing terms the largest, as far as it adds to that."""
    passing = [term for term in terms if isinstance(term, PassingTerm)]
    largest = max(passing, key=lambda term: term.beyond(activations), default=None)
    return [
        _counted(term, activations, largest) if largest and isinstance(term, PassingTerm) else term
        for term in terms
    ]


def _counted(term: PassingTerm, activations: int, largest: PassingTerm) -> MemoryTerm:
    if term is not largest:
        formula = f"{term.formula}; not when {largest.name} is held, which takes more"
        return MemoryTerm(name=term.name, bytes=0, formula=formula)
    formula = term.formula
    if activations:
        formula += f"; what it is more than {term.why}"
    return MemoryTerm(name=term.name, bytes=term.beyond(activations), formula=formula)


def autocast_itemsize(precision: "Precision") -> int:
    """Bytes of a weight as matrix products take it."""
    return 2 if precision in {"bf16", "f16"} else itemsize(precision)


def replicated_state(config: "Config", facts: "Facts", shards: int) -> list[MemoryTerm]:
    """Weights, gradients and optimizer state, the whole or one shard of each."""
    width = itemsize(config.train.precision)
    state = optimizer_state(config, facts)

    def term(name: str, size: int, formula: str) -> MemoryTerm:
        """size: bytes on one device"""
        if shards > 1:
            formula += f" / {shards} shards"
        if config.devices.offload:
            return MemoryTerm(name=name, bytes=0, formula=f"{formula}: in host memory")
        return MemoryTerm(name=name, bytes=size, formula=formula)

    def weights(name: str, numbers: int) -> MemoryTerm:
        return term(name, -(-numbers * width // shards), f"{numbers} x {width} B")

    terms = [
        weights("weights", facts.params),
        weights("gradients", facts.trainable),
        term("optimizer", state.bytes_of_shard(shards), state.formula),
    ]
    if config.train.ema:
        terms.append(weights("average", facts.trainable))
    if facts.packed:
        packed = packed_bytes(facts)
        formula = facts.formulas.get("packed", f"{packed} x 1 B")
        terms.append(term("packed", -(-packed // shards), formula))
    return terms


def packed_bytes(facts: "Facts") -> int:
    """Of the whole model's packed arrays."""
    return sum(prod(facts.arrays[name]) for name in facts.packed)


def state_sharded_by_block(config: "Config", facts: "Facts", shards: int) -> list[MemoryTerm]:
    """A shard of each, and what is whole for a while.

    Blocks are gathered one after the other, the next one ahead; what lies outside of them stays.
    """
    state = replicated_state(config, facts, shards)
    if shards == 1:
        return state
    width = itemsize(config.train.precision)
    narrow = autocast_itemsize(config.train.precision)
    # blocks may be unequal: block_params is the largest
    outside = max(0, facts.params - facts.blocks * facts.block_params)
    blocks = facts.blocks  # whole at once
    if config.devices.reshard:
        blocks = min(2, blocks)
    gathered = outside * width + blocks * facts.block_params * narrow
    gathered = min(facts.params * width, gathered)
    largest = max(outside, facts.block_params)
    formula = (
        f"{outside} x {width} B outside of blocks + {blocks} blocks of {facts.block_params} x"
        f" {narrow} B"
    )
    if facts.packed:
        gathered += min(packed_bytes(facts), blocks * facts.block_packed)
        formula += f" and {facts.block_packed} B packed"
    return [
        *state,
        MemoryTerm(name="gathered", bytes=gathered, formula=formula),
        PassingTerm(
            name="reduced",
            bytes=2 * largest * width,
            formula=f"2 x {largest} x {width} B: the largest group's gradients on their way",
            absent=1.0,
            why="activations, which are let go of by then",
        ),
    ]


def state_sharded_whole(config: "Config", facts: "Facts", shards: int) -> list[MemoryTerm]:
    """A shard of each, and the model gathered once a step, kept to its last backward pass."""
    state = replicated_state(config, facts, shards)
    if shards == 1:
        return state
    width = itemsize(config.train.precision)
    return [
        *state,
        MemoryTerm(
            name="gathered",
            bytes=facts.params * width,
            formula=f"{facts.params} x {width} B, whole during a step",
        ),
        MemoryTerm(
            name="reduced",
            bytes=facts.trainable * width,
            formula=f"{facts.trainable} x {width} B, whole gradients",
        ),
    ]


def state_terms(
    config: "Config",
    facts: "Facts",
    spec: "StrategySpec",
    *,
    kind: str,
    shards: int,
    sharing_process: int = 1,
) -> list[MemoryTerm]:
    """What is held whatever the micro-batch.

    kind: of device
    shards: devices that share one copy of the model (1: each holds the whole)
    sharing_process: devices of one process on a CPU, which share what that needs itself
    """
    terms = spec.memory(config, facts, shards)
    of_a_step = (
        _copies(config, facts, spec),
        _unpacked(config, facts),
        _scratch(config, facts, kind),
    )
    terms += [term for term in of_a_step if term]
    formula = "libraries and context"
    if sharing_process > 1:
        formula += f", shared by {sharing_process} devices"
    reserved = _RESERVED[kind] + (facts.library_bytes if kind == "cpu" else 0)
    reserved //= sharing_process
    return [*terms, MemoryTerm(name="process", bytes=reserved, formula=formula)]


def _copies(config: "Config", facts: "Facts", spec: "StrategySpec") -> MemoryTerm | None:
    """Of weights in two bytes, which autocast makes where they are not gathered so."""
    narrow = autocast_itemsize(config.train.precision)
    is_gathered = spec.memory is state_sharded_by_block
    if narrow == itemsize(config.train.precision) or spec.engine != "torch" or is_gathered:
        return None
    numbers = sum(prod(facts.arrays.get(name, ())) for name in facts.rounded)
    kept = "kept for backward"
    if config.train.recompute != "none":
        numbers, kept = 2 * facts.block_params, "of the largest block, with their gradient"
    if not numbers:
        return None
    formula = f"{numbers} x {narrow} B: weights as products take them, {kept}"
    return MemoryTerm(name="copies", bytes=numbers * narrow, formula=formula)


def _unpacked(config: "Config", facts: "Facts") -> MemoryTerm | None:
    """Of packed weights one matrix, as its product takes it."""
    if not facts.unpacked:
        return None
    width = itemsize(config.train.precision)
    formula = f"2 x {facts.unpacked} x {width} B: the largest packed matrix"
    return MemoryTerm(name="unpacked", bytes=2 * facts.unpacked * width, formula=formula)


def _scratch(config: "Config", facts: "Facts", kind: str) -> MemoryTerm | None:
    if not facts.scratch:
        return None
    precision = config.train.precision
    size, formula = facts.scratch[kind], facts.formulas.get(f"scratch.{kind}", "")
    if facts.autocast_scratch and autocast_itemsize(precision) < itemsize(precision):
        size += facts.autocast_scratch
        formula += (
            f" + 4 B x {facts.autocast_scratch}: the head in two bytes, and what is added to its"
            " gradient"
        )
    size *= itemsize(precision)
    rerun = facts.rerun_share.get(config.train.recompute, 0.0)
    if not rerun:
        return MemoryTerm(name="scratch", bytes=size, formula=formula)
    why = "the block that is run again later"
    return PassingTerm(name="scratch", bytes=size, formula=formula, absent=rerun, why=why)


def sample_bytes(config: "Config", facts: "Facts") -> int | None:
    """Activations of one sample in flight; None: not known."""
    how, precision = config.train.recompute, config.train.precision
    if precision in {"bf16", "f16"} and how in facts.autocast_bytes:
        return max(1, facts.autocast_bytes[how])
    in_f32 = facts.recompute_bytes.get(how, facts.bytes_per_sample)
    if in_f32 is None:
        return None
    return max(1, int(in_f32 * _ACTIVATION_SHARE[precision]))


def activation_term(config: "Config", facts: "Facts", micro_batch_size: int) -> MemoryTerm | None:
    """Activations of all samples in flight; None: not known."""
    each = sample_bytes(config, facts)
    if each is None:
        return None
    formula = f"{micro_batch_size} samples x {each} B"
    if config.train.recompute != "none" and facts.recompute_bytes:
        formula += f", recompute {config.train.recompute}"
    if facts.formulas.get("bytes_per_sample"):
        formula += f"; {facts.formulas['bytes_per_sample']}"
    return MemoryTerm(name="activations", bytes=micro_batch_size * each, formula=formula)


def feature_term(config: "Config", facts: "Facts", batch: int) -> MemoryTerm | None:
    """What a loss over the whole batch's features holds of them; None: not known, or no such."""
    if not facts.feature_bytes:
        return None
    each = facts.feature_bytes * (2 if config.train.precision == "f64" else 1)
    formula = (
        f"3 x {batch} samples x {each} B: of the whole batch, as sent, and their gradients; without"
        " what batch_loss() computes of them"
    )
    return MemoryTerm(name="features", bytes=3 * batch * each, formula=formula)
