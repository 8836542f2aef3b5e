"""Consequences of evaluations: the best one so far, and whether the run ends early.

All of it follows from summed metrics and from counters that checkpoints hold, so that it is the
same on every rank, on any number of devices, and after a resume.
"""

from collections.abc import Callable, Iterable
from typing import Any

from samecurve.core.config.section import EarlyStopRule, MetricGoal
from samecurve.core.evaluation import Summarize, SumSpecs, journal_value, sums_of_ones
from samecurve.core.planning.plan import Plan
from samecurve.core.protocols import Counters
from samecurve.errors import UserError


def metric_of(counters: Counters, goal: MetricGoal) -> float | None:
    """The goal's metric in the last evaluation; None: not finite. UserError: it is not there."""
    check_metric(goal, counters.metrics)
    return counters.metrics[goal.metric]


def check_metric(goal: MetricGoal, metrics: Iterable[str]) -> None:
    """metrics: what an evaluation gives that is one number. UserError: the goal is not among it."""
    names = sorted(metrics)
    if goal.metric not in names:
        raise UserError(
            f"{goal.metric!r} is no number that an evaluation gives",
            f"one of {', '.join(names)} as train.best_metric and train.early_stop.metric",
            "train",
        )


def check_goals(plan: Plan, specs: Callable[[], SumSpecs], summarize: Summarize) -> None:
    """Before the first step: what can't be found then would end the run at its first evaluation.

    specs: of the task's sums; learning them takes a batch
    summarize: of the task

    UserError: the best evaluation, or the last, goes by what is no metric of the task.
    """
    goals = [plan.best, *([plan.early_stop.goal] if plan.early_stop else [])]
    named = [goal for goal in goals if goal.metric != "loss"]
    if not named or not plan.eval_samples:
        return
    try:
        metrics = summarize(sums_of_ones(specs()))
    except UserError:  # a class's own summarize() may take only what adds up; its evaluation tells
        return
    numbers = [
        name for name, value in metrics.items() if not isinstance(journal_value(value), list)
    ]
    for goal in named:
        check_metric(goal, numbers)


def count_waiting(counters: Counters, rule: EarlyStopRule, step: int) -> None:
    """After the evaluation at `step`."""
    value = metric_of(counters, rule.goal)
    if rule.goal.is_better(value, counters.early_value, rule.min_delta):
        counters.early_value, counters.early_step, counters.early_waited = value, step, 0
    else:
        counters.early_waited += 1


def why_it_ended(rule: EarlyStopRule, counters: Counters) -> dict[str, Any]:
    """The reason of an early stop, as the journal has it."""
    return {
        "metric": rule.goal.metric,
        "best": counters.early_value,
        "best_step": counters.early_step,
        "evaluations": counters.early_waited,
    }
