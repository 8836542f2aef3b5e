"""Bytes that one device holds while training, term by term, each with its formula.

Source of the model-state terms: Rajbhandari et al., ZeRO, arXiv:1910.02054, section 3.1.
Activations: the bytes that the backward pass keeps, counted by the task (Facts.bytes_per_sample),
and scaled by the width of the precision.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from typing import Any, Protocol

from samecurve.core.config import Precision
from samecurve.core.config.sections import Config, Optimizer
from samecurve.core.feature_list import wanted
from samecurve.core.planning.facts import Facts
from samecurve.core.planning.machine import Kind
from samecurve.core.planning.optimizer import itemsize, optimizer_state
from samecurve.core.strategies import StrategySpec

AnyFeature = Any  # a Feature (core/feature.py), whose page imports this one

# Activations as a share of those in f32, for tasks that have not counted them (autocast_bytes):
# autocast keeps matrix inputs in 2 bytes, norms and the residual stream in 4, so the share lies
# between 0.5 and 1, and 0.75 is assumed.
_ACTIVATION_SHARE: Mapping[Precision, float] = {"f64": 2.0, "f32": 1.0, "bf16": 0.75, "f16": 0.75}
# the process itself: libraries, context, allocator slack
_RESERVED = {"cpu": 400 << 20, "cuda": 800 << 20}
_LARGE_GPU = 64 * 10**9  # bytes
# numbers in a chunk of logits: few enough for a CPU's cache, enough to keep a GPU busy
_LOGITS = {"cpu": 1 << 22, "cuda": 1 << 26}
# least and most rows of a chunk: a two-byte gradient summed over more rows might overflow
_LOGIT_ROWS = (64, 8192)


def usable_share(kind: str, memory: int) -> float:
    """The share of a device's memory that the plan counts on; memory: bytes.

    What a large GPU loses to its context and to gaps is a smaller share of it.
    """
    return 0.95 if kind == "cuda" and memory >= _LARGE_GPU else 0.9


def logit_rows(vocab: int, kind: str) -> int:
    """Rows whose logits are held at the same time (torch_engine/model/cross_entropy.py)."""
    least, most = _LOGIT_ROWS
    return min(most, max(least, _LOGITS[kind] // vocab))


@dataclass(frozen=True, kw_only=True)
class MemoryOptions:
    """What of a config decides how much memory a device needs."""

    config: Config
    precision: Precision  # the one that was chosen
    features: tuple[AnyFeature, ...] = ()  # of the run
    kind: Kind = "cpu"  # of the devices

    @property
    def itemsize(self) -> int:
        """Bytes of a weight."""
        return itemsize(self.precision)

    @property
    def optimizer(self) -> Optimizer:
        return self.config.optimizer

    @property
    def limit(self) -> int | None:
        """Bytes of each device to plan with at most."""
        return self.config.devices.memory

    def having(self, *features: AnyFeature, **values: Mapping[str, Any]) -> "MemoryOptions":
        """The options with other values of the config, by section, and with these features."""
        more = tuple(feature for feature in features if feature not in self.features)
        return replace(
            self, config=self.config.with_values(**values), features=(*self.features, *more)
        )

    @cached_property
    def rerun(self) -> str:
        """What runs again in backward, by the names of the task's counts; "none": nothing."""
        found = (feature.rerun(self.config) for feature in self.features)
        return next((how for how in found if how != "none"), "none")


def memory_options(
    config: Config,
    precision: Precision | None = None,
    kind: Kind = "cpu",
    brought: Iterable[str] = (),
) -> MemoryOptions:
    """The options of a config.

    precision: the one that was chosen; None: the config's. kind: of the devices
    brought: names of the features that the task brings
    """
    return MemoryOptions(
        config=config,
        precision=precision or config.train.precision,
        features=tuple(row.load() for row in wanted(config, brought)),
        kind=kind,
    )


@dataclass(frozen=True)
class Way:
    """Other values of a feature's keys, with which a device holds less.

    flags: how the user asks for them, after --set
    """

    values: Mapping[str, Any]  # by key, in the feature's section
    flags: str
    why: str


@dataclass(frozen=True)
class HostCopies:
    """The bytes that a device copies from host memory for a microbatch."""

    forward: int
    backward: int  # with those of blocks that run again
    first: int  # ahead of which nothing is computed

    @property
    def bytes(self) -> int:
        return self.forward + self.backward


@dataclass(frozen=True)
class MemoryTerm:
    """A summand of the bytes that a device holds."""

    name: str
    bytes: int
    formula: str  # in words and numbers, for the plan's table


@dataclass(frozen=True)
class PassingTerm(MemoryTerm):
    """A summand that exists at one moment of a step, when some of the activations do not."""

    absent: float  # share of the activations that do not exist at that moment
    why: str  # for the plan's table

    def beyond(self, activations: int) -> int:
        """Bytes by which this moment exceeds the moment that holds all activations."""
        return max(0, self.bytes - int(self.absent * activations))


