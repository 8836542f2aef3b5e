"""The plan of a run: all that was decided before its first step, as every worker obeys it.

planner.py decides. A plan is written to plan.json, whose keys are public.
"""

from collections.abc import Callable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cached_property
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any, Literal

from samecurve.core.config import MOST_STEPS, MetricGoal
from samecurve.core.determinism.data_order import Order
from samecurve.core.determinism.step_arithmetic import nominal_weight
from samecurve.core.feature_list import (
    listed,
    listed_and_installed,
    listed_with,
    rows_of,
    sees_whole_batch,
)
from samecurve.core.planning.batch import BatchSplit
from samecurve.core.planning.compute import Compute
from samecurve.core.planning.facts import DataFacts
from samecurve.core.planning.fixed import Fixed, as_mapping, make_order, parse_dataclass
from samecurve.core.planning.layout import Layout
from samecurve.core.planning.memory import MemoryTerm
from samecurve.core.planning.schedule import Intervals, Schedule
from samecurve.core.protocols import Counters, Held, Progress
from samecurve.core.strategies import STRATEGIES
from samecurve.units import counted

if TYPE_CHECKING:  # imported by the features of a run alone
    from samecurve.core.feature import Feature
    from samecurve.core.planning.same_bits import SameBits

# keys of plan.json and of the journal, in their order; those of later fields follow
_ORDER = """
    engine strategy backend devices visible processes shards together batch micro rounds nominal
    steps samples eval_samples tokens_per_sample precision threads reshard
    keyed preflight schedule every keep non_finite memory flops_per_step peak_flops
    reference because warnings fixed exact slot_times allow_coupled best
    test_samples
"""
_NAMES = {  # of the fields whose keys are older than their names
    "processes": "world_size",
    "together": "every_rank_every_round",
    "batch": "global_batch_size",
    "micro": "micro_batch_size",
    "rounds": "accumulation_steps",
    "nominal": "nominal_weight",
    "keyed": "keyed_dropout",
    "because": "reasons",
    "slot_times": "microbatch_seconds",
    "exact": "same_bits",
}
# of older plans: whether masks followed the device; microbatches that a rank computed side by side
_OLDER = {"reseeded", "lanes"}
_DERIVED = ("nominal_weight", "accumulation_steps")  # from other values of a plan
# what is done between steps, by the names that Intervals has for it
_ACTIONS = ("evaluate", "sample", "save", "hash")


@dataclass(frozen=True)
class StepMemory:
    """The memory of a device at its peak, under a layout and a split."""

    layout: Layout
    split: BatchSplit
    terms: tuple[MemoryTerm, ...]
    same_bits: "SameBits | None" = None

    @property
    def bytes(self) -> int:
        return sum(term.bytes for term in self.terms)

    @property
    def is_known(self) -> bool:
        """Whether activations are counted."""
        return any(term.name == "activations" for term in self.terms)


@dataclass(frozen=True, kw_only=True)
class Flops:
    """Floating-point operations."""

    flops_per_step: float | None  # None: not known
    peak_flops: float | None  # of all devices, a second; None: not on file


