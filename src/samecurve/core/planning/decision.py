"""What a part of plan() settled, together with why."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class Decision(Generic[T]):
    """A value, and what is said of it."""

    value: T
    reasons: Mapping[str, str] = field(default_factory=dict)  # by name, as plan.json has them
    warnings: tuple[str, ...] = ()


class DecisionLog:
    """Every reason and warning of one plan, in the order in which they were taken."""

    def __init__(self) -> None:
        self.reasons: dict[str, str] = {}
        self.warnings: list[str] = []

    def take(self, decision: Decision[T]) -> T:
        """Its value; a later reason of the same name replaces the earlier one."""
        self.reasons.update(decision.reasons)
        self.warnings.extend(decision.warnings)
        return decision.value