def settled(terms: list[MemoryTerm], activations: int) -> list[MemoryTerm]:
    """The terms at a device's peak: of passing terms only the largest counts.

    activations: bytes of all activations in flight
    """
    passing = [term for term in terms if isinstance(term, PassingTerm)]
    largest = max(passing, key=lambda term: term.beyond(activations), default=None)
    return [
        _counted(term, activations, largest) if largest and isinstance(term, PassingTerm) else term
        for term in terms
    ]


def _counted(term: PassingTerm, activations: int, largest: PassingTerm) -> MemoryTerm:
    if term is not largest:
        formula = f"{term.formula}; not when {largest.name} is held, which takes more"
        return MemoryTerm(term.name, 0, formula)
    formula = term.formula
    if activations:
        formula += f"; what it is more than {term.why}"
    return MemoryTerm(term.name, term.beyond(activations), formula)


def autocast_itemsize(precision: Precision) -> int:
    """Bytes of a weight in a matrix product."""
    return 2 if precision in {"bf16", "f16"} else itemsize(precision)


def replicated_state(options: MemoryOptions, facts: Facts, shards: int) -> list[MemoryTerm]:
    """The terms of weights, gradients and optimizer state: whole, or one shard of each."""
    width = options.itemsize
    state = optimizer_state(options.optimizer, options.precision, facts)

    def term(name: str, size: int, formula: str) -> MemoryTerm:
        """size: bytes on one device"""
        if shards > 1:
            formula += f" / {shards} shards"
        return MemoryTerm(name, size, formula)

    def weights(name: str, numbers: int) -> MemoryTerm:
        return term(name, -(-numbers * width // shards), f"{numbers} x {width} B")

    terms = [
        weights("weights", facts.params),
        weights("gradients", facts.trainable),
        term("optimizer", state.bytes_of_shard(shards), state.formula),
    ]
    for feature in options.features:
        terms += [weights(*kept) for kept in feature.numbers_kept(options.config, facts).items()]
    if facts.quantized.packed:
        packed = packed_bytes(facts)
        formula = facts.formulas.get("packed", f"{packed} x 1 B")
        terms.append(term("packed", -(-packed // shards), formula))
    return terms


def packed_bytes(facts: Facts) -> int:
    """Bytes of all packed (quantized) arrays of the model."""
    return sum(prod(facts.model.arrays[name]) for name in facts.quantized.packed)


def gathered_by_block(options: MemoryOptions, facts: Facts, *, reshard: bool) -> list[MemoryTerm]:
    """The parts of a sharded model that are gathered for a while.

    Blocks are gathered one after the other, each while the block before it computes; parameters
    outside of blocks stay gathered.

    reshard: whether a block's weights are let go of after its forward pass
    """
    width = options.itemsize
    narrow = autocast_itemsize(options.precision)
    # blocks may be unequal: block_params is the largest
    outside = max(0, facts.params - facts.blocks * facts.block_params)
    blocks = facts.blocks  # whole at once
    if reshard:
        blocks = min(2, blocks)
    gathered = outside * width + blocks * facts.block_params * narrow
    gathered = min(facts.params * width, gathered)
    largest = max(outside, facts.block_params)
    formula = (
        f"{outside} x {width} B outside of blocks + {blocks} blocks of {facts.block_params} x"
        f" {narrow} B"
    )
    if facts.quantized.packed:
        gathered += min(packed_bytes(facts), blocks * facts.quantized.block_packed)
        formula += f" and {facts.quantized.block_packed} B packed"
    reduced = PassingTerm(
        "reduced",
        2 * largest * width,
        f"2 x {largest} x {width} B: the largest group's gradients on their way",
        absent=1.0,
        why="activations, which are let go of by then",
    )
    return [MemoryTerm("gathered", gathered, formula), reduced]


def _gathered_whole(options: MemoryOptions, facts: Facts) -> list[MemoryTerm]:
    """The whole model, gathered once and kept to the last backward pass, and whole gradients."""
    width = options.itemsize
    weights = f"{facts.params} x {width} B, whole during a step"
    gradients = f"{facts.trainable} x {width} B, whole gradients"
    return [
        MemoryTerm("gathered", facts.params * width, weights),
        MemoryTerm("reduced", facts.trainable * width, gradients),
    ]


def state_terms(
    options: MemoryOptions,
    facts: Facts,
    spec: StrategySpec,
    *,
    kind: str,
    shards: int,
    samples: int,
    sharing_process: int = 1,
) -> list[MemoryTerm]:
    """The terms beside activations.

    kind: cpu or cuda
    shards: devices that share one copy of the model (1: each holds the whole)
    samples: at once
    sharing_process: devices of one CPU process, which share the memory of the process itself
    """
    terms = replicated_state(options, facts, shards)
    for feature in options.features:
        terms = feature.placed(terms, options, facts, spec)
    if shards > 1 and spec.state == "sharded by block":
        terms += gathered_by_block(options, facts, reshard=options.config.devices.reshard)
    elif shards > 1:
        terms += _gathered_whole(options, facts)
    of_a_step = (
        _copies(options, facts, spec),
        _unpacked(options, facts),
        _scratch(options, facts, kind, samples),
        *(feature.memory(options, facts, spec) for feature in options.features),
    )
    terms += [term for term in of_a_step if term]
    formula = "libraries and context"
    if sharing_process > 1:
        formula += f", shared by {sharing_process} devices"
    reserved = _RESERVED[kind] + (facts.library_bytes if kind == "cpu" else 0)
    reserved //= sharing_process
    return [*terms, MemoryTerm("process", reserved, formula)]


def _copies(options: MemoryOptions, facts: Facts, spec: StrategySpec) -> MemoryTerm | None:
    """Copies of weights in two bytes, which autocast makes unless weights are gathered so."""
    narrow = autocast_itemsize(options.precision)
    is_gathered = spec.state == "sharded by block"
    if narrow == options.itemsize or spec.engine != "torch" or is_gathered:
        return None
    numbers = sum(prod(facts.model.arrays.get(name, ())) for name in facts.model.rounded)
    kept = "kept for backward"
    if options.rerun != "none":
        numbers, kept = 2 * facts.block_params, "of the largest block, with their gradient"
    if not numbers:
        return None
    formula = f"{numbers} x {narrow} B: weights as products take them, {kept}"
    return MemoryTerm("copies", numbers * narrow, formula)


def _unpacked(options: MemoryOptions, facts: Facts) -> MemoryTerm | None:
    """The largest packed matrix, unpacked for its product."""
    if not facts.quantized.unpacked:
        return None
    width = options.itemsize
    formula = f"2 x {facts.quantized.unpacked} x {width} B: the largest packed matrix"
    return MemoryTerm("unpacked", 2 * facts.quantized.unpacked * width, formula)


def _scratch(options: MemoryOptions, facts: Facts, kind: str, samples: int) -> MemoryTerm | None:
    """What a loss that computes some tokens' logits at a time holds of so many samples."""
    vocab, width = facts.activations.chunked_logits, options.itemsize
    if not vocab:
        return None
    tokens = min(logit_rows(vocab, kind), samples * facts.data.tokens_per_sample)
    size = 2 * vocab * tokens + facts.activations.head_gradient
    formula = f"{width} B x (2 x vocab {vocab} x {tokens} tokens at a time"
    if facts.activations.head_gradient:
        formula += f" + {facts.activations.head_gradient}: the head's gradient"
    formula += ")"
    if facts.activations.autocast_scratch and autocast_itemsize(options.precision) < width:
        size += facts.activations.autocast_scratch
        formula += (
            f" + 4 B x {facts.activations.autocast_scratch}: the head in two bytes, and what is"
            " added to its gradient"
        )
    size *= width
    rerun = facts.activations.rerun_share.get(options.rerun, 0.0)
    if not rerun:
        return MemoryTerm("scratch", size, formula)
    why = "the block that is run again later"
    return PassingTerm("scratch", size, formula, absent=rerun, why=why)


def sample_bytes(options: MemoryOptions, facts: Facts) -> int | None:
    """Bytes of activations of one sample; None: not known."""
    how, precision = options.rerun, options.precision
    if precision in {"bf16", "f16"} and how in facts.activations.autocast_bytes:
        return max(1, facts.activations.autocast_bytes[how])
    if options.kind == "cuda" and how in facts.activations.gpu_bytes.get(precision, {}):
        return max(1, facts.activations.gpu_bytes[precision][how])
    in_f32 = facts.activations.recompute_bytes.get(how, facts.bytes_per_sample)
    if in_f32 is None:
        return None
    return max(1, int(in_f32 * _ACTIVATION_SHARE[precision]))


def activation_term(
    options: MemoryOptions, facts: Facts, micro_batch_size: int
) -> MemoryTerm | None:
    """Activations of one microbatch; None: not known."""
    each = sample_bytes(options, facts)
    if each is None:
        return None
    formula = f"{micro_batch_size} samples x {each} B"
    if options.rerun != "none" and facts.activations.recompute_bytes:
        formula += f", recompute {options.rerun}"
    if facts.formulas.get("bytes_per_sample"):
        formula += f"; {facts.formulas['bytes_per_sample']}"
    if options.kind == "cuda" and options.precision in facts.activations.gpu_bytes:
        formula += f"; {facts.formulas[f'gpu_bytes.{options.precision}']}"
    return MemoryTerm("activations", micro_batch_size * each, formula)


class BatchSizes(Protocol):
    """What memory asks of a BatchSplit."""

    @property
    def micro_batch_size(self) -> int: ...
    @property
    def global_batch_size(self) -> int: ...


def peak_terms(
    held: list[MemoryTerm], options: MemoryOptions, facts: Facts, split: BatchSizes, shards: int
) -> tuple[MemoryTerm, ...]:
    """All terms of a device at its peak. held: those that the split does not decide"""
    activations = activation_term(options, facts, split.micro_batch_size)
    others = (
        activations,
        *(feature.memory_of_step(options, facts, split, shards) for feature in options.features),
    )
    peak = settled(held, activations.bytes if activations else 0)
    return (*peak, *(term for term in others if term))
