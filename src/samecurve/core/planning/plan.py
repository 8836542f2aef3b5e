"""The plan of a run: all that was decided before its first step, as every worker obeys it.

planner.py decides. A plan is written to plan.json, whose keys are public.
"""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from typing import Any

from samecurve.core.config.values import MOST_STEPS, Compress, Precision, Recompute
from samecurve.core.determinism.data_order import Order
from samecurve.core.determinism.microbatches import (
    Assignment,
    assign,
    count_microbatches,
    microbatches_of,
)
from samecurve.core.evaluation.metric_goal import EarlyStopRule, MetricGoal
from samecurve.core.planning.facts import Fixed, as_mapping, checked
from samecurve.core.planning.machine import Device
from samecurve.core.planning.memory import MemoryTerm
from samecurve.core.planning.run_length import Intervals
from samecurve.core.planning.schedule import Schedule
from samecurve.core.planning.strategies import STRATEGIES, StrategySpec
from samecurve.core.protocols import Held, Progress
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
    best: MetricGoal = MetricGoal()
    early_stop: EarlyStopRule | None = None
    test_samples: int = 0  # of the task's test data, measured once at the end
    ema: float = 0.0  # decay of the weights' moving average; 0: there is none

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

    def held_out(self, which: Held) -> int:
        """Samples of that data."""
        return self.test_samples if which == "test" else self.eval_samples

    def actions_at_end(self) -> set[str]:
        return {"evaluate", "sample", "save", *(["hash"] if self.exact else [])}

    def stops_early(self, waited: int) -> bool:
        """waited: evaluations in a row without a better one"""
        return self.early_stop is not None and waited >= self.early_stop.patience

    def actions_due(self, done: int) -> set[str]:
        """What is to be done after so many steps; everything at the end."""
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
