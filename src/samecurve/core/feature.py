"""Feature, the base class of what only some runs have.

A feature is one package whose `__init__.py` has it as FEATURE; the package's name is the feature's.
It brings keys of the config, decides in the plan with a reason, counts its memory, and hooks into
the step and the loop. Each member has a default. A feature is on where the plan has a value of it;
where it is off, nothing of it is imported.

Hooks are classes `Hooks` in modules of the package, each imported when a run has the feature:
`torch_hooks.py` (torch_engine/step/feature_hooks.py), `jax_hooks.py` (jax_engine/feature_hooks.py),
`loop_hooks.py` (core/loop_hooks.py), `sum_hooks.py` (how buckets of gradients are summed over
ranks: torch_engine/strategies/reducers/collective.py).
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, is_dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import Any, ClassVar, Generic, Literal, TypeVar, cast

from samecurve.core.config import MetricGoal, Precision, Section
from samecurve.core.config.sections import Config
from samecurve.core.events import Activity
from samecurve.core.planning import Decision
from samecurve.core.planning.batch import BatchSplit
from samecurve.core.planning.compute import Compute
from samecurve.core.planning.facts import Facts
from samecurve.core.planning.fixed import parse_dataclass
from samecurve.core.planning.layout import Layout
from samecurve.core.planning.machine import Machine
from samecurve.core.planning.memory import (
    BatchSizes,
    HostCopies,
    MemoryOptions,
    MemoryTerm,
    Way,
)
from samecurve.core.protocols import Counters
from samecurve.core.strategies import StrategySpec
from samecurve.errors import UserError

Where = Literal["torch", "jax", "loop", "sum"]
Fields = TypeVar("Fields", bound=Section)
Value = TypeVar("Value")


@dataclass(frozen=True, kw_only=True)
class Planned:
    """What a plan has come to when its features decide."""

    config: Config
    machine: Machine
    facts: Facts
    options: MemoryOptions
    compute: Compute
    layout: Layout
    split: BatchSplit

    @property
    def precision(self) -> Precision:
        return self.options.precision


@dataclass(frozen=True)
class NoFacts:
    """The facts of a feature that asks for none."""


class Feature(Generic[Fields, Value]):
    """What only some runs have.

    order: features decide, and hook in, in this order
    section, fields: the section of the config that has the fields, and a class with these alone
    value: the type of what decide() gives; a number, a text, or a frozen dataclass of such
    plan_key, plan_off: the key in plan.json, and its value where the feature is off
    is_in_each_plan: whether plan.json has the key where the feature is off
    banner: reasons that the banner of a run shows, each with the words before it
    table_only: reasons that only the table of `samecurve plan` shows
    changes_results: False for what only watches a run
    sees_whole_batch: whether the loss of a sample looks at the others of its step
    to_go_on: what the user types to train on where it has ended a run
    goes_twice: why each microbatch goes forward twice, where a step has several accumulation steps;
        '': it does not
    brought_by: precisions, or findings about the task's code, that bring the feature; a plan has no
        value of such a one
    facts: what it must know of a task and its model, a dataclass with defaults; a task brings the
        feature by facts that are no defaults
    members: what a task's class may have for it: name -> how it is written, and what it is
    libraries: modules that must be installed -> the extra that installs each
    remedy_order: its place among the features by whose ways() a device may hold less; 0: it has
        none
    excludes: keys of the config that can't have a value beside the feature's
    of_some_strategies: whether some strategies refuse it, so that a tool that tries several leaves
        it out
    reruns_blocks: whether blocks run again in backward
    fixes_devices: whether its values are of the run's own devices, so that a trial on others leaves
        it out
    follows_devices: whether results follow the number of devices
    compiles_blocks: whether it compiles the model's blocks, whose first steps then take longer
    syncs_norms: whether norms that mix samples look at all devices, which meet in each round
    keeps_state_on_host: whether what strategies share out lies in host memory
    hooks: where the package has hooks
    """

    order: ClassVar[int] = 1000
    section: ClassVar[str] = "train"
    fields: ClassVar[type[Section] | None] = None
    value: ClassVar[Any] = bool
    plan_key: ClassVar[str] = ""  # '': the feature's name
    plan_off: ClassVar[Any] = None
    is_in_each_plan: ClassVar[bool] = False
    banner: ClassVar[Mapping[str, str]] = {}
    table_only: ClassVar[tuple[str, ...]] = ()
    changes_results: ClassVar[bool] = True
    sees_whole_batch: ClassVar[bool] = False
    to_go_on: ClassVar[str] = ""
    goes_twice: ClassVar[str] = ""
    brought_by: ClassVar[tuple[str, ...]] = ()
    facts: ClassVar[type[Any]] = NoFacts
    members: ClassVar[Mapping[str, str]] = {}
    libraries: ClassVar[Mapping[str, str]] = {}
    remedy_order: ClassVar[int] = 0
    excludes: ClassVar[tuple[str, ...]] = ()
    of_some_strategies: ClassVar[bool] = False
    compiles_blocks: ClassVar[bool] = False
    reruns_blocks: ClassVar[bool] = False
    fixes_devices: ClassVar[bool] = False
    follows_devices: ClassVar[bool] = False
    syncs_norms: ClassVar[bool] = False
    keeps_state_on_host: ClassVar[bool] = False
    hooks: ClassVar[tuple[Where, ...]] = ()

    @property
    def name(self) -> str:
        return type(self).__module__.rpartition(".")[2]

    @property
    def key(self) -> str:
        """The first of its keys of the config, dotted."""
        assert self.fields is not None
        return f"{self.section}.{next(iter(self.fields.model_fields))}"

    def fields_of(self, config: Config) -> Fields:
        """The section of the config that has the feature's fields."""
        return cast("Fields", getattr(config, self.section))

    def facts_of(self, facts: Facts) -> Any:
        """The feature's own facts."""
        return parse_dataclass(self.facts, facts.features.get(self.name, {}))

    def check(self, config: Config, layout: Layout | None) -> None:
        """Before the model and the data are looked at, and once there is a layout. UserError: no
        model could make it right.

        layout: the run's; before, the one that it has if its model fits on one device; None: there
            is none
        """

    def check_unmeasured(self, config: Config, layout: Layout | None) -> None:
        """As check(), where nothing is measured before the run."""

    def check_model(self, config: Config, facts: Facts) -> None:
        """Before memory is counted. UserError: it can't be done with this model."""

    def split(
        self, config: Config, facts: Facts, even: BatchSplit, *, may_cut: bool
    ) -> Decision[BatchSplit] | None:
        """How a step is cut and assigned to the devices. None: each has an equal share.

        may_cut: whether microbatches may be smaller than those of the even split
        """
        del config, facts, even, may_cut
        return None

    def settles(self, coupled: Sequence[str], split: BatchSplit) -> str:
        """Why layers that mix samples give the same on any devices; '': they may not.

        coupled: these layers
        """
        del coupled, split
        return ""

    def decide(self, planned: Planned) -> Decision[Value | None]:
        """What the run has of the feature; None: nothing. UserError: it can't be done."""
        raise NotImplementedError

    def not_same_bits(self, config: Config) -> str:
        """Why a run with it can't have the same bits on any devices; '': it can."""
        del config
        return ""

    def serves(self, spec: StrategySpec) -> bool:
        """Whether a run of this strategy can have it."""
        del spec
        return True

    def ways(self, options: MemoryOptions, facts: Facts, spec: StrategySpec) -> Sequence[Way]:
        """Other values of its keys with which a device holds less, those that cost least first.

        options: of a run whose model does not fit
        """
        del options, facts, spec
        return ()

    def remedy(self, value: Value | None, activity: Activity) -> str:
        """Another value of its keys, in words, for a run that has run out of memory; '': none.

        activity: what was done meanwhile
        """
        del value, activity
        return ""

    def rerun(self, config: Config) -> str:
        """What runs again in backward, by the names that a task's counts of activations have."""
        del config
        return "none"

    def rerun_share(self, value: Value, engine: str) -> float:
        """The share of a forward pass that runs again in backward."""
        del value, engine
        return 0.0

    def host_copies(self, options: MemoryOptions, facts: Facts, rounds: int) -> HostCopies | None:
        """What a device copies from host memory for each microbatch; None: nothing.

        rounds: accumulation steps
        """
        del options, facts, rounds
        return None

    def numbers_kept(self, config: Config, facts: Facts) -> Mapping[str, int]:
        """Numbers that are kept as the weights are, in shards and in host memory as these are: the
        name of the memory's term -> how many.
        """
        del config, facts
        return {}

    def placed(
        self, terms: list[MemoryTerm], options: MemoryOptions, facts: Facts, spec: StrategySpec
    ) -> list[MemoryTerm]:
        """The terms of weights, gradients and what is kept as they are, where some of these lie
        elsewhere.
        """
        del options, facts, spec
        return terms

    def memory(self, options: MemoryOptions, facts: Facts, spec: StrategySpec) -> MemoryTerm | None:
        """What a device holds beside; None: nothing."""

    def goals(self, value: Value) -> Sequence[MetricGoal]:
        """Metrics that an evaluation must give."""
        del value
        return ()

    def ends_run(self, value: Value, counters: Counters) -> bool:
        """Whether a run with these counters has come to its end, on every rank."""
        del value, counters
        return False

    def memory_of_step(
        self, options: MemoryOptions, facts: Facts, sizes: BatchSizes, shards: int
    ) -> MemoryTerm | None:
        """What a device holds in a step beside activations; None: nothing. It has no part in the
        choice of how many samples a microbatch has.
        """

    def steps_between(self, value: Value) -> int:
        """Steps after which the loop's hooks act; 0: only where something else is due."""
        del value
        return 0

    def bytes_sent(self, value: Value, width: int) -> int:
        """Bytes of one number of a gradient as devices send it. width: as it is without"""
        del value
        return width

    def not_simulated(self, config: Config) -> tuple[str, str] | None:
        """Why `plan --machine` can't predict a run with it, and a remedy; None: it can."""
        del config
        return None

    def to_json(self, value: Value) -> Any:
        """The value as plan.json has it."""
        return asdict(value) if is_dataclass(value) and not isinstance(value, type) else value

    def from_json(self, value: Any) -> Value:
        """ValueError: it is no such value."""
        parsed: Value = parse_dataclass(self.value, value)
        return parsed

    def hooks_class(self, where: Where) -> Any:
        """The class of the hooks there; None: the package has none.

        UserError: the feature lists hooks there, and its package has no such module.
        """
        if where not in self.hooks:
            return None
        home = type(self).__module__
        module = f"{home}.{where}_hooks"
        if find_spec(module) is None:
            raise UserError(
                f"feature {self.name} lists hooks {where!r}, and there is no module {module}",
                f"write {where}_hooks.py with a class Hooks beside the __init__.py of {home},"
                f" or take {where!r} out of the feature's hooks",
            )
        return import_module(module).Hooks
