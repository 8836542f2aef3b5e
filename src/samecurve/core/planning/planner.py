"""plan(): what a run will do, and why.

A pure function; every worker obeys its result, nothing after it changes a number.
"""

from dataclasses import dataclass, replace

from samecurve.core.config.sections import Config
from samecurve.core.config.values import Precision
from samecurve.core.determinism.data_order import Anchor, Order
from samecurve.core.determinism.step_arithmetic import nominal_weight
from samecurve.core.evaluation.metric_goal import EarlyStopRule
from samecurve.core.planning.balance import choose_speeds, choose_uneven_split
from samecurve.core.planning.batch import BatchSplit, batch_warnings, check_count, choose_batch
from samecurve.core.planning.capacity import Capacity, choose_capacity, memory_room
from samecurve.core.planning.compatibility import (
    after_step_term,
    check_coupled,
    check_narrow,
    check_optimizer,
    check_recompute,
    layout_warnings,
    say_average,
    say_batch_loss,
    say_modes,
    say_notes,
    say_task_steps,
)
from samecurve.core.planning.decision import Decision, DecisionLog
from samecurve.core.planning.exact import check_exact, choose_exact_batch, exact_memory
from samecurve.core.planning.facts import Facts, Fixed
from samecurve.core.planning.layout import (
    Layout,
    choose_devices,
    choose_layout,
    choose_sync,
    choose_threads,
)
from samecurve.core.planning.machine import Device, Machine
from samecurve.core.planning.memory import (
    MemoryTerm,
    activation_term,
    feature_term,
    sample_bytes,
    settled,
)
from samecurve.core.planning.plan import Plan
from samecurve.core.planning.run_length import (
    choose_early_stop,
    choose_intervals,
    choose_schedule,
)
from samecurve.core.planning.schedule import Schedule
from samecurve.core.planning.speed_options import (
    check_compile,
    check_float8,
    choose_precision,
    with_amp,
)
from samecurve.core.planning.strategies import StrategySpec
from samecurve.errors import UserError
from samecurve.units import counted


def plan(config: Config, machine: Machine, facts: Facts, fixed: Fixed | None = None) -> Plan:
    """The list of decisions that make a run, each with its reason.

    fixed: what the run's first plan fixed for good; None: this is the first

    UserError: what the config asks for cannot be done on this machine, with the numbers and what
    can.
    """

    def fits(spec: StrategySpec, shards: int) -> bool:
        room = memory_room(config, facts, devices, spec=spec, shards=shards)
        return room.left >= (sample_bytes(config, facts) or 0)

    log = DecisionLog()
    devices = log.take(choose_devices(config, machine))
    config, why_precision = with_amp(config, devices)
    layout = log.take(choose_layout(config, devices, started=machine.started, fits=fits))
    backend = log.take(choose_sync(config, layout))
    _check_same_run(config, facts, fixed)
    capacity = log.take(choose_capacity(config, facts, layout))
    split, memory = _choose_split(config, facts, layout, capacity=capacity, fixed=fixed, log=log)
    threads = log.take(choose_threads(config, machine, layout, fixed))
    seed, anchor = config.train.seed, Anchor()
    if fixed is not None:
        seed, anchor = fixed.seed, fixed.anchor
    order = Order(facts.samples, split.global_batch_size, seed, anchor)
    schedule = log.take(choose_schedule(config, order, facts.schedule))
    log.take(check_coupled(config, facts, layout, split))
    early_stop = log.take(choose_early_stop(config.train, facts))
    log.take(say_average(config.train))
    log.take(say_modes(facts))
    log.take(say_notes(facts))
    log.take(check_optimizer(config, facts, layout))
    log.take(say_task_steps(facts, layout))
    log.take(say_batch_loss(facts, split))
    compiled = log.take(check_compile(config, facts))
    float8 = log.take(check_float8(config, facts, layout))
    log.take(_say_dropout(facts))
    precision = log.take(choose_precision(config, layout, why_precision))
    check_recompute(config, facts)
    check_narrow(config, facts)
    computed_on = f"{config.engine} on {layout.devices[0].name}"
    log.warnings += batch_warnings(config, facts, split)
    log.warnings += layout_warnings(config, layout, memory)
    log.warnings += _warn_of_other_bits(config, fixed, computed_on)
    if fixed is None:
        fixed = _fix(split, facts, seed=seed, threads=threads, computed_on=computed_on)
    chosen = _Chosen(
        layout=layout,
        backend=backend,
        split=split,
        memory=_peak_terms(memory, _terms_of_rows(config, facts, layout, split)),
        threads=threads,
        order=order,
        schedule=schedule,
        early_stop=early_stop,
        precision=precision,
        compile=compiled,
        float8=float8,
        fixed=replace(fixed, global_batch_size=split.global_batch_size),
    )
    return _assemble(config, machine, facts, chosen=chosen, log=log)


