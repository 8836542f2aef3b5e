"""plan(): what a run will do, and why.

A pure function; every worker obeys its result, nothing after it changes a number.
"""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from functools import cached_property
from typing import Any

from samecurve.core.config.sections import Compress, Config, Precision, Recompute
from samecurve.core.config.values import MOST_STEPS
from samecurve.core.determinism.data_order import Anchor, Order
from samecurve.core.determinism.mean import nominal_weight
from samecurve.core.determinism.microbatches import (
    Assignment,
    assign,
    count_microbatches,
    microbatches_of,
)
from samecurve.core.planning.balance import choose_speeds, choose_uneven_split
from samecurve.core.planning.batch import batch_warnings, check_count, choose_batch
from samecurve.core.planning.capacity import choose_capacity, memory_room
from samecurve.core.planning.compatibility import (
    after_step_term,
    check_coupled,
    check_optimizer,
    check_recompute,
    layout_warnings,
    say_batch_loss,
    say_modes,
    say_task_steps,
)
from samecurve.core.planning.decision import Decision, DecisionLog
from samecurve.core.planning.exact import check_exact, choose_exact_batch, exact_memory
from samecurve.core.planning.facts import Facts, Fixed, as_mapping, checked
from samecurve.core.planning.layout import (
    Layout,
    choose_devices,
    choose_layout,
    choose_sync,
    choose_threads,
)
from samecurve.core.planning.machine import Device, Machine
from samecurve.core.planning.memory import MemoryTerm, activation_term, feature_term, sample_bytes
from samecurve.core.planning.run_length import Intervals, choose_intervals, choose_schedule
from samecurve.core.planning.schedule import Schedule
from samecurve.core.planning.speed_options import check_compile, check_float8
from samecurve.core.planning.strategies import STRATEGIES, StrategySpec
from samecurve.core.protocols import Progress
from samecurve.errors import UserError
from samecurve.units import counted

_ON_DISK = {
    "world_size": "processes",
    "every_rank_every_round": "together",
    "global_batch_size": "batch",
    "micro_batch_size": "micro",
    "accumulation_steps": "rounds",
    "nominal_weight": "nominal",
    "keyed_dropout": "keyed",
    "reasons": "because",
    "microbatch_seconds": "slot_times",
}


