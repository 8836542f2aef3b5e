"""What an optimizer keeps of the parameters, counted before a run."""

from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

from samecurve.core.planning.muon_params import muon_names
from samecurve.core.planning.quantized_blocks import block_size

if TYPE_CHECKING:
    from samecurve.core.config.sections import Config
    from samecurve.core.config.values import Precision
    from samecurve.core.planning.facts import Facts

_STATES = {"adamw": 2, "sgd": 1}  # arrays of its shape for each parameter


@dataclass(frozen=True, kw_only=True)
class OptimizerState:
    """Bytes of the state of all parameters."""

    optimizer: str  # its name, for readers
    cut_bytes: int  # what shards share out, as they do the parameters
    whole_bytes: int = 0  # what each shard has all of
    formula: str

    @property
    def bytes(self) -> int:
        return self.cut_bytes + self.whole_bytes

    def bytes_of_shard(self, shards: int) -> int:
        return -(-self.cut_bytes // shards) + self.whole_bytes


def itemsize(precision: "Precision") -> int:
    """Bytes of a weight: mixed precisions keep theirs in float32."""
    return 8 if precision == "f64" else 4


def optimizer_state(config: "Config", facts: "Facts") -> OptimizerState:
    """Of the config's optimizer, or of the task's own."""
    user_optimizer, name = facts.user_optimizer, config.optimizer.name
    if user_optimizer is not None:
        return _of_states(config, facts, user_optimizer.name, user_optimizer.num_states)
    if name not in _STATES and not facts.arrays:
        return _of_states(config, facts, name, None)
    if name == "adafactor":
        return _of_adafactor(config, facts)
    if name == "muon":
        return _of_muon(config, facts)
    if name == "adamw8bit":
        return _of_adamw_8bit(config, facts)
    return _of_states(config, facts, name, _STATES[name])


def _of_states(config: "Config", facts: "Facts", name: str, states: int | None) -> OptimizerState:
    """states: arrays of its shape for each parameter; None: not known"""
    width, size = itemsize(config.train.precision), facts.trainable
    words = name
    if states is None:
        states, words = 0, f"{name}: not known, so not counted"
    return OptimizerState(
        optimizer=words,
        cut_bytes=size * width * states,
        formula=f"{size} x {width} B x {states} ({words})",
    )


def _of_adafactor(config: "Config", facts: "Facts") -> OptimizerState:
    """Of an array of two or more dimensions, means over the last one and over the one before."""
    width = itemsize(config.train.precision)
    rows = columns = whole = others = 0
    for shape in trained_shapes(facts).values():
        if len(shape) < 2:
            others += prod(shape)
            continue
        rows += prod(shape[:-1])
        columns += prod(shape[:-2]) * shape[-1]
        whole += shape[-1] if len(shape) == 2 else 0  # means over what shards have apart
    return OptimizerState(
        optimizer="adafactor",
        cut_bytes=(rows + columns + others - whole) * width,
        whole_bytes=whole * width,
        formula=(
            f"({rows} means of rows + {columns} of columns + {others} of vectors) x {width} B"
            " (adafactor)"
        ),
    )


def _of_muon(config: "Config", facts: "Facts") -> OptimizerState:
    """A momentum for each number of a matrix, adamw's two moments of the rest."""
    width, shapes = itemsize(config.train.precision), trained_shapes(facts)
    names = muon_names(config.optimizer.rules, shapes, facts.hidden_matrices)
    matrices = sum(prod(shapes[name]) for name in names)
    others = sum(map(prod, shapes.values())) - matrices
    return OptimizerState(
        optimizer="muon",
        cut_bytes=(matrices + 2 * others) * width,
        formula=f"({matrices} of matrices + 2 x {others} of the rest) x {width} B (muon, adamw)",
    )


def _of_adamw_8bit(config: "Config", facts: "Facts") -> OptimizerState:
    """Two moments, of a byte each with a scale of four for each block; the rest as adamw's."""
    width = itemsize(config.train.precision)
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


def trained_shapes(facts: "Facts") -> dict[str, tuple[int, ...]]:
    """Of parameters that are trained, by name."""
    left_out = {*facts.buffers, *facts.frozen}
    return {name: shape for name, shape in facts.arrays.items() if name not in left_out}
