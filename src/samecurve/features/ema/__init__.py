"""train.ema: a moving average of the weights, which is what is evaluated, sampled and exported."""

from collections.abc import Mapping

from pydantic import Field

from samecurve.core.config import Section
from samecurve.core.config.sections import Config
from samecurve.core.feature import Feature, Planned
from samecurve.core.planning import Decision
from samecurve.core.planning.facts import Facts


class EmaFields(Section):
    """The keys of `train`."""

    ema: float = Field(
        0.0, ge=0, lt=1, json_schema_extra={"label": "Moving average of the weights"}
    )
    """decay of a moving average of the weights (0.999), which is what is evaluated, sampled and
    exported; 0: none"""


class Ema(Feature[EmaFields, float]):
    """The feature. Its value is the decay."""

    order = 800
    fields = EmaFields
    value = float
    plan_off = 0.0
    is_in_each_plan = True
    hooks = ("torch", "jax")

    def decide(self, planned: Planned) -> Decision[float | None]:
        decay = self.fields_of(planned.config).ema
        reason = (
            f"after each step {decay:g} x the average + {1 - decay:g} x the weights, from"
            " the first weights on: it is evaluated, sampled and exported"
        )
        return Decision(decay, {"ema": reason})

    def numbers_kept(self, _config: Config, facts: Facts) -> Mapping[str, int]:
        return {"average": facts.trainable}


FEATURE = Ema()
