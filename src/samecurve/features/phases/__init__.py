"""Several updates in turn within a step, each with a loss and parameters of its own: a line of the
plan, and such a step in engine torch.
"""

from dataclasses import dataclass

from samecurve.core.config import Section
from samecurve.core.feature import Feature, Planned
from samecurve.core.planning import Decision


@dataclass(frozen=True)
class PhaseFacts:
    """The updates of a step in turn, in words."""

    phases: tuple[str, ...] = ()  # empty: there is one update


class Phases(Feature[Section, None]):
    """The feature. A task brings it, with the patterns of its parameters."""

    order = 600
    facts = PhaseFacts
    members = {
        "phases": (
            'phases = {"critic": "critic.*", "generator": ("generator.*", "embed.*")}: several'
            " updates in turn within a step, each of the parameters whose names match; loss(self,"
            " model, batch, phase), and optimizer(self, params, lr, phase) if there is one (torch)"
        ),
    }
    banner = {"phases": "phases "}
    hooks = ("torch",)

    def decide(self, planned: Planned) -> Decision[None]:
        phases = self.facts_of(planned.facts).phases
        reason = (
            f"{', then '.join(phases)}: each with its own forward and backward passes, reduction"
            " and update"
        )
        return Decision(None, {"phases": reason})


FEATURE = Phases()
