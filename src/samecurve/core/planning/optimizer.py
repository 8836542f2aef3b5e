"""The optimizer in the plan: the bytes of its state, and its reasons, warnings and refusals.

adamw, sgd and a task's own are here; the config's others say their part (core/optimizer_spec.py).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

from samecurve.core.config import Precision
from samecurve.core.config.sections import Optimizer, ScheduleFields
from samecurve.core.feature_list import spec_of
from samecurve.core.planning import DecisionLog
from samecurve.core.planning.facts import Facts, UserOptimizerFacts
from samecurve.core.planning.layout import Layout
from samecurve.errors import UserError
from samecurve.units import counted, first_and_count

_STATES = {"adamw": 2, "sgd": 1}  # arrays of a parameter's shape that are kept for it


@dataclass(frozen=True, kw_only=True)
class OptimizerState:
    """Bytes of the state of all parameters."""

    optimizer: str  # its name, for readers
    cut_bytes: int  # divided among shards, as the parameters are
    whole_bytes: int = 0  # held whole by every shard
    formula: str

    @property
    def bytes(self) -> int:
        return self.cut_bytes + self.whole_bytes

    def bytes_of_shard(self, shards: int) -> int:
        return -(-self.cut_bytes // shards) + self.whole_bytes


def itemsize(precision: Precision) -> int:
    """Bytes of a weight: mixed precisions keep theirs in float32."""
    return 8 if precision == "f64" else 4


def optimizer_state(section: Optimizer, precision: Precision, facts: Facts) -> OptimizerState:
    """The state of the config's optimizer, or of the task's own."""
    user_optimizer, name = facts.updates.user_optimizer, section.name
    if user_optimizer is not None:
        return state_of_arrays(precision, facts, user_optimizer.name, user_optimizer.num_states)
    if name in _STATES:
        return state_of_arrays(precision, facts, name, _STATES[name])
    if not facts.model.arrays:
        return state_of_arrays(precision, facts, name, None)
    state: OptimizerState = spec_of(name).state(section, precision, facts)
    return state


def state_of_arrays(
    precision: Precision, facts: Facts, name: str, states: int | None
) -> OptimizerState:
    """The state of an optimizer that keeps so many arrays of each parameter's shape.

    states: the number of these arrays; None: not known
    """
    width, size = itemsize(precision), facts.trainable
    words = name
    if states is None:
        states, words = 0, f"{name}: not known, so not counted"
    return OptimizerState(
        optimizer=words,
        cut_bytes=size * width * states,
        formula=f"{size} x {width} B x {states} ({words})",
    )


def trained_shapes(facts: Facts) -> dict[str, tuple[int, ...]]:
    """Shapes of the parameters that are trained, by name."""
    left_out = {*facts.model.buffers, *facts.model.frozen}
    return {name: shape for name, shape in facts.model.arrays.items() if name not in left_out}


def check_engine_has(section: Optimizer, engine: str) -> None:
    """UserError: the engine does not have the config's optimizer."""
    spec = spec_of(section.name) if engine == "jax" else None
    if spec is not None:
        raise UserError(
            f"optimizer {section.name} is for engine torch: {spec.why_not_in_jax}",
            "--engine torch, or optimizer.name adamw or sgd",
            "optimizer.name",
        )


