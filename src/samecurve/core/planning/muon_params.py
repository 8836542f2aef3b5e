"""Which parameters optimizer.name muon updates; adamw has the rest."""

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING

from samecurve.errors import UserError

if TYPE_CHECKING:  # --help imports no pydantic
    from samecurve.core.config.param_groups import ParamRules


def muon_names(
    rules: "ParamRules", shapes: Mapping[str, tuple[int, ...]], hidden: Collection[str]
) -> tuple[str, ...]:
    """Those of hidden layers, but where a group of the config says otherwise.

    shapes: of what is trained, by name
    hidden: names of the matrices of hidden layers (Facts.hidden_matrices)

    UserError: a group gives muon what is no matrix.
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
