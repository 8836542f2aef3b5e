"""A decision of plan() with its reasons and warnings, and the log that collects them."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class Decision(Generic[T]):
    """A value that was chosen, with its reasons and warnings."""

    value: T
    reasons: Mapping[str, str] = field(default_factory=dict)  # by name, as plan.json has them
    warnings: tuple[str, ...] = ()


class DecisionLog:
    """Every reason and warning of one plan, in the order in which they were taken."""

    def __init__(self) -> None:
        self.reasons: dict[str, str] = {}
        self.warnings: list[str] = []

    def take(self, decision: Decision[T]) -> T:
        """Log a decision and return its value. A reason replaces an earlier one of its name."""
        self.reasons.update(decision.reasons)
        self.warnings.extend(decision.warnings)
        return decision.value