def say_optimizer(
    log: DecisionLog,
    section: Optimizer,
    schedule: ScheduleFields,
    facts: Facts,
    layout: Layout,
) -> None:
    """Log the parameter groups, what the optimizer does, and the defaults beside a task's own.

    UserError: the optimizer does not serve the config, the model or the layout.
    """
    if facts.updates.groups:
        log.reasons["groups"] = "\n".join(facts.updates.groups)
    optimizer = facts.updates.user_optimizer
    if optimizer is None:
        if spec := spec_of(section.name):
            if reason := spec.reason(section, facts):
                log.reasons["optimizer"] = reason
            log.warnings.extend(spec.warnings(section))
        return
    _check_section_reaches(section, optimizer)
    if layout.shards > 1 and not optimizer.elementwise:
        why = f"strategy {layout.strategy} gives it only a part of each parameter"
        cause, remedy = not_elementwise(optimizer, why)
        raise UserError(cause, f"{remedy}; or --strategy ddp", "task")
    scales = " and ".join(f"{scale:.6g}" for scale in optimizer.scales)
    if optimizer.takes_lr:
        rates, hold = f"learning rate x {scales}", "lr, clip and what groups freeze"
    else:
        rates = f"learning rate its own, {scales} times what is shown as lr"
        hold = "clip and what groups freeze"
    log.reasons["optimizer"] = (
        f"{optimizer.name} of {optimizer.by}: {rates}; of the config's section {hold} hold;"
        " the host waits for each step, to leave out what is not finite"
    )
    if defaults := _defaults_beside(section, schedule, facts):
        log.reasons["defaults"] = defaults


def _defaults_beside(section: Optimizer, schedule: ScheduleFields, facts: Facts) -> str:
    """Defaults of the config that hold beside a task's own optimizer; '' if there are none."""
    defaults, without = [], []
    if section.clip and "clip" not in section.model_fields_set:
        defaults.append(f"clip {section.clip:.6g}")
        without.append("optimizer.clip=0")
    is_chosen = not schedule.model_fields_set.isdisjoint({"decay", "final"})
    if not facts.updates.schedule and schedule.decay != "constant" and not is_chosen:
        defaults.append(f"a {schedule.decay} to {schedule.final:.0%} of the rate")
        without.append("schedule.decay=constant")
    if not defaults:
        return ""
    verb = "is a default" if len(defaults) == 1 else "are defaults"
    options = " ".join(f"--set {assignment}" for assignment in without)
    return f"{' and '.join(defaults)} {verb} here: {options} for a loop without"


def _check_section_reaches(section: Optimizer, optimizer: UserOptimizerFacts) -> None:
    """UserError: the config sets what the task's own optimizer does not read."""
    unheard = section.changed("name", "weight_decay", "betas", "eps", "momentum")
    if not optimizer.takes_lr:
        unheard += section.changed("lr")
    if unheard:
        remedy = "leave it out of the config"
        if unheard == ["lr"]:
            remedy += f"; def optimizer(self, params, lr) takes it: {optimizer.name}(params, lr=lr)"
        keys = " and ".join(f"optimizer.{name}" for name in unheard)
        verb = "does" if len(unheard) == 1 else "do"
        raise UserError(
            f"the task brings its own optimizer, {optimizer.by}, which {keys} {verb} not reach",
            remedy,
            f"optimizer.{unheard[0]}",
        )
    for number, group in enumerate(section.groups):
        if not group.freeze:
            raise UserError(
                f"the task brings its own optimizer, {optimizer.by}, whose parameter groups are its"
                " own",
                f"groups of {optimizer.name} there; freeze: true holds here too",
                f"optimizer.groups.{number}",
            )


def not_elementwise(optimizer: UserOptimizerFacts, why: str) -> tuple[str, str]:
    """The cause and the remedy where a task does not say that its optimizer updates each number
    by itself. why: that is needed here
    """
    return (
        f"{optimizer.by}: {why}, and the task does not say that {optimizer.name} updates each"
        " number by itself",
        "elementwise = True in the task's class, if it does (Adam and its kin do; Muon, Adafactor,"
        " LAMB don't)",
    )


def arrays_counted(names: Sequence[str], shapes: Mapping[str, tuple[int, ...]]) -> str:
    """3 parameters (40 scalars: a and 2 more)."""
    scalars = sum(prod(shapes[name]) for name in names)
    arrays = counted(len(names), "parameter")
    return f"{arrays} ({scalars} scalars: {first_and_count(names)})"
