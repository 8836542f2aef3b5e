"""Reasons, warnings and refusals of the plan for the config's optimizer and for a task's own."""

from collections.abc import Mapping, Sequence
from math import prod

from samecurve.core.config.sections import Optimizer, ScheduleFields
from samecurve.core.planning.decision import Decision
from samecurve.core.planning.facts import Facts, UserOptimizerFacts
from samecurve.core.planning.layout import Layout
from samecurve.core.planning.optimizer_state import block_size, muon_names, trained_shapes
from samecurve.errors import UserError
from samecurve.units import counted, first_and_count

# why engine jax lacks them: what optax does under the same name
_NOT_IN_JAX = {
    "adafactor": (
        "optax's keeps means over the two largest dimensions, from 128 on, and adds its epsilon to"
        " the squares, so its curve would be another"
    ),
    "muon": (
        "optax's corrects its momentum's bias and scales its updates otherwise, so its curve would"
        " be another"
    ),
    "adamw8bit": "optax has none",
}
_AUTHORS_RATES = {"adafactor": 0.01}


def check_engine_has(section: Optimizer, engine: str) -> None:
    """UserError: the engine does not have the config's optimizer."""
    if engine == "jax" and section.name in _NOT_IN_JAX:
        raise UserError(
            f"optimizer {section.name} is for engine torch: {_NOT_IN_JAX[section.name]}",
            "--engine torch, or optimizer.name adamw or sgd",
            "optimizer.name",
        )


def say_optimizer(
    section: Optimizer, schedule: ScheduleFields, facts: Facts, layout: Layout, *, exact: bool
) -> Decision[None]:
    """Reasons for the optimizer: its parameter groups, and the defaults beside a task's own.

    UserError: the optimizer does not serve the config, the model or the layout.
    """
    reasons = {}
    if facts.groups:
        reasons["groups"] = "\n".join(facts.groups)
    optimizer = facts.user_optimizer
    if optimizer is None:
        return _say_built_in(section, facts, reasons)
    _check_section_reaches(section, optimizer)
    _check_elementwise(layout, optimizer, exact=exact)
    scales = " and ".join(f"{scale:.6g}" for scale in optimizer.scales)
    if optimizer.takes_lr:
        rates, hold = f"learning rate x {scales}", "lr, clip and what groups freeze"
    else:
        rates = f"learning rate its own, {scales} times what is shown as lr"
        hold = "clip and what groups freeze"
    reasons["optimizer"] = (
        f"{optimizer.name} of {optimizer.by}: {rates}; of the config's section {hold} hold;"
        " the host waits for each step, to leave out what is not finite"
    )
    if defaults := _defaults_beside(section, schedule, facts):
        reasons["defaults"] = defaults
    return Decision(None, reasons)


def _defaults_beside(section: Optimizer, schedule: ScheduleFields, facts: Facts) -> str:
    """Defaults of the config that hold beside a task's own optimizer; '' if there are none."""
    defaults, without = [], []
    if section.clip and "clip" not in section.model_fields_set:
        defaults.append(f"clip {section.clip:.6g}")
        without.append("optimizer.clip=0")
    is_chosen = not schedule.model_fields_set.isdisjoint({"decay", "final"})
    if not facts.schedule and schedule.decay != "constant" and not is_chosen:
        defaults.append(f"a {schedule.decay} to {schedule.final:.0%} of the rate")
        without.append("schedule.decay=constant")
    if not defaults:
        return ""
    verb = "is a default" if len(defaults) == 1 else "are defaults"
    options = " ".join(f"--set {assignment}" for assignment in without)
    return f"{' and '.join(defaults)} {verb} here: {options} for a loop without"


def _check_section_reaches(section: Optimizer, optimizer: UserOptimizerFacts) -> None:
    """UserError: the config sets what the task's own optimizer does not read."""
    defaults = Optimizer()
    names = ["name", "weight_decay", "betas", "eps", "momentum"]
    if not optimizer.takes_lr:
        names.append("lr")
    unheard = [name for name in names if getattr(section, name) != getattr(defaults, name)]
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


def _check_elementwise(layout: Layout, optimizer: UserOptimizerFacts, *, exact: bool) -> None:
    """UserError: the optimizer may need whole parameters, and would get parts of them."""
    if optimizer.elementwise:
        return
    if layout.shards > 1:
        why = f"strategy {layout.strategy} gives it only a part of each parameter"
        otherwise = "--strategy ddp"
    elif exact:
        why = "train.exact asks for arithmetic that is the same number by number"
        otherwise = "leave --exact out"
    else:
        return
    raise UserError(
        f"{optimizer.by}: {why}, and the task does not say that {optimizer.name} updates each"
        " number by itself",
        "elementwise = True in the task's class, if it does (Adam and its kin do; Muon, Adafactor,"
        f" LAMB don't); or {otherwise}",
        "task",
    )


def _say_built_in(section: Optimizer, facts: Facts, reasons: Mapping[str, str]) -> Decision[None]:
    """Reasons and warnings for the config's optimizers other than adamw and sgd.

    reasons: those of the optimizer's groups
    """
    name = section.name
    if name not in _NOT_IN_JAX:
        return Decision(None, reasons)
    if name == "muon":
        return Decision(None, {**reasons, "optimizer": _muon_reason(section, facts)})
    if name == "adamw8bit":
        return Decision(None, {**reasons, "optimizer": _eight_bit_reason(facts)})
    reason = (
        "adafactor: lr is the most that a step moves a parameter by, relative to its own root mean"
        " square; 1 / sqrt(step) where that is less; means are those of whole matrices"
    )
    warnings = []
    if "lr" not in section.model_fields_set:
        warnings.append(
            f"optimizer.lr {section.lr:g} is adamw's default; {name}'s authors take"
            f" {_AUTHORS_RATES[name]:g}: --lr {_AUTHORS_RATES[name]:g}"
        )
    return Decision(None, {**reasons, "optimizer": reason}, tuple(warnings))


def _muon_reason(section: Optimizer, facts: Facts) -> str:
    """The parameters that muon and adamw update. UserError: a group gives muon no matrix."""
    shapes = trained_shapes(facts)
    names = muon_names(section.rules, shapes, facts.hidden_matrices)
    others = [name for name in shapes if name not in names]
    parts = [
        f"{optimizer} updates {_counted(own, shapes)}"
        for optimizer, own in (("muon", names), ("adamw", others))
        if own
    ]
    return f"{'; '.join(parts)}; optimizer.groups says otherwise by name"


def _eight_bit_reason(facts: Facts) -> str:
    """The parameters whose moments adamw8bit keeps in eight bits. UserError: there are none."""
    shapes = trained_shapes(facts)
    names = [name for name, shape in shapes.items() if block_size(shape)]
    if not names:
        raise UserError(
            "optimizer adamw8bit: no parameter has rows of a multiple of 64 numbers and 4096"
            " numbers in all, so nothing would be kept in eight bits",
            "optimizer.name adamw, which is the same then, and faster",
            "optimizer.name",
        )
    return (
        f"adamw8bit keeps the moments of {_counted(names, shapes)} in eight bits, in blocks within"
        " a row, so that no shard cuts one; those of the rest as adamw does"
    )


def _counted(names: Sequence[str], shapes: Mapping[str, tuple[int, ...]]) -> str:
    scalars = sum(prod(shapes[name]) for name in names)
    arrays = counted(len(names), "parameter")
    return f"{arrays} ({scalars} scalars: {first_and_count(names)})"
