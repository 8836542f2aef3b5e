"""The guard: a run proves as it goes that its curve is the one that any other devices would give.

Before the first step it tries whether the loss adds up over samples (split_check.py). In every step
it sees that the loss writes into no weight, and some steps are probed (torch_hooks.py): a
microbatch is computed again, in parts, and on every rank. train.sentinel asks for more of it
(recomputation.py), to find devices that compute wrong.
"""

from dataclasses import dataclass
from typing import Literal, NamedTuple

from pydantic import Field, NonNegativeInt

from samecurve.core.config import Section
from samecurve.core.config.sections import Config
from samecurve.core.determinism.sample_keys import step_key
from samecurve.core.feature import Feature, Planned
from samecurve.core.feature_list import sees_whole_batch
from samecurve.core.planning import Decision
from samecurve.core.planning.facts import Facts
from samecurve.core.planning.layout import Layout
from samecurve.core.planning.memory import MemoryOptions, MemoryTerm
from samecurve.core.planning.plan import Plan
from samecurve.core.protocols import Batch, MicroBatch, Round
from samecurve.core.strategies import StrategySpec
from samecurve.errors import UserError
from samecurve.units import counted, join_words

_STREAM = 0x73656E74  # keeps the choice apart from other numbers that follow from the seed
_EPOCHS = 8  # whose first steps are probed


class SentinelFields(Section):
    """The keys of `train`."""

    sentinel: NonNegativeInt = Field(0, json_schema_extra={"unit": "steps"})
    """steps between checks that compute one microbatch's gradient again, on every device, and
    compare the bits: they find a device that computes wrong; 0: none"""
    on_sentinel: Literal["stop", "warn"] = "stop"
    """what a difference does that the sentinel finds: end the run, or go on with a warning"""


@dataclass(frozen=True)
class SentinelRule:
    """One microbatch of every `every`-th step is computed again."""

    every: int  # steps
    on_difference: Literal["stop", "warn"]


@dataclass(frozen=True)
class Choice:
    """The microbatch of a step that is computed again.

    number: of the microbatch. device: of the plan, which has it in the step. phase: of the step.
    """

    number: int
    device: int
    phase: int = 0


class Chosen(NamedTuple):
    """The microbatch of a step that is computed again.

    microbatch: on every rank
    thread: which of this process's devices has it in the step, as the microbatch of the number
        `place` there; None: another process has it
    """

    batch: Batch[list[Round]]
    choice: Choice
    microbatch: MicroBatch
    thread: int | None
    place: int


def choose(plan: Plan, step: int, count: int, *, phases: int = 1) -> Choice:
    """The microbatch of a step, by the seed alone.

    step: counted from 0. count: microbatches of the step. phases: updates in a step
    """
    key = step_key(plan.fixed.seed ^ _STREAM, 0, step)
    number, phase = key % count, key // count % phases
    devices = range(plan.layout.num_devices)
    device = next(at for at in devices if number in plan.batch.microbatches_of(count, at))
    return Choice(number, device, phase)


def is_due(rule: SentinelRule | None, step: int, first_step: int) -> bool:
    """Whether the sentinel checks a step, counted from 0. The first step of a start is checked,
    too: it tells at once whether the devices and the kernels can be compared.
    """
    return rule is not None and (step == first_step or (step + 1) % rule.every == 0)


def is_probed(plan: Plan, step: int, first_step: int) -> bool:
    """Whether a step, counted from 0, is probed; the first of a start is."""
    return step == first_step or next_probe(plan, None, step - 1) == step


def next_probe(plan: Plan, rule: SentinelRule | None, step: int) -> int:
    """The first step after this one that is probed, or that the sentinel checks.

    Steps 2, 4, 8, ... are probed; the first of each epoch up to the eighth; those after evaluations
    1, 2, 4, 8, ...
    """
    between, of_epoch = plan.every.evaluate, plan.order.steps_per_epoch
    following = [(1 << (step + 1).bit_length()) - 1]
    if (epoch := step // of_epoch + 1) < _EPOCHS:
        following.append(epoch * of_epoch)
    if between:
        following.append(between << (step // between).bit_length())
    if rule is not None:
        following.append(((step + 1) // rule.every + 1) * rule.every - 1)
    return min(following)


class Guard(Feature[SentinelFields, SentinelRule]):
    """The feature. Each training brings it."""

    order = 300
    plan_key = "sentinel"
    brought_by = ("training",)
    fields = SentinelFields
    value = SentinelRule
    banner = {"sentinel": "sentinel: "}
    changes_results = False
    hooks = ("torch", "jax")

    def decide(self, planned: Planned) -> Decision[SentinelRule | None]:
        """How often a microbatch is computed again, and what a difference does.

        UserError: no microbatch of this run can be computed by itself.
        """
        fields = self.fields_of(planned.config)
        if not fields.sentinel:
            return Decision(None)
        _check_alone(planned.config, planned.facts)
        names = [device.name for device in planned.layout.devices]
        where = f"on each of {len(names)} devices" if len(names) > 1 else "on the same device"
        then = "a difference ends the run"
        if fields.on_sentinel == "warn":
            then = "a difference is told"
        how_often = counted(fields.sentinel, "step")
        reason = f"one microbatch is computed again {where} every {how_often}; {then}"
        rule = SentinelRule(fields.sentinel, fields.on_sentinel)
        return Decision(rule, {"sentinel": reason}, _warnings(planned.layout))

    def memory(self, options: MemoryOptions, facts: Facts, spec: StrategySpec) -> MemoryTerm | None:
        """The gradient beside the step's own. Sharded gradients make room for it; jax computes it
        before the step.
        """
        fields = self.fields_of(options.config)
        if not fields.sentinel or spec.engine != "torch" or spec.sharding != "none":
            return None
        width = options.itemsize
        formula = f"{facts.trainable} x {width} B: a microbatch's gradient, computed again"
        return MemoryTerm("sentinel", facts.trainable * width, formula)


def _check_alone(config: Config, facts: Facts) -> None:
    """UserError: a microbatch's loss can't be computed without the others."""
    whole_batch = sees_whole_batch(facts.features)
    if whole_batch or (config.names("train.norm_sync") and facts.coupled):
        what = "the loss looks at" if whole_batch else "synchronised norms look at"
        raise UserError(
            f"train.sentinel computes one microbatch again by itself, and {what} the whole batch",
            "leave train.sentinel out",
            "train.sentinel",
        )


def _warnings(layout: Layout) -> tuple[str, ...]:
    """What devices of several models mean."""
    names = [device.name for device in layout.devices]
    if len(set(names)) == 1:
        return ()
    warning = (
        f"train.sentinel: {join_words(list(dict.fromkeys(names)))} may round in different ways,"
        " so only devices of one model are compared with each other"
    )
    alone = [name for name in dict.fromkeys(names) if names.count(name) == 1]
    if alone:
        warning += f"; {join_words(alone)} with nothing but what it computed before"
    return (warning,)


FEATURE = Guard()
