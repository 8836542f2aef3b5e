"""The memory of optimizer state, counted before a run.

Which parameters muon updates, and in which blocks adamw8bit keeps its moments, is decided here for
the plan and for the engines.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from math import gcd, prod

from samecurve.core.config.param_groups import ParamRules
from samecurve.core.config.sections import Optimizer
from samecurve.core.config.values import Precision
from samecurve.core.planning.facts import Facts
from samecurve.errors import UserError

_STATES = {"adamw": 2, "sgd": 1}  # arrays of a parameter's shape that are kept for it
# numbers in a block of adamw8bit: smaller blocks would take more for scales than they save
_LARGEST_BLOCK, _SMALLEST_BLOCK = 256, 64
_LEAST_SIZE = 4096  # of an array: adamw8bit's authors leave smaller ones as they are


@dataclass(frozen=True, kw_only=True)
class OptimizerState:
    """Bytes of the state of all parameters."""

    optimizer: str  # its name, for readers
    cut_bytes: int  # divided among shards, as the parameters are
    whole_bytes: int = 0  # that every shard has all of
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
    user_optimizer, name = facts.user_optimizer, section.name
    if user_optimizer is not None:
        return _of_states(precision, facts, user_optimizer.name, user_optimizer.num_states)
    if name not in _STATES and not facts.arrays:
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
    names = muon_names(section.rules, shapes, facts.hidden_matrices)
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
    left_out = {*facts.buffers, *facts.frozen}
    return {name: shape for name, shape in facts.arrays.items() if name not in left_out}


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