# parts of a plan that have no key themselves: their fields stand beside those of the plan
_SECTIONS = {
    "layout": Layout,
    "batch": BatchSplit,
    "compute": Compute,
    "data": DataFacts,
    "flops": Flops,
}


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
    data: DataFacts
    steps: int
    every: Intervals
    keep: int
    flops: Flops
    best: MetricGoal = MetricGoal()
    # what the run has of each feature, by its name, in their order (core/feature_list.py)
    features: Mapping[str, Any] = field(default_factory=dict)

    def __repr__(self) -> str:
        devices = counted(self.num_devices, "device")
        return (
            f"<Plan: {self.layout.engine} {self.layout.strategy} on {devices},"
            f" batch {self.global_batch_size}, {self.steps} steps>"
        )

    # names that users read (docs/python.md); our own code asks the sections

    @property
    def samples(self) -> int:
        return self.data.samples

    @property
    def eval_samples(self) -> int:
        return self.data.eval_samples

    @property
    def num_devices(self) -> int:
        return self.layout.num_devices

    @property
    def world_size(self) -> int:
        return self.layout.world_size

    @property
    def global_batch_size(self) -> int:
        return self.batch.global_batch_size

    @property
    def same_bits(self) -> bool:
        """Whether the run has the same bits on any devices."""
        return self.compute.same_bits

    def say_bits(self) -> str:
        """Whether the run has the same bits on any devices, and why; '': that was not asked."""
        how = "exact" if self.same_bits else "not exact"
        if "exact_auto" in self.reasons:
            return f"{how} (auto): {self.reasons['exact_auto']}"
        return f"{how}: {self.reasons['exact']}" if self.same_bits else ""

    @property
    def at_start(self) -> dict[str, Any]:
        """What the journal has of the plan at each start of the run."""
        return {"exact": True} if self.same_bits else {}

    @property
    def micro_batch_size(self) -> int:
        return self.batch.micro_batch_size

    @property
    def accumulation_steps(self) -> int:
        return self.batch.accumulation_steps

    @property
    def memory_estimate(self) -> int | None:
        """Bytes of a device's peak, as it is measured: without the process itself on a GPU.

        None: activations are not known.
        """
        if not any(term.name == "activations" for term in self.memory):
            return None
        on_cpu = self.layout.devices[0].kind == "cpu"
        return sum(term.bytes for term in self.memory if term.name != "process" or on_cpu)

    @cached_property
    def nominal_weight(self) -> float:
        return nominal_weight(self.batch.global_batch_size, self.data.tokens_per_sample)

    @cached_property
    def order(self) -> Order:
        data, batch = self.data, self.batch.global_batch_size
        return make_order(data.samples, data.buckets, batch, self.fixed)

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
        return self.data.test_samples if which == "test" else self.data.eval_samples

    def evaluated_on(self, which: Literal["train", "test"]) -> "Plan":
        """The plan of an evaluation on other data in place of the held-out."""
        data = self.data
        samples = data.samples if which == "train" else data.test_samples
        buckets = {**data.buckets, "eval": data.buckets.get(which, ())}
        return replace(self, data=replace(data, eval_samples=samples, buckets=buckets))

    def held_out_parts(self, which: Held) -> list[tuple[int, int]]:
        """The intervals of ids [first, last) whose rows have one shape: one for each bucket."""
        samples = self.held_out(which)
        sizes = (samples and self.data.buckets.get(which)) or (samples,)
        bounds = [0, *accumulate(sizes)]
        return list(pairwise(bounds))

    def actions_at_end(self) -> set[str]:
        return {"evaluate", "sample", "save", *(["hash"] if self.same_bits else [])}

    @property
    def sees_whole_batch(self) -> bool:
        """Whether the loss is one of the whole batch's features."""
        return bool(self.features) and sees_whole_batch(self.features)

    @property
    def compiles_blocks(self) -> bool:
        """Whether engine torch compiles the model's blocks."""
        return any(feature.compiles_blocks for feature, _ in self._features_on())

    @cached_property
    def reruns_blocks(self) -> bool:
        """Whether blocks run again in backward."""
        return any(feature.reruns_blocks for feature, _ in self._features_on())

    @cached_property
    def keeps_state_on_host(self) -> bool:
        """Whether shards of weights, gradients and optimizer state lie in host memory."""
        return any(feature.keeps_state_on_host for feature, _ in self._features_on())

    @cached_property
    def syncs_norms(self) -> bool:
        """Whether norms that mix samples look at all devices."""
        return any(feature.syncs_norms for feature, _ in self._features_on())

    @property
    def rerun_share(self) -> float:
        """The share of a forward pass that runs again in backward."""
        engine = self.layout.engine
        return sum(feature.rerun_share(value, engine) for feature, value in self._features_on())

    def bytes_sent(self, width: int) -> int:
        """Bytes of one number of a gradient as devices send it. width: as it is computed"""
        for feature, value in self._features_on():
            width = feature.bytes_sent(value, width)
        return width

    @property
    def goals(self) -> list[MetricGoal]:
        """The metrics that an evaluation must give."""
        own = [goal for feature, value in self._features_on() for goal in feature.goals(value)]
        return [self.best, *own]

    def ends_early(self, counters: Counters) -> bool:
        """Whether a feature ends a run that has these counters."""
        return any(feature.ends_run(value, counters) for feature, value in self._features_on())

    @property
    def to_go_on(self) -> str:
        """What the user types to train on after features have ended a run."""
        return ", ".join(feature.to_go_on for feature, _ in self._features_on() if feature.to_go_on)

    def _features_on(self) -> Iterator[tuple["Feature[Any, Any]", Any]]:
        for row in rows_of(self.features) if self.features else ():
            yield row.load(), self.features[row.name]

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
        """The steps between actions, by the action's name or the feature's."""
        every = asdict(self.every)
        for name, (feature, value) in zip(self.features, self._features_on(), strict=True):
            every[name] = feature.steps_between(value)
        return {what: every[what] for what in (*_ACTIONS, *self.features) if every[what]}

    def to_json(self) -> dict[str, Any]:
        """The form in plan.json and the journal, whose public keys are older than our names."""
        values = asdict(self)
        for section in _SECTIONS:
            values |= values.pop(section)
        # these follow from the others
        values |= {name: getattr(self, name) for name in _DERIVED}
        values["fixed"] = self.fixed.to_json()
        names = _names_by_key()
        written = {key: values[name] for key, name in names.items() if name in values}
        for row in listed_with(self.features):
            if row.name in self.features:
                value = row.load().to_json(self.features[row.name])
                _put(written, row.plan_key, value)
            elif row.is_in_each_plan:
                _put(written, row.plan_key, row.plan_off)
        return written

    @classmethod
    def from_json(cls, value: object) -> "Plan":
        """ValueError: a key is missing, not known, or has no such value."""
        names_by_key = _names_by_key()
        on_disk, features = _take_features(as_mapping(value), names_by_key.keys() | _OLDER)
        unknown = on_disk.keys() - names_by_key.keys() - _OLDER
        if unknown:
            raise ValueError(f"{min(unknown)} is not known")
        devices = on_disk.get("devices")
        if not isinstance(devices, list | tuple) or not devices:
            raise ValueError("there are no devices")
        values = {names_by_key[key]: on_disk[key] for key in on_disk.keys() - _OLDER}
        for name in _DERIVED:
            values.pop(name, None)
        values["num_devices"] = len(devices)
        for section, kind in _SECTIONS.items():
            names = {field.name for field in fields(kind)} & values.keys()
            values[section] = {name: values.pop(name) for name in names}
        # plans older than `exact` in `fixed` say it once
        fixed = {"exact": on_disk.get("exact") is True, **as_mapping(on_disk.get("fixed"))}
        parsed = parse_dataclass(
            cls, {**values, "fixed": Fixed.from_json(fixed), "features": features}
        )
        layout = parsed.layout
        if (layout.engine, layout.strategy) not in STRATEGIES:
            raise ValueError(f"there is no strategy {layout.strategy} of engine {layout.engine}")
        if not 0 <= parsed.steps <= MOST_STEPS or layout.world_size < 1:
            raise ValueError("a number of steps, devices or processes out of range")
        return parsed


