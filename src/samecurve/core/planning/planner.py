"""plan(): what a run will do, and why.

A pure function; every worker obeys its result, and nothing after it changes a number.
"""

from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from samecurve.core.config import Precision
from samecurve.core.config.sections import Config
from samecurve.core.determinism.data_order import Order
from samecurve.core.planning import Decision, DecisionLog
from samecurve.core.planning.batch import (
    BatchSplit,
    batch_warnings,
    choose_batch,
)
from samecurve.core.planning.capacity import (
    Capacity,
    choose_capacity,
    fits_on,
    room_of_layout,
)
from samecurve.core.planning.compute import (
    Compute,
    check_coupled,
    check_model_computes,
    check_precision,
    choose_compute,
    choose_precision,
    choose_threads,
    say_task,
)
from samecurve.core.planning.facts import Facts
from samecurve.core.planning.fixed import Fixed, check_same_run, make_order
from samecurve.core.planning.layout import (
    Layout,
    choose_layout,
    choose_strategy,
    layout_warnings,
)
from samecurve.core.planning.machine import (
    Device,
    Machine,
    choose_devices,
    peak_flops,
)
from samecurve.core.planning.memory import (
    MemoryOptions,
    MemoryTerm,
    memory_options,
    peak_terms,
)
from samecurve.core.planning.optimizer import check_engine_has, say_optimizer
from samecurve.core.planning.plan import Flops, Plan, StepMemory
from samecurve.core.planning.schedule import (
    Schedule,
    choose_intervals,
    choose_schedule,
)
from samecurve.errors import UserError

if TYPE_CHECKING:  # imported by runs that ask for the same bits, or may
    from samecurve.core.planning.same_bits import SameBits


def plan(config: Config, machine: Machine, facts: Facts, fixed: Fixed | None = None) -> Plan:
    """The decisions that make a run, each with its reason.

    fixed: what the run's first plan fixed for good; None: this is the first plan

    UserError: what the config asks for cannot be done on this machine, with the numbers and what
    can be done instead.
    """
    if not config.train.may_have_same_bits:
        return _Planning(config, machine, facts, fixed).plan()
    from samecurve.core.planning.exact import plan_bits

    def make(same_bits: "SameBits | None", why_not: Decision[None]) -> Plan:
        return _Planning(config, machine, facts, fixed, same_bits, why_not).plan()

    return plan_bits(config, machine, facts, fixed, make)