@dataclass(frozen=True, kw_only=True)
class _Chosen:
    """What was decided one by one, before it is put together."""

    layout: Layout
    backend: str
    split: BatchSplit
    memory: tuple[MemoryTerm, ...]
    threads: int
    order: Order
    schedule: Schedule
    early_stop: EarlyStopRule | None
    precision: Precision
    compile: bool
    float8: bool
    fixed: Fixed


def _choose_split(
    config: Config,
    facts: Facts,
    layout: Layout,
    *,
    capacity: Capacity,
    fixed: Fixed | None,
    log: DecisionLog,
) -> tuple[BatchSplit, list[MemoryTerm]]:
    """How a batch is cut, and what memory that takes beside the rows themselves."""
    is_exact, memory = config.train.exact, list(capacity.terms)
    speeds = choose_speeds(config, facts, layout)
    if is_exact:
        check_exact(config, facts, layout)
        split = log.take(choose_exact_batch(config, fixed, layout.num_devices))
    else:
        split = log.take(choose_batch(config, fixed, capacity, layout.num_devices))
    check_count(split)
    if speeds:
        split = log.take(choose_uneven_split(speeds, split, may_cut=not is_exact))
    if is_exact:
        exact_term = exact_memory(
            config, facts, layout, split, capacity=capacity.samples, is_resumed=fixed is not None
        )
        memory.append(exact_term)
    return split, memory


def _fix(split: BatchSplit, facts: Facts, *, seed: int, threads: int, computed_on: str) -> Fixed:
    """What the run's first plan fixes for good."""
    return Fixed(
        global_batch_size=split.global_batch_size,
        micro_batch_size=split.micro_batch_size,
        seed=seed,
        samples=facts.samples,
        fingerprint=facts.fingerprint,
        threads=threads,
        computed_on=computed_on,
    )


def _terms_of_rows(
    config: Config, facts: Facts, layout: Layout, split: BatchSplit
) -> list[MemoryTerm]:
    """Memory that follows from how many rows are computed at once."""
    terms = (
        activation_term(config, facts, split.micro_batch_size),
        after_step_term(config, facts, layout),
        feature_term(config, facts, split.global_batch_size),
    )
    return [term for term in terms if term]


def _peak_terms(held: list[MemoryTerm], of_rows: list[MemoryTerm]) -> tuple[MemoryTerm, ...]:
    """held: whatever the rows"""
    activations = sum(term.bytes for term in of_rows if term.name == "activations")
    return (*settled(held, activations), *of_rows)


def _assemble(
    config: Config, machine: Machine, facts: Facts, *, chosen: _Chosen, log: DecisionLog
) -> Plan:
    """The plan, of what was chosen and what the config says outright."""
    train, layout, split = config.train, chosen.layout, chosen.split
    norm_sync = train.norm_sync and bool(facts.coupled)
    meets_every_round = layout.every_rank_every_round or norm_sync
    return Plan(
        engine=config.engine,
        strategy=layout.strategy,
        backend=chosen.backend,
        devices=layout.devices,
        visible=len(machine.devices) or layout.num_devices,
        world_size=layout.world_size,
        shards=layout.shards,
        every_rank_every_round=meets_every_round and not train.exact,
        global_batch_size=split.global_batch_size,
        micro_batch_size=split.micro_batch_size,
        accumulation_steps=split.accumulation_steps,
        nominal_weight=nominal_weight(split.global_batch_size, facts.tokens_per_sample),
        steps=chosen.schedule.steps,
        samples=facts.samples,
        eval_samples=facts.eval_samples,
        test_samples=facts.test_samples,
        tokens_per_sample=facts.tokens_per_sample,
        precision=chosen.precision,
        threads=chosen.threads,
        recompute=train.recompute,
        norm_sync=norm_sync,
        reshard=config.devices.reshard and config.engine == "torch",
        offload=config.devices.offload,
        compress=config.devices.compress,
        keyed_dropout=bool(facts.keyed_dropout),
        preflight=config.devices.preflight,
        schedule=chosen.schedule,
        every=choose_intervals(train, chosen.order),
        keep=train.keep,
        non_finite=train.non_finite,
        memory=chosen.memory,
        flops_per_step=_flops_per_step(facts, split.global_batch_size),
        peak_flops=_peak_flops(layout.devices, chosen.precision),
        reference=facts.reference,
        reasons=log.reasons,
        warnings=tuple(log.warnings),
        fixed=chosen.fixed,
        exact=train.exact,
        microbatch_seconds=split.microbatch_seconds,
        whole_batch=facts.whole_batch,
        compile=chosen.compile,
        float8=chosen.float8,
        allow_coupled=train.allow_coupled,
        best=train.goal,
        early_stop=chosen.early_stop,
        ema=train.ema,
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
