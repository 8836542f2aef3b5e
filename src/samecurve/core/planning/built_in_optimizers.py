"""What a user of the config's optimizers beside adamw and sgd should know: refused, or said, by
plan().
"""

from collections.abc import Mapping, Sequence
from math import prod

from samecurve.core.config.sections import Config
from samecurve.core.planning.decision import Decision
from samecurve.core.planning.facts import Facts
from samecurve.core.planning.muon_params import muon_names
from samecurve.core.planning.optimizer_state import trained_shapes
from samecurve.core.planning.quantized_blocks import block_size
from samecurve.errors import UserError
from samecurve.units import counted, first_and_count

# Why engine jax has them not: what optax does under the same name.
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


def say_built_in(config: Config, facts: Facts, reasons: Mapping[str, str]) -> Decision[None]:
    """reasons: what is said already. UserError: the engine does not have it."""
    name = config.optimizer.name
    if name not in _NOT_IN_JAX:
        return Decision(None, reasons)
    if config.engine == "jax":
        raise UserError(
            f"optimizer {name} is for engine torch: {_NOT_IN_JAX[name]}",
            "--engine torch, or optimizer.name adamw or sgd",
            "optimizer.name",
        )
    if name == "muon":
        return Decision(None, {**reasons, "optimizer": _muon_reason(config, facts)})
    if name == "adamw8bit":
        return Decision(None, {**reasons, "optimizer": _eight_bit_reason(facts)})
    reason = (
        "adafactor: lr is the most that a step moves a parameter by, relative to its own root mean"
        " square; 1 / sqrt(step) where that is less; means are those of whole matrices"
    )
    warnings = []
    if "lr" not in config.optimizer.model_fields_set:
        warnings.append(
            f"optimizer.lr {config.optimizer.lr:g} is adamw's default; {name}'s authors take"
            f" {_AUTHORS_RATES[name]:g}: --lr {_AUTHORS_RATES[name]:g}"
        )
    return Decision(None, {**reasons, "optimizer": reason}, tuple(warnings))


def _muon_reason(config: Config, facts: Facts) -> str:
    """Which parameters it updates. UserError: a group gives it what is no matrix."""
    shapes = trained_shapes(facts)
    names = muon_names(config.optimizer.rules, shapes, facts.hidden_matrices)
    others = [name for name in shapes if name not in names]
    parts = [
        f"{optimizer} updates {_counted(own, shapes)}"
        for optimizer, own in (("muon", names), ("adamw", others))
        if own
    ]
    return f"{'; '.join(parts)}; optimizer.groups says otherwise by name"


def _eight_bit_reason(facts: Facts) -> str:
    """UserError: there is nothing that it would keep in eight bits."""
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
