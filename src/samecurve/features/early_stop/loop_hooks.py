"""What early stop does in the loop: it counts evaluations without a better one."""

from typing import Any

from samecurve.core.evaluation import metric_of
from samecurve.core.loop_hooks import LoopHooks
from samecurve.core.protocols import Counters
from samecurve.features.early_stop import EarlyStopRule


class Hooks(LoopHooks):
    """Counts into the counters that a checkpoint holds."""

    value: EarlyStopRule

    def after_evaluation(self, counters: Counters, step: int) -> None:
        """An evaluation that was asked for does not count: where a run ends follows from its config
        alone.
        """
        if "evaluate" in self.context.plan.actions_due(step):
            count_waiting(counters, self.value, step)

    def last_words(self, counters: Counters) -> dict[str, Any]:
        """Why the run ended, as the journal has it."""
        why = {
            "metric": self.value.goal.metric,
            "best": counters.early_value,
            "best_step": counters.early_step,
            "evaluations": counters.early_waited,
        }
        return {"early_stop": why}


def count_waiting(counters: Counters, rule: EarlyStopRule, step: int) -> None:
    """After the evaluation at `step`."""
    value = metric_of(counters.metrics, rule.goal)
    if rule.goal.is_better(value, counters.early_value, rule.min_delta):
        counters.early_value, counters.early_step, counters.early_waited = value, step, 0
    else:
        counters.early_waited += 1