@dataclass(frozen=True, kw_only=True, repr=False)
class Plan:
    """All that was decided before the first step; every worker obeys it."""

    engine: str
    strategy: str
    backend: str
    devices: tuple[Device, ...]  # one for each place of work
    visible: int  # devices that there are
    world_size: int  # processes
    shards: int  # devices that share one copy of the model
    # every rank takes part in each round: what it computes with is spread over all
    every_rank_every_round: bool
    global_batch_size: int
    micro_batch_size: int
    accumulation_steps: int  # microbatches of the busiest device in a full step
    nominal_weight: float  # core/determinism/mean.py
    steps: int
    samples: int
    eval_samples: int
    tokens_per_sample: int
    precision: Precision
    threads: int
    recompute: Recompute
    norm_sync: bool
    reshard: bool
    offload: bool
    compress: Compress
    keyed_dropout: bool
    preflight: int
    schedule: Schedule
    every: Intervals
    keep: int
    non_finite: str
    memory: tuple[MemoryTerm, ...]
    flops_per_step: float | None  # None: not known
    peak_flops: float | None  # of all devices; None: not on file
    reference: Mapping[str, float]
    reasons: Mapping[str, str]
    warnings: tuple[str, ...]
    fixed: Fixed
    # microbatches are computed one by one, and what they give is added along TreeSum's tree
    exact: bool = False
    # what a microbatch takes each device, by which they are assigned; empty: evenly
    microbatch_seconds: tuple[float, ...] = ()
    whole_batch: bool = False  # the loss is one of the whole batch's features (Task.batch_loss)
    compile: bool = False
    float8: bool = False
    allow_coupled: bool = False  # what the split check finds is said, not refused

    def __repr__(self) -> str:
        devices = counted(self.num_devices, "device")
        return (
            f"<Plan: {self.engine} {self.strategy} on {devices}, batch {self.global_batch_size},"
            f" {self.steps} steps>"
        )

    @property
    def num_devices(self) -> int:
        return len(self.devices)

    @property
    def spec(self) -> StrategySpec:
        """What there is to know of its strategy."""
        return STRATEGIES[self.engine, self.strategy]

    @property
    def is_one_process(self) -> bool:
        """Whether the process that launches trains by itself: one process, and nobody to meet."""
        return self.backend == "none" or (self.engine == "jax" and self.world_size == 1)

    def devices_of(self, rank: int) -> range:
        """Which of the devices one process computes on."""
        each = self.num_devices // self.world_size
        return range(rank * each, (rank + 1) * each)

    def microbatches_of(self, count: int, device: int) -> range:
        """Which of a step's `count` microbatches are one device's."""
        return microbatches_of(count, device, self.num_devices, self.microbatch_seconds)

    def assignment(self, samples: int, device: int) -> Assignment:
        """What one device does in a step of so many samples."""
        return assign(
            samples, self.micro_batch_size, device, self.num_devices, self.microbatch_seconds
        )

    @property
    def is_split(self) -> bool:
        """Whether a step has several microbatches, on however many devices."""
        return self.global_batch_size > self.micro_batch_size

    @property
    def microbatches_per_device(self) -> tuple[int, ...]:
        """Microbatches of each device in a full step."""
        count = count_microbatches(self.global_batch_size, self.micro_batch_size)
        return tuple(len(self.microbatches_of(count, device)) for device in range(self.num_devices))

    @property
    def can_be_uneven(self) -> bool:
        """Whether some devices could take more microbatches than others."""
        return self.num_devices > 1 and self.spec.can_be_uneven and not self.every_rank_every_round

    @property
    def memory_estimate(self) -> int | None:
        """Bytes of a device's peak, as it is measured: without the process itself on a GPU.

        None: activations are not known.
        """
        if not any(term.name == "activations" for term in self.memory):
            return None
        on_cpu = self.devices[0].kind == "cpu"
        return sum(term.bytes for term in self.memory if term.name != "process" or on_cpu)

    @cached_property
    def order(self) -> Order:
        return Order(self.samples, self.global_batch_size, self.fixed.seed, self.fixed.anchor)

    def lr_at(self, step: int, task_factor: Callable[[int], float] | None = None) -> float:
        """task_factor: of a step, by the task's own schedule"""
        return self.schedule.at(step, task_factor)

    def progress_at(self, step: int) -> Progress:
        """step: counted from 0"""
        return Progress(step, self.order.epoch_of(step))

    def actions_due(self, done: int) -> set[str]:
        """What is to be done after so many steps; everything at the end."""
        if done >= self.steps and self.exact:
            return {"evaluate", "sample", "save", "hash"}
        if done >= self.steps:
            return {"evaluate", "sample", "save"}
        every = {
            "evaluate": self.every.evaluate,
            "sample": self.every.sample,
            "save": self.every.save,
            "hash": self.every.hash,
        }
        return {what for what, gap in every.items() if gap and done % gap == 0}

    def to_json(self) -> dict[str, Any]:
        """As plan.json and the journal hold it: their keys are public, and older than our names."""
        value = {_ON_DISK.get(name, name): item for name, item in asdict(self).items()}
        return {**value, "fixed": self.fixed.to_json()}

    @classmethod
    def from_json(cls, value: object) -> "Plan":
        """ValueError: something is missing, not known, or no such value."""
        names = {key: name for name, key in _ON_DISK.items()}
        on_disk = as_mapping(value)
        renamed = {names.get(key, key): item for key, item in on_disk.items()}
        renamed.pop("reseeded", None)  # older plans: whether masks followed the device
        unknown = renamed.keys() - {field.name for field in fields(cls)}
        if unknown:
            raise ValueError(f"{min(unknown)} is not known")
        parsed = checked(cls, {**renamed, "fixed": Fixed.from_json(on_disk.get("fixed"))})
        if (parsed.engine, parsed.strategy) not in STRATEGIES:
            raise ValueError(f"there is no strategy {parsed.strategy} of engine {parsed.engine}")
        if not 0 <= parsed.steps <= MOST_STEPS or not parsed.devices or parsed.world_size < 1:
            raise ValueError("a number of steps, devices or processes out of range")
        return parsed


