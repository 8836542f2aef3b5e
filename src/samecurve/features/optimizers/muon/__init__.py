"""optimizer.name muon: updates of the matrices of hidden layers are made orthogonal.

Which parameters muon updates is decided here, for the plan and for the update.
"""

from collections.abc import Collection, Mapping
from math import prod

from samecurve.core.config import Precision
from samecurve.core.config.param_groups import ParamRules
from samecurve.core.config.sections import Optimizer
from samecurve.core.optimizer_spec import OptimizerSpec
from samecurve.core.planning.facts import Facts
from samecurve.core.planning.optimizer import (
    OptimizerState,
    arrays_counted,
    itemsize,
    trained_shapes,
)
from samecurve.errors import UserError


class Muon(OptimizerSpec):
    """What the plan says of muon."""

    defaults = {"momentum": 0.95}  # its authors'
    takes_groups = True
    newest_share_is_rest = True
    why_not_in_jax = (
        "optax's corrects its momentum's bias and scales its updates otherwise, so its curve would"
        " be another"
    )

    def state(self, section: Optimizer, precision: Precision, facts: Facts) -> OptimizerState:
        """One momentum of each matrix; the rest has adamw's two moments."""
        width, shapes = itemsize(precision), trained_shapes(facts)
        names = muon_names(section.rules, shapes, facts.updates.hidden_matrices)
        matrices = sum(prod(shapes[name]) for name in names)
        others = sum(map(prod, shapes.values())) - matrices
        return OptimizerState(
            optimizer="muon",
            cut_bytes=(matrices + 2 * others) * width,
            formula=(
                f"({matrices} of matrices + 2 x {others} of the rest) x {width} B (muon, adamw)"
            ),
        )

    def reason(self, section: Optimizer, facts: Facts) -> str:
        """The parameters that muon and adamw update. UserError: a group gives muon no matrix."""
        shapes = trained_shapes(facts)
        names = muon_names(section.rules, shapes, facts.updates.hidden_matrices)
        others = [name for name in shapes if name not in names]
        parts = [
            f"{optimizer} updates {arrays_counted(own, shapes)}"
            for optimizer, own in (("muon", names), ("adamw", others))
            if own
        ]
        return f"{'; '.join(parts)}; optimizer.groups says otherwise by name"


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


SPEC = Muon()
