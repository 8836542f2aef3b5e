"""The optimizer in the plan: the bytes of its state, and its reasons, warnings and refusals.

Which parameters muon updates, and in which blocks adamw8bit keeps its moments, is decided here for
the plan and for the engines.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from math import gcd, prod

from samecurve.core.config.param_groups import ParamRules
from samecurve.core.config.section import Precision
from samecurve.core.config.sections import Optimizer, ScheduleFields
from samecurve.core.planning import DecisionLog
from samecurve.core.planning.facts import Facts, UserOptimizerFacts
from samecurve.core.planning.layout import Layout
from samecurve.errors import NotExactError, UserError
from samecurve.units import counted, first_and_count

_STATES = {"adamw": 2, "sgd": 1}  # arrays of a parameter's shape that are kept for it
# numbers in a block of adamw8bit: smaller blocks would take more for scales than they save
_LARGEST_BLOCK, _SMALLEST_BLOCK = 256, 64
_LEAST_SIZE = 4096  # of an array: adamw8bit's authors leave smaller ones as they are
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
        return _of_states(precision, facts, user_optimizer.name, user_optimizer.num_states)
    if name not in _STATES and not facts.model.arrays:
        return _of_states(precision, facts, name, None)
    if name == "adafactor":
        return _of_adafactor(precision, facts)
    if name == "muon":
        return _of_muon(section, precision, facts)
    if name == "adamw8bit":
        return _of_adamw_8bit(precision, facts)
    return _of_states(precision, facts, name, _STATES[name])


def _of_states(precision: Precision, facts: Facts, name: str, states: int | None) -> OptimizerState:
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


def _of_adafactor(precision: Precision, facts: Facts) -> OptimizerState:
    """Adafactor keeps, of each matrix, means over its rows and over its columns."""
    width = itemsize(precision)
    rows = columns = whole = others = 0
    for shape in trained_shapes(facts).values():
        if len(shape) < 2:
            others += prod(shape)
            continue
        rows += prod(shape[:-1])
        columns += prod(shape[:-2]) * shape[-1]
        whole += shape[-1] if len(shape) == 2 else 0  # the mean over rows, which shards cut
    return OptimizerState(
        optimizer="adafactor",
        cut_bytes=(rows + columns + others - whole) * width,
        whole_bytes=whole * width,
        formula=(
            f"({rows} means of rows + {columns} of columns + {others} of vectors) x {width} B"
            " (adafactor)"
        ),
    )


def _of_muon(section: Optimizer, precision: Precision, facts: Facts) -> OptimizerState:
    """Muon keeps one momentum of each matrix; the rest has adamw's two moments."""
    width, shapes = itemsize(precision), trained_shapes(facts)
    names = muon_names(section.rules, shapes, facts.updates.hidden_matrices)
    matrices = sum(prod(shapes[name]) for name in names)
    others = sum(map(prod, shapes.values())) - matrices
    return OptimizerState(
        optimizer="muon",
        cut_bytes=(matrices + 2 * others) * width,
        formula=f"({matrices} of matrices + 2 x {others} of the rest) x {width} B (muon, adamw)",
    )


def _of_adamw_8bit(precision: Precision, facts: Facts) -> OptimizerState:
    """Adamw8bit keeps two moments of a byte each, and a scale of 4 bytes for each block.

    Arrays without blocks have adamw's moments.
    """
    width = itemsize(precision)
    quantized = scales = others = 0
    for shape in trained_shapes(facts).values():
        if block := block_size(shape):
            quantized += prod(shape)
            scales += prod(shape) // block
        else:
            others += prod(shape)
    return OptimizerState(
        optimizer="adamw8bit",
        cut_bytes=2 * (quantized + 4 * scales + others * width),
        formula=(
            f"2 x ({quantized} x 1 B + {scales} scales x 4 B + {others} of the rest x {width} B)"
            " (adamw8bit)"
        ),
    )


def trained_shapes(facts: Facts) -> dict[str, tuple[int, ...]]:
    """Shapes of the parameters that are trained, by name."""
    left_out = {*facts.model.buffers, *facts.model.frozen}
    return {name: shape for name, shape in facts.model.arrays.items() if name not in left_out}


