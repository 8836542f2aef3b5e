"""The base class of what a feature does in the training loop (core/feature.py)."""

from collections.abc import Mapping
from typing import Any

from samecurve.core.loop import LoopContext
from samecurve.core.protocols import Counters


class LoopHooks:
    """A feature in the loop of one rank. Each method does nothing where it is not overridden.

    value: what the plan has of the feature
    """

    def __init__(self, context: LoopContext[Any, Any], value: Any) -> None:
        self.context, self.value = context, value

    def before_training(self, state: Any, step: int) -> None:
        """Before the first step of a start, if there is one. step: how many are done"""

    def before_actions(self, state: Any, step: int) -> None:
        """Before anything is done between two steps: an evaluation, a save. step: as above"""

    def after_evaluation(self, counters: Counters, step: int) -> None:
        """counters: with the metrics of the evaluation, and the best value so far"""

    def last_words(self, counters: Counters) -> Mapping[str, Any]:
        """Values of the last event of a run that a feature has ended (Feature.ends_run)."""
        del counters
        return {}
