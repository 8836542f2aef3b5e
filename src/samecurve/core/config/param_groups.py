"""How each parameter is trained, by its name in a checkpoint: groups, and phases of updates.

Names are the same under each engine. The first group whose pattern matches a parameter decides, and
later groups are ignored for it.
"""

import difflib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, NonNegativeFloat, model_validator

from samecurve.core.config import Section
from samecurve.core.feature_list import listed_optimizers, spec_of
from samecurve.errors import UserError
from samecurve.units import counted, first_and_count


class _GroupOptimizerSchema:
    """The schema offers only optimizers that share a model with adamw."""

    def __get_pydantic_json_schema__(self, *_: object) -> dict[str, Any]:
        sharing = [name for name in listed_optimizers() if spec_of(name).takes_groups]
        return {"enum": ["adamw", *sharing], "type": "string"}


if TYPE_CHECKING:
    OptimizerOfGroup = str
else:
    OptimizerOfGroup = Annotated[Literal[("adamw", *listed_optimizers())], _GroupOptimizerSchema()]

Patterns = Mapping[str, Sequence[str]]  # patterns of parameter names, by phase
_KEY = "optimizer.groups"


class ParamGroup(Section):
    """Parameters that are trained in another way, or not at all."""

    match: Annotated[str, Field(min_length=1)]
    """shell pattern over the names that checkpoints use (after model/); the first group that
    matches a parameter rules it"""
    lr_scale: NonNegativeFloat | None = None
    """times the step's learning rate; 1 if not given"""
    weight_decay: NonNegativeFloat | None = None
    """instead of optimizer.weight_decay, for vectors too"""
    optimizer: OptimizerOfGroup | None = None
    """with optimizer.name muon: which of the two updates these; by their place in the model if not
    given"""
    freeze: bool = False
    """not trained: no gradient, no optimizer state, no part in the norm"""
    optional: bool = False
    """left out, with a line in the plan, where no parameter of the model has such a name; else such
    a group is refused"""

    @model_validator(mode="after")
    def _something(self) -> "ParamGroup":
        others = self.lr_scale is not None or self.weight_decay is not None
        others = others or self.optimizer is not None
        if self.freeze and others:
            raise ValueError(
                f"{self.match!r} is frozen, so lr_scale and weight_decay would do nothing: leave"
                " them out"
            )
        if not self.freeze and not others:
            raise ValueError(
                f"{self.match!r} says nothing: give lr_scale, weight_decay or freeze: true"
                " (lr_scale: 1 keeps these parameters out of later groups)"
            )
        if self.lr_scale == 0:
            raise ValueError(
                f"{self.match!r} has lr_scale 0: freeze: true leaves gradients and optimizer state"
                " out as well"
            )
        return self


@dataclass(frozen=True)
class ParamRule:
    """How one parameter is trained."""

    lr_scale: float
    weight_decay: float
    frozen: bool