def _put(written: dict[str, Any], key: str, value: Any) -> None:
    """Put a value under a key of plan.json; "every.name" is a key within `every`."""
    *within, last = key.split(".")
    for name in within:
        written = written[name]
    written[last] = value


def _take_features(
    on_disk: Mapping[str, Any], known: AbstractSet[str]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """A plan without the keys of features, and what it has of each feature.

    known: keys that are no feature's

    ValueError: a feature has no such value.
    """
    rest, features = dict(on_disk), {}
    rows = listed()
    if on_disk.keys() - known - {row.plan_key for row in rows}:
        rows = listed_and_installed()
    for row in rows:
        within, _, last = row.plan_key.rpartition(".")
        if within and isinstance(rest.get(within), Mapping):
            rest[within] = dict(rest[within])
        at = rest.get(within) if within else rest
        value = at.pop(last, row.plan_off) if isinstance(at, dict) else row.plan_off
        if value != row.plan_off:
            features[row.name] = row.load().from_json(value)
    return rest, features


def _names_by_key() -> dict[str, str]:
    """The field, of the plan or of a section, that each key of plan.json stands for."""
    ordered = [_NAMES.get(key, key) for key in _ORDER.split()]
    kinds = (Plan, *_SECTIONS.values())
    held = [field.name for kind in kinds for field in fields(kind)]
    names = dict.fromkeys([*ordered, *held])
    keys = {name: key for key, name in _NAMES.items()}
    # num_devices: as many as there are devices; features have keys of their own
    unwritten = {*_SECTIONS, "num_devices", "features"}
    return {keys.get(name, name): name for name in names if name not in unwritten}
