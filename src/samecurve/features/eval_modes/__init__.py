"""Modules that a model keeps in eval mode while it trains, and modules that came so and go into
training: a line of the plan.
"""

from dataclasses import dataclass

from samecurve.core.config import Section
from samecurve.core.feature import Feature, Planned
from samecurve.core.planning import Decision
from samecurve.units import first_and_count


@dataclass(frozen=True)
class ModeFacts:
    """The modules, by name."""

    kept_in_eval: tuple[str, ...] = ()  # that are so while the model is in training
    from_pretrained: tuple[str, ...] = ()  # that came in eval mode and go into training


class EvalModes(Feature[Section, None]):
    """The feature. A model brings it."""

    facts = ModeFacts
    table_only = ("modes",)

    def decide(self, planned: Planned) -> Decision[None]:
        facts, modes = self.facts_of(planned.facts), []
        if facts.kept_in_eval:
            kept = first_and_count(facts.kept_in_eval)
            modes.append(f"{kept} stays in eval mode, as model() has it")
        if facts.from_pretrained:
            came = first_and_count(facts.from_pretrained)
            modes.append(f"{came} goes into training: from_pretrained() gives it in eval mode")
        return Decision(None, {"modes": "; ".join(modes)})


FEATURE = EvalModes()