class ParamRules:
    """The rules of the config's groups, in their order.

    weight_decay: for matrices whose group does not give another.
    """

    def __init__(self, groups: Sequence[ParamGroup], weight_decay: float) -> None:
        self._groups, self._decay = groups, weight_decay

    def rule_for(self, name: str, *, matrix: bool) -> ParamRule:
        number = self._number(name)
        decay = self._decay if matrix else 0.0
        if number is None:
            return ParamRule(1.0, decay, False)
        group = self._groups[number]
        scale = 1.0 if group.lr_scale is None else group.lr_scale
        if group.weight_decay is not None:
            decay = group.weight_decay
        return ParamRule(scale, decay, group.freeze)

    def optimizer_of(self, name: str) -> str | None:
        """The optimizer that a group names; None: no group does."""
        number = self._number(name)
        return None if number is None else self._groups[number].optimizer

    def is_frozen(self, name: str) -> bool:
        number = self._number(name)
        return number is not None and self._groups[number].freeze

    def _number(self, name: str) -> int | None:
        return next(
            (number for number, group in enumerate(self._groups) if fnmatchcase(name, group.match)),
            None,
        )

    def check_names(self, names: Iterable[str]) -> None:
        """UserError: a group that is not optional matches none of these names, or nothing is left
        to train.
        """
        names = list(names)
        ruled = {self._number(name) for name in names}
        for number, group in enumerate(self._groups):
            if number not in ruled:
                matched = [name for name in names if fnmatchcase(name, group.match)]
                if matched or not group.optional:
                    raise _idle(number, group, matched, names)
        if self._groups and all(map(self.is_frozen, names)):
            raise UserError(
                f"all {len(names)} parameters are frozen: nothing is left to train",
                "a narrower `match` for what is frozen",
                _KEY,
            )

    def describe(self, sizes: Mapping[str, int], fixed: Iterable[str] = ()) -> dict[str, Any]:
        """The fields of Facts about groups and trained parameters.

        sizes: scalars of each parameter, by name
        fixed: parameters that the model itself does not train

        UserError: as check_names().
        """
        self.check_names(sizes)
        fixed = set(fixed)
        descriptions, absent = [], []
        for number, group in enumerate(self._groups):
            names = [name for name in sizes if self._number(name) == number]
            if not names:
                absent.append(group.match)
                continue
            scalars = sum(sizes[name] for name in names)
            descriptions.append(
                f"{group.match}: {_what_it_does(group)} ({counted(len(names), 'parameter')},"
                f" {scalars} scalars: {first_and_count(names)})"
            )
        if absent:
            descriptions.append(
                f"{first_and_count(absent)}: left out (optional), no parameter has such a name"
            )
        trained = {
            name: size
            for name, size in sizes.items()
            if name not in fixed and not self.is_frozen(name)
        }
        if self._groups and not sum(trained.values()):
            raise UserError(
                "nothing is left to train: what the groups leave is frozen by the model itself",
                "a narrower `match` for what is frozen",
                _KEY,
            )
        return {
            "trainable": sum(trained.values()),
            "groups": tuple(descriptions),
            "frozen": tuple(name for name in sizes if name not in trained),
        }


def _what_it_does(group: ParamGroup) -> str:
    if group.freeze:
        return "frozen"
    effects = []
    if group.lr_scale is not None:
        effects.append(f"lr x {group.lr_scale:g}")
    if group.weight_decay is not None:
        effects.append(f"weight decay {group.weight_decay:g}")
    if group.optimizer is not None:
        effects.append(f"by {group.optimizer}")
    return ", ".join(effects)


def _idle(
    number: int, group: ParamGroup, matched: Sequence[str], names: Sequence[str]
) -> UserError:
    where = f"{_KEY}.{number}.match"
    if matched:
        ruled = first_and_count(matched)
        return UserError(
            f"{group.match!r} rules no parameter: an earlier group rules {ruled} already",
            "put it before that group, or leave it out",
            where,
        )
    near = difflib.get_close_matches(group.match.replace("*", ""), names, 3, 0.3)
    return UserError(
        f"{group.match!r} matches none of the {len(names)} parameters",
        f"names are like {', '.join(near or names[:3])}; * stands for anything, dots too;"
        " optional: true leaves such a group out",
        where,
    )


def names_by_phase(names: Sequence[str], patterns: Patterns) -> dict[str, set[str]]:
    """The trained parameters of each phase, where a step of a task has several updates in turn.

    names: of all parameters that are trained

    UserError: one belongs to no phase, or to two, or a phase has none.
    """
    by_phase: dict[str, set[str]] = {phase: set() for phase in patterns}
    for name in names:
        matching = [
            phase
            for phase, of_phase in patterns.items()
            if any(fnmatchcase(name, pattern) for pattern in of_phase)
        ]
        if len(matching) != 1:
            belongs = f"belongs to {' and '.join(matching)}" if matching else "belongs to no phase"
            raise UserError(
                f"phases of the task: {name} {belongs}",
                "patterns that match each trained parameter once; what no phase moves is frozen by"
                " requires_grad_(False)",
                "task",
            )
        by_phase[matching[0]].add(name)
    empty = [phase for phase, of_phase in by_phase.items() if not of_phase]
    if empty:
        raise UserError(
            f"phases of the task: {empty[0]} ({', '.join(patterns[empty[0]])}) has no parameter"
            " that is trained",
            f"a pattern of their names, which are {first_and_count(list(names))}",
            "task",
        )
    return by_phase