def plan(config: Config, machine: Machine, facts: Facts, fixed: Fixed | None = None) -> Plan:
    """The list of decisions that make a run, each with its reason.

    fixed: what the run's first plan fixed for good; None: this is the first

    UserError: what the config asks for cannot be done on this machine, with the numbers and what
    can.
    """

    def fits(spec: StrategySpec, shards: int) -> bool:
        room = memory_room(config, facts, devices, spec=spec, shards=shards)
        return room.left >= (sample_bytes(config, facts) or 0)

    train, log = config.train, DecisionLog()
    devices = log.take(choose_devices(config, machine))
    layout = log.take(choose_layout(config, devices, started=machine.started, fits=fits))
    backend = log.take(choose_sync(config, layout))
    _check_same_run(config, facts, fixed)
    capacity = log.take(choose_capacity(config, facts, layout))
    memory = list(capacity.terms)
    speeds = choose_speeds(config, facts, layout)
    if train.exact:
        check_exact(config, facts, layout)
        split = log.take(choose_exact_batch(config, fixed, layout.num_devices))
    else:
        split = log.take(choose_batch(config, fixed, capacity, layout.num_devices))
    check_count(split)
    if speeds:
        split = log.take(choose_uneven_split(speeds, split, may_cut=not train.exact))
    if train.exact:
        exact_term = exact_memory(
            config, facts, layout, split, capacity=capacity.samples, is_resumed=fixed is not None
        )
        memory.append(exact_term)
    threads = log.take(choose_threads(config, machine, layout, fixed))
    seed, anchor = train.seed, Anchor()
    if fixed is not None:
        seed, anchor = fixed.seed, fixed.anchor
    order = Order(facts.samples, split.global_batch_size, seed, anchor)
    schedule = log.take(choose_schedule(config, order, facts.schedule))
    log.take(check_coupled(config, facts, layout, split))
    log.take(say_modes(facts))
    log.take(check_optimizer(config, facts, layout))
    log.take(say_task_steps(facts, layout))
    log.take(say_batch_loss(facts, split))
    compiled = log.take(check_compile(config, facts))
    float8 = log.take(check_float8(config, facts, layout))
    log.take(_say_dropout(facts))
    precision = log.take(_say_precision(config, layout))
    check_recompute(config, facts)
    computed_on = f"{config.engine} on {layout.devices[0].name}"
    log.warnings += batch_warnings(config, facts, split)
    log.warnings += layout_warnings(config, layout, memory)
    log.warnings += _warn_of_other_bits(config, fixed, computed_on)
    more_terms = (
        activation_term(config, facts, split.micro_batch_size),
        after_step_term(config, facts, layout),
        feature_term(config, facts, split.global_batch_size),
    )
    memory += [term for term in more_terms if term]
    if fixed is None:
        fixed = Fixed(
            global_batch_size=split.global_batch_size,
            micro_batch_size=split.micro_batch_size,
            seed=seed,
            samples=facts.samples,
            fingerprint=facts.fingerprint,
            threads=threads,
            computed_on=computed_on,
        )
    norm_sync = train.norm_sync and bool(facts.coupled)
    meets_every_round = layout.every_rank_every_round or norm_sync
    return Plan(
        engine=config.engine,
        strategy=layout.strategy,
        backend=backend,
        devices=layout.devices,
        visible=len(machine.devices) or layout.num_devices,
        world_size=layout.world_size,
        shards=layout.shards,
        every_rank_every_round=meets_every_round and not train.exact,
        global_batch_size=split.global_batch_size,
        micro_batch_size=split.micro_batch_size,
        accumulation_steps=split.accumulation_steps,
        nominal_weight=nominal_weight(split.global_batch_size, facts.tokens_per_sample),
        steps=schedule.steps,
        samples=facts.samples,
        eval_samples=facts.eval_samples,
        tokens_per_sample=facts.tokens_per_sample,
        precision=precision,
        threads=threads,
        recompute=train.recompute,
        norm_sync=norm_sync,
        reshard=config.devices.reshard and config.engine == "torch",
        offload=config.devices.offload,
        compress=config.devices.compress,
        keyed_dropout=bool(facts.keyed_dropout),
        preflight=config.devices.preflight,
        schedule=schedule,
        every=choose_intervals(train, order),
        keep=train.keep,
        non_finite=train.non_finite,
        memory=tuple(memory),
        flops_per_step=_flops_per_step(facts, split.global_batch_size),
        peak_flops=_peak_flops(layout.devices, precision),
        reference=facts.reference,
        reasons=log.reasons,
        warnings=tuple(log.warnings),
        fixed=replace(fixed, global_batch_size=split.global_batch_size),
        exact=train.exact,
        microbatch_seconds=split.microbatch_seconds,
        whole_batch=facts.whole_batch,
        compile=compiled,
        float8=float8,
        allow_coupled=train.allow_coupled,
    )


def _check_same_run(config: Config, facts: Facts, fixed: Fixed | None) -> None:
    """UserError: there is no data, or it is not what the run began with."""
    if facts.samples < 1:
        raise UserError(
            "the training data has no sample", "give more text, or a shorter --seq-len", "data"
        )
    if fixed is None:
        return
    if fixed.fingerprint != facts.fingerprint:
        raise UserError(
            "the data has changed since this run began",
            "bring the old data back, or begin a new run with another --save-dir",
            "data",
        )
    if fixed.seed != config.train.seed:
        raise UserError(
            f"this run began with seed {fixed.seed}, not {config.train.seed}",
            f"--set train.seed={fixed.seed}, or another --save-dir",
            "train.seed",
        )


def _say_dropout(facts: Facts) -> Decision[None]:
    count = len(facts.keyed_dropout)
    if not count:
        return Decision(None)
    reason = f"masks of {counted(count, 'layer')} follow the sample, whatever the device"
    return Decision(None, {"dropout": reason})


def _say_precision(config: Config, layout: Layout) -> Decision[Precision]:
    precision, reason = config.train.precision, "train.precision"
    if precision == "f32" and layout.devices[0].peak("bf16"):
        reason += "; --dtype bf16 is several times faster on this GPU"
    return Decision(precision, {"precision": reason})


def _warn_of_other_bits(config: Config, fixed: Fixed | None, computed_on: str) -> list[str]:
    """An exact run that goes on where its bits are others."""
    began_on = fixed.computed_on if fixed else ""
    if not config.train.exact or began_on in {"", computed_on}:
        return []
    return [f"this run began with {began_on}; from here its bits are those of {computed_on}"]


def _flops_per_step(facts: Facts, batch: int) -> float | None:
    if not facts.flops_per_sample:
        return None
    return facts.flops_per_sample * batch


def _peak_flops(devices: tuple[Device, ...], precision: Precision) -> float | None:
    """Of all devices together; None: one of them is not on file."""
    peaks = [device.peak(precision) for device in devices]
    known = [peak for peak in peaks if peak]
    return sum(known) if len(known) == len(peaks) else None