@dataclass(frozen=True)
class _Planning:
    """The inputs of a plan, and the log of its decisions."""

    config: Config
    machine: Machine
    facts: Facts
    fixed: Fixed | None  # None: this is the run's first plan
    same_bits: "SameBits | None" = None  # None: the run's bits may follow the devices
    why_not: Decision[None] = Decision(None)  # where the config leaves that to the plan
    log: DecisionLog = field(default_factory=DecisionLog)

    def plan(self) -> Plan:
        """Decide, in the order in which decisions follow from each other."""
        facts, log, train = self.facts, self.log, self.config.train
        precision, options = self._numbers()
        step = self._step(options, precision)
        layout, split = step.layout, step.split
        threads = self._threads(layout)
        compute = choose_compute(
            train,
            facts,
            precision=precision.value,
            threads=threads,
            same_bits=self.same_bits is not None,
        )
        fixed = self._fixed(layout, split, compute)
        order = make_order(facts.data.samples, facts.data.buckets, split.global_batch_size, fixed)
        schedule = self._schedule(order)
        self._explain_training(layout, split, precision, options)
        features = self._features(layout, split, options, compute)
        self._say_bits(layout, split, threads)
        self._warn(layout, split, step.terms, fixed)
        return Plan(
            layout=layout,
            batch=split,
            schedule=schedule,
            memory=step.terms,
            compute=compute,
            reasons=log.reasons,
            warnings=tuple(log.warnings),
            fixed=fixed,
            data=facts.data,
            steps=schedule.steps,
            every=log.take(choose_intervals(train, order, hashes=compute.same_bits)),
            keep=train.keep,
            best=train.goal,
            flops=count_flops(facts, split, layout, precision.value),
            features=features,
        )

    def _numbers(self) -> tuple[Decision[Precision], MemoryOptions]:
        """The precision, and what of the config the memory follows from."""
        config = self.config
        devices = choose_devices(config.devices, config.engine, self.machine).value
        precision = choose_precision(config.train, config.engine, devices)
        options = memory_options(
            config, precision.value, devices[0].kind, brought=self.facts.features
        )
        return precision, options

    def _step(self, options: MemoryOptions, precision: Decision[Precision]) -> StepMemory:
        """The layout of a step, its microbatches and its memory."""
        facts, log, train = self.facts, self.log, self.config.train
        layout = log.take(self._layout(options, log.take(self._devices(options, precision))))
        check_same_run(self.fixed, facts.data.samples, facts.fingerprint, train.seed)
        for feature in options.features:
            feature.check_model(self.config, facts)
        capacity = log.take(choose_capacity(options, facts, layout))
        return self._memory(options, layout, self._split(layout, capacity, options), capacity)

    def _devices(
        self, options: MemoryOptions, precision: Decision[Precision]
    ) -> Decision[tuple[Device, ...]]:
        """The run's devices."""
        config, machine = self.config, self.machine
        if self.same_bits is None:
            return choose_devices(config.devices, config.engine, machine)
        trial = replace(self, log=DecisionLog())  # what it logs is not kept
        was_tried = self.facts.measured.largest_tried is not None  # by one rank
        return self.same_bits.devices(partial(trial.holds, options, precision), was_tried=was_tried)

    def holds(
        self,
        options: MemoryOptions,
        precision: Decision[Precision],
        devices: tuple[Device, ...],
    ) -> bool:
        """Whether the run fits on these devices, without shards unless it asks for them."""
        try:
            layout = self._layout(options, devices).value
            capacity = choose_capacity(options, self.facts, layout).value
            step = self._memory(options, layout, self._split(layout, capacity, options), capacity)
            self._explain_training(step.layout, step.split, precision, options)
        except UserError:
            return False
        return layout.shards == 1 or self.config.devices.strategy != "auto"

    def _layout(self, options: MemoryOptions, devices: tuple[Device, ...]) -> Decision[Layout]:
        """The layout of the config's strategy or, with --strategy auto, of one that fits."""
        section = self.config.devices
        fits = fits_on(options, self.facts, devices)
        strategy = choose_strategy(section, self.config.engine, devices, fits)
        syncs_norms = any(feature.syncs_norms for feature in options.features)
        layout = choose_layout(
            section,
            strategy,
            devices,
            self.machine,
            syncs_norms=syncs_norms and bool(self.facts.coupled),
            fixed_microbatches=self.same_bits is not None,
        )
        for feature in options.features:
            feature.check(self.config, layout.value)
            if self.facts.measured.speeds is None:
                feature.check_unmeasured(self.config, layout.value)
        if self.same_bits:
            self.same_bits.check_features(options.features)
        return layout

    def _split(self, layout: Layout, capacity: Capacity, options: MemoryOptions) -> BatchSplit:
        """The even split, or what a feature makes of it."""
        if self.same_bits is None:
            even = choose_batch(self.config.batch, self.fixed, capacity, layout.num_devices)
        else:
            self.same_bits.check_layout(layout)
            self.same_bits.check_model(self.facts, layout)
            even = self.same_bits.split(layout.num_devices, layout.interleaved)
        split = self.log.take(even)
        for feature in options.features:
            other = feature.split(self.config, self.facts, split, may_cut=self.same_bits is None)
            split = self.log.take(other) if other else split
        return split

    def _memory(
        self, options: MemoryOptions, layout: Layout, split: BatchSplit, capacity: Capacity
    ) -> StepMemory:
        """The memory of a step, with the layout and the split that it leaves room for."""
        facts = self.facts
        held = room_of_layout(options, facts, layout, split.micro_batch_size).terms
        if self.same_bits:
            held += self.same_bits.memory(options, facts, layout, split, capacity.samples)
        terms = peak_terms(held, options, facts, split, layout.shards)
        by_round = StepMemory(layout, split, terms, self.same_bits)
        if split.accumulation_steps == 1 or not layout.is_sharded_by_block:
            return by_round
        from samecurve.core.planning.gather import choose_gather

        section = self.config.devices
        return self.log.take(choose_gather(section, options, facts, capacity, by_round))

    def _threads(self, layout: Layout) -> int:
        """Threads inside one device's operations."""
        if self.same_bits:
            return self.log.take(self.same_bits.threads(layout))
        return self.log.take(choose_threads(self.config.devices, layout, self.machine))

    def _schedule(self, order: Order) -> Schedule:
        """The learning rate of each step."""
        config, by_task = self.config, self.facts.updates.schedule
        steps, lr = config.train.steps, config.optimizer.lr
        chosen = choose_schedule(
            config.schedule, steps, config.batch, order, lr=lr, by_task=by_task
        )
        return self.log.take(chosen)

    def _features(
        self, layout: Layout, split: BatchSplit, options: MemoryOptions, compute: Compute
    ) -> dict[str, Any]:
        """What the run has of each feature that the config names or the task brings."""
        if not options.features:
            return {}
        from samecurve.core.feature import Planned

        planned = Planned(
            config=self.config,
            machine=self.machine,
            facts=self.facts,
            options=options,
            compute=compute,
            layout=layout,
            split=split,
        )
        decided = {
            feature.name: self.log.take(feature.decide(planned)) for feature in options.features
        }
        return {name: value for name, value in decided.items() if value is not None}

    def _fixed(self, layout: Layout, split: BatchSplit, compute: Compute) -> Fixed:
        """The values of the run's first plan; this plan's own where this is the first."""
        train = self.config.train
        if self.fixed is not None:
            size, same_bits = split.global_batch_size, compute.same_bits
            return replace(self.fixed, global_batch_size=size, same_bits=same_bits)
        return Fixed(
            global_batch_size=split.global_batch_size,
            micro_batch_size=split.micro_batch_size,
            seed=train.seed,
            samples=self.facts.data.samples,
            fingerprint=self.facts.fingerprint,
            threads=compute.threads,
            computed_on=layout.computed_on,
            same_bits=compute.same_bits,
        )

    def _explain_training(
        self,
        layout: Layout,
        split: BatchSplit,
        precision: Decision[Precision],
        options: MemoryOptions,
    ) -> None:
        """Log what the task, the optimizer and the section `train` make of a step.

        UserError: the engine, the devices or the model can't serve them.
        """
        config, facts, log, train = self.config, self.facts, self.log, self.config.train
        fixed = self.same_bits is not None
        settled = [feature.settles(facts.coupled, split) for feature in options.features]
        check_coupled(
            log, train, facts.coupled, split, fixed_microbatches=fixed, settled="".join(settled)
        )
        say_task(log, facts)
        check_engine_has(config.optimizer, config.engine)
        say_optimizer(log, config.optimizer, config.schedule, facts, layout)
        if self.same_bits:
            self.same_bits.check_optimizer(facts, layout)
        check_precision(log.take(precision), layout)
        check_model_computes(precision.value, facts)

    def _say_bits(self, layout: Layout, split: BatchSplit, threads: int) -> None:
        """Log on how many devices the bits are the same, or why they are not."""
        if self.same_bits:
            self.same_bits.say(self.log, layout, split, threads)
        self.log.take(self.why_not)

    def _warn(
        self, layout: Layout, split: BatchSplit, terms: tuple[MemoryTerm, ...], fixed: Fixed
    ) -> None:
        """Warn of what the config asked for and does not get, and of what the layout costs."""
        train, warnings = self.config.train, self.log.warnings
        warnings += batch_warnings(self.config.batch, self.facts, split)
        if train.eval_every and not self.facts.data.eval_samples:
            warnings.append(
                "there is nothing to evaluate on: no data is held back (data.validation;"
                " eval_data() of a user task)"
            )
        optimizer_bytes = sum(term.bytes for term in terms if term.name == "optimizer")
        is_even = not self.config.fixes_devices
        warnings += layout_warnings(self.config.devices, layout, optimizer_bytes, is_even=is_even)
        if fixed.same_bits and fixed.computed_on not in {"", layout.computed_on}:
            warnings.append(
                f"this run began with {fixed.computed_on}; from here its bits are those of"
                f" {layout.computed_on}"
            )


def count_flops(facts: Facts, split: BatchSplit, layout: Layout, precision: Precision) -> Flops:
    """The operations of a step, and the peak of the devices."""
    each = facts.flops_per_sample
    return Flops(
        flops_per_step=each * split.global_batch_size if each else None,
        peak_flops=peak_flops(layout.devices, precision),
    )