def muon_names(
    rules: ParamRules, shapes: Mapping[str, tuple[int, ...]], hidden: Collection[str]
) -> tuple[str, ...]:
    """The parameters that muon updates: matrices of hidden layers, and what a group gives it.

    shapes: of what is trained, by name
    hidden: names of the matrices of hidden layers (Facts.hidden_matrices)

    UserError: a group gives muon a parameter that is not a matrix.
    """
    names = []
    for name, shape in shapes.items():
        chosen = rules.optimizer_of(name)
        if chosen == "muon" and len(shape) not in (2, 3):
            raise UserError(
                f"optimizer.groups gives muon {name}, of shape {list(shape)}: muon updates matrices"
                " and stacks of them",
                "optimizer: adamw for it, or a narrower `match`",
                "optimizer.groups",
            )
        if chosen == "muon" or (chosen is None and name in hidden):
            names.append(name)
    return tuple(names)


def block_size(shape: tuple[int, ...]) -> int | None:
    """Numbers of a block in which adamw8bit keeps an array's moments, each block with one scale.

    The largest power of two, up to 256, that divides a row (an index of the first dimension), so
    that blocks are the same however many shards a parameter is cut into. None: the array is kept as
    it is.
    """
    if len(shape) < 2 or prod(shape) < _LEAST_SIZE:
        return None
    block = gcd(prod(shape[1:]), _LARGEST_BLOCK)
    return block if block >= _SMALLEST_BLOCK else None


def check_engine_has(section: Optimizer, engine: str) -> None:
    """UserError: the engine does not have the config's optimizer."""
    if engine == "jax" and section.name in _NOT_IN_JAX:
        raise UserError(
            f"optimizer {section.name} is for engine torch: {_NOT_IN_JAX[section.name]}",
            "--engine torch, or optimizer.name adamw or sgd",
            "optimizer.name",
        )


def say_optimizer(
    log: DecisionLog,
    section: Optimizer,
    schedule: ScheduleFields,
    facts: Facts,
    layout: Layout,
    *,
    exact: bool,
) -> None:
    """Log the parameter groups, what the optimizer does, and the defaults beside a task's own.

    UserError: the optimizer does not serve the config, the model or the layout.
    """
    if facts.updates.groups:
        log.reasons["groups"] = "\n".join(facts.updates.groups)
    optimizer = facts.updates.user_optimizer
    if optimizer is None:
        _say_built_in(log, section, facts)
        return
    _check_section_reaches(section, optimizer)
    _check_elementwise(layout, optimizer, exact=exact)
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


def _check_elementwise(layout: Layout, optimizer: UserOptimizerFacts, *, exact: bool) -> None:
    """UserError: the optimizer may need whole parameters, and would get parts of them."""
    if optimizer.elementwise:
        return
    error = UserError
    if layout.shards > 1:
        why = f"strategy {layout.strategy} gives it only a part of each parameter"
        otherwise = "--strategy ddp"
    elif exact:
        error, otherwise = NotExactError, "--no-exact"
        why = "train.exact asks for arithmetic that is the same number by number"
    else:
        return
    raise error(
        f"{optimizer.by}: {why}, and the task does not say that {optimizer.name} updates each"
        " number by itself",
        "elementwise = True in the task's class, if it does (Adam and its kin do; Muon, Adafactor,"
        f" LAMB don't); or {otherwise}",
        "task",
    )


def _say_built_in(log: DecisionLog, section: Optimizer, facts: Facts) -> None:
    """Log what the config's optimizers other than adamw and sgd do."""
    if section.name == "muon":
        log.reasons["optimizer"] = _muon_reason(section, facts)
    elif section.name == "adamw8bit":
        log.reasons["optimizer"] = _eight_bit_reason(facts)
    elif section.name == "adafactor":
        log.reasons["optimizer"] = (
            "adafactor: lr is the most that a step moves a parameter by, relative to its own root"
            " mean square; 1 / sqrt(step) where that is less; means are those of whole matrices"
        )
        if "lr" not in section.model_fields_set:
            log.warnings.append(
                f"optimizer.lr {section.lr:g} is adamw's default; adafactor's authors take 0.01:"
                " --lr 0.01"
            )


def _muon_reason(section: Optimizer, facts: Facts) -> str:
    """The parameters that muon and adamw update. UserError: a group gives muon no matrix."""
    shapes = trained_shapes(facts)
    names = muon_names(section.rules, shapes, facts.updates.hidden_matrices)
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
