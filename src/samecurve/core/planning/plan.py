"""The plan of a run: all that was decided before its first step, as every worker obeys it.

planner.py decides. A plan is written to plan.json, whose keys are public.
"""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, is_dataclass
from functools import cached_property
from operator import attrgetter
from typing import Any

from samecurve.core.config.values import MOST_STEPS, Precision, Recompute
from samecurve.core.determinism.data_order import Order
from samecurve.core.determinism.microbatches import Assignment
from samecurve.core.evaluation.metric_goal import EarlyStopRule, MetricGoal
from samecurve.core.planning.batch import BatchSplit
from samecurve.core.planning.compute import Compute
from samecurve.core.planning.fixed import Fixed, as_mapping, parse_dataclass
from samecurve.core.planning.layout import Layout
from samecurve.core.planning.machine import Device
from samecurve.core.planning.memory import MemoryTerm
from samecurve.core.planning.schedule import Intervals, Schedule
from samecurve.core.protocols import Held, Progress
from samecurve.core.strategies import STRATEGIES, StrategySpec
from samecurve.units import counted

# keys of plan.json, in their order: where a plan has their values
_ON_DISK = {
    "engine": "layout.engine",
    "strategy": "layout.strategy",
    "backend": "layout.backend",
    "devices": "layout.devices",
    "visible": "layout.visible",
    "processes": "layout.world_size",
    "shards": "layout.shards",
    "together": "layout.every_rank_every_round",
    "batch": "batch.global_batch_size",
    "micro": "batch.micro_batch_size",
    "rounds": "batch.accumulation_steps",
    "nominal": "nominal_weight",
    "steps": "steps",
    "samples": "samples",
    "eval_samples": "eval_samples",
    "tokens_per_sample": "tokens_per_sample",
    "precision": "compute.precision",
    "threads": "compute.threads",
    "recompute": "compute.recompute",
    "norm_sync": "compute.norm_sync",
    "reshard": "layout.reshard",
    "offload": "layout.offload",
    "compress": "layout.compress",
    "keyed": "compute.keyed_dropout",
    "preflight": "layout.preflight",
    "schedule": "schedule",
    "every": "every",
    "keep": "keep",
    "non_finite": "compute.non_finite",
    "memory": "memory",
    "flops_per_step": "flops_per_step",
    "peak_flops": "peak_flops",
    "reference": "reference",
    "because": "reasons",
    "warnings": "warnings",
    "fixed": "fixed",
    "exact": "compute.exact",
    "slot_times": "batch.microbatch_seconds",
    "whole_batch": "compute.whole_batch",
    "compile": "compute.compile",
    "float8": "compute.float8",
    "allow_coupled": "compute.allow_coupled",
    "best": "best",
    "early_stop": "early_stop",
    "test_samples": "test_samples",
    "ema": "compute.ema",
}
_DERIVED = {"rounds"}  # follows from the others
_OLDER = {"reseeded"}  # of older plans: whether masks followed the device


