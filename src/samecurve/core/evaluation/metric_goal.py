"""The rules by which an evaluation is the best one, and by which a run ends early.

Both follow from the metrics summed over all devices, so that every rank comes to the same answer.
"""

from dataclasses import dataclass
from typing import Literal

Mode = Literal["min", "max"]


@dataclass(frozen=True)
class MetricGoal:
    """A metric, and whether less or more of it is better."""

    metric: str = "loss"
    mode: Mode = "min"

    def is_better(self, value: float | None, than: float | None, by: float = 0.0) -> bool:
        """Whether `value` is better than `than` by more than `by`.

        value None: not finite. than None: not finite, or not known yet.
        """
        if value is None:
            return False
        if than is None:
            return True
        return (than - value if self.mode == "min" else value - than) > by


@dataclass(frozen=True)
class EarlyStopRule:
    """A run ends after `patience` evaluations in a row without a better one."""

    goal: MetricGoal
    patience: int
    min_delta: float
