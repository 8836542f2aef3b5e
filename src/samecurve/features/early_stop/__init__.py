"""train.early_stop: a run ends once its evaluations get no better, at the same step on any devices.

The rule looks at summed metrics and at counters that checkpoints hold, so it is the same on every
rank, on any number of devices, and after a resume.
"""

from dataclasses import dataclass
from typing import Literal

from pydantic import Field, NonNegativeFloat, PositiveInt, model_validator

from samecurve.core.config import MetricGoal, Section
from samecurve.core.config.sections import Config
from samecurve.core.config.train_section import check_mode
from samecurve.core.feature import Feature, Planned
from samecurve.core.planning import Decision
from samecurve.core.planning.layout import Layout
from samecurve.core.protocols import Counters
from samecurve.errors import UserError
from samecurve.units import counted


class EarlyStop(Section):
    """When to end a run whose evaluations get no better."""

    metric: str = "loss"
    """of the evaluation; loss, or one that the task gives"""
    mode: Literal["min", "max"] | None = None
    """whether less or more of it is better; of loss: min"""
    patience: PositiveInt = 5
    """evaluations in a row without a better one"""
    min_delta: NonNegativeFloat = 0.0
    """by how much better it must be to count"""

    @model_validator(mode="after")
    def _mode_is_known(self) -> "EarlyStop":
        check_mode("metric", "mode", self.metric, self.mode)
        return self

    @property
    def goal(self) -> MetricGoal:
        return MetricGoal(self.metric, self.mode or "min")


class EarlyStopFields(Section):
    """The keys of `train`."""

    early_stop: EarlyStop | None = Field(None, json_schema_extra={"label": "Stop early"})
    """metric, mode, patience, min_delta: end the run once evaluations get no better, at the same
    step on any devices"""


@dataclass(frozen=True)
class EarlyStopRule:
    """A run ends after `patience` evaluations in a row without a better one."""

    goal: MetricGoal
    patience: int
    min_delta: float


class EarlyStopFeature(Feature[EarlyStopFields, EarlyStopRule]):
    """The feature."""

    order = 150
    fields = EarlyStopFields
    value = EarlyStopRule
    is_in_each_plan = True
    to_go_on = "--set train.early_stop.patience=N"
    hooks = ("loop",)

    def check(self, config: Config, _layout: Layout | None) -> None:
        """UserError: nothing would be evaluated before the end."""
        if self.fields_of(config).early_stop and not config.train.eval_every:
            raise UserError(
                "train.early_stop looks at evaluations, and there is one at the end only",
                "--set train.eval_every=1ep, or a number of steps",
                "train.early_stop",
            )

    def decide(self, planned: Planned) -> Decision[EarlyStopRule | None]:
        """The rule. UserError: there is nothing to evaluate on."""
        section = self.fields_of(planned.config).early_stop
        if section is None:
            return Decision(None)
        if not planned.facts.data.eval_samples:
            raise UserError(
                "train.early_stop looks at evaluations, and the task has no held-out data",
                "a share of the data for validation, or leave it out",
                "train.early_stop",
            )
        goal = section.goal
        patience = counted(section.patience, "evaluation")
        margin = f", by more than {section.min_delta:g}" if section.min_delta else ""
        reason = f"after {patience} in a row without a better {goal.metric} ({goal.mode}{margin})"
        rule = EarlyStopRule(goal, section.patience, section.min_delta)
        return Decision(rule, {"early stop": reason})

    def goals(self, value: EarlyStopRule) -> tuple[MetricGoal, ...]:
        return (value.goal,)

    def ends_run(self, value: EarlyStopRule, counters: Counters) -> bool:
        return counters.early_waited >= value.patience


FEATURE = EarlyStopFeature()