@dataclass(frozen=True, kw_only=True, repr=False)
class Plan:
    """All that was decided before the first step; every worker obeys it."""

    layout: Layout
    batch: BatchSplit
    schedule: Schedule
    memory: tuple[MemoryTerm, ...]
    compute: Compute
    reasons: Mapping[str, str]
    warnings: tuple[str, ...]
    fixed: Fixed
    steps: int
    samples: int
    eval_samples: int
    tokens_per_sample: int
    nominal_weight: float  # core/determinism/step_arithmetic.py
    every: Intervals
    keep: int
    flops_per_step: float | None  # None: not known
    peak_flops: float | None  # of all devices; None: not on file
    reference: Mapping[str, float]
    best: MetricGoal = MetricGoal()
    early_stop: EarlyStopRule | None = None
    test_samples: int = 0  # of the task's test data, measured once at the end

    def __repr__(self) -> str:
        devices = counted(self.num_devices, "device")
        return (
            f"<Plan: {self.engine} {self.strategy} on {devices}, batch {self.global_batch_size},"
            f" {self.steps} steps>"
        )

    @property
    def engine(self) -> str:
        return self.layout.engine

    @property
    def strategy(self) -> str:
        return self.layout.strategy

    @property
    def spec(self) -> StrategySpec:
        return self.layout.spec

    @property
    def backend(self) -> str:
        return self.layout.backend

    @property
    def devices(self) -> tuple[Device, ...]:
        return self.layout.devices

    @property
    def num_devices(self) -> int:
        return self.layout.num_devices

    @property
    def world_size(self) -> int:
        return self.layout.world_size

    @property
    def shards(self) -> int:
        return self.layout.shards

    @property
    def is_one_process(self) -> bool:
        return self.layout.is_one_process

    def devices_of(self, rank: int) -> range:
        return self.layout.devices_of(rank)

    @property
    def global_batch_size(self) -> int:
        return self.batch.global_batch_size

    @property
    def micro_batch_size(self) -> int:
        return self.batch.micro_batch_size

    @property
    def accumulation_steps(self) -> int:
        return self.batch.accumulation_steps

    @property
    def is_split(self) -> bool:
        return self.batch.is_split

    def microbatches_of(self, count: int, device: int) -> range:
        return self.batch.microbatches_of(count, device)

    def assignment(self, samples: int, device: int) -> Assignment:
        return self.batch.assignment(samples, device)

    @property
    def precision(self) -> Precision:
        return self.compute.precision

    @property
    def recompute(self) -> Recompute:
        return self.compute.recompute

    @property
    def threads(self) -> int:
        return self.compute.threads

    @property
    def exact(self) -> bool:
        return self.compute.exact

    @property
    def whole_batch(self) -> bool:
        return self.compute.whole_batch

    @property
    def compile(self) -> bool:
        return self.compute.compile

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
        """The learning rate of a step.

        task_factor: gives the factor of a step, by the task's own schedule
        """
        return self.schedule.at(step, task_factor)

    def progress_at(self, step: int) -> Progress:
        """step: counted from 0"""
        return Progress(step, self.order.epoch_of(step))

    def held_out(self, which: Held) -> int:
        """Samples of the test data or of the evaluation data."""
        return self.test_samples if which == "test" else self.eval_samples

    def actions_at_end(self) -> set[str]:
        return {"evaluate", "sample", "save", *(["hash"] if self.exact else [])}

    def stops_early(self, waited: int) -> bool:
        """waited: evaluations in a row without a better one"""
        return self.early_stop is not None and waited >= self.early_stop.patience

    def actions_due(self, done: int) -> set[str]:
        """The actions that are due after so many steps; after the last step, all of them."""
        if done >= self.steps:
            return self.actions_at_end()
        return {what for what, gap in self._steps_between.items() if done % gap == 0}

    def next_due(self, done: int) -> int:
        """The first step after `done` for which actions_due() gives something."""
        following = (done - done % gap + gap for gap in self._steps_between.values())
        return min(self.steps, *following) if self._steps_between else self.steps

    @property
    def _steps_between(self) -> dict[str, int]:
        every = {
            "evaluate": self.every.evaluate,
            "sample": self.every.sample,
            "save": self.every.save,
            "hash": self.every.hash,
        }
        return {what: gap for what, gap in every.items() if gap}

    def to_json(self) -> dict[str, Any]:
        """The form in plan.json and the journal, whose public keys are older than our names."""
        values = {key: _plain(attrgetter(path)(self)) for key, path in _ON_DISK.items()}
        return {**values, "fixed": self.fixed.to_json()}

    @classmethod
    def from_json(cls, value: object) -> "Plan":
        """ValueError: a key is missing, not known, or has no such value."""
        on_disk = as_mapping(value)
        unknown = on_disk.keys() - _ON_DISK.keys() - _OLDER
        if unknown:
            raise ValueError(f"{min(unknown)} is not known")
        devices = on_disk.get("devices")
        if not isinstance(devices, list | tuple) or not devices:
            raise ValueError("there are no devices")
        batch = {"num_devices": len(devices)}
        parts: dict[str, Any] = {"layout": {}, "batch": batch, "compute": {}}
        for key in on_disk.keys() - _DERIVED - _OLDER:
            part, _, name = _ON_DISK[key].rpartition(".")
            (parts[part] if part else parts)[name] = on_disk[key]
        parsed = parse_dataclass(cls, {**parts, "fixed": Fixed.from_json(on_disk.get("fixed"))})
        if (parsed.engine, parsed.strategy) not in STRATEGIES:
            raise ValueError(f"there is no strategy {parsed.strategy} of engine {parsed.engine}")
        if not 0 <= parsed.steps <= MOST_STEPS or parsed.world_size < 1:
            raise ValueError("a number of steps, devices or processes out of range")
        return parsed


def _plain(value: Any) -> Any:
    """A value of the plan, with dataclasses as dictionaries."""
    if isinstance(value, tuple):
        return tuple(_plain(item) for item in value)
    return asdict(value) if is_dataclass(value) and not isinstance(value, type) else value
