"""after_step() of a task: it changes its model after each update, as a teacher that follows its
student.
"""

from dataclasses import dataclass

from samecurve.core.config import Section
from samecurve.core.config.sections import Config
from samecurve.core.feature import Feature, Planned
from samecurve.core.planning import Decision
from samecurve.core.planning.facts import Facts
from samecurve.core.planning.memory import BatchSizes, MemoryOptions, MemoryTerm
from samecurve.errors import UserError


@dataclass(frozen=True)
class AfterStepFacts:
    """What the task does."""

    after_step: str = ""  # with the model after each update, in words; '': nothing


class AfterStep(Feature[Section, None]):
    """The feature. A task brings it, with the method."""

    order = 700
    facts = AfterStepFacts
    members = {
        "after_step": (
            "after_step(self, model, step): called after each update (step counts from 0), to"
            " change weights and buffers that are not trained: a momentum teacher (torch)"
        ),
    }
    excludes = ("devices.offload_frozen",)
    banner = {"after_step": ""}
    hooks = ("torch",)

    def check_model(self, config: Config, facts: Facts) -> None:
        """UserError: weights that the device has a copy of may change."""
        for key in self.excludes:
            if config.names(key):
                words = self.facts_of(facts).after_step
                raise UserError(
                    f"{key}: {words} is called after each update and may change frozen weights, of"
                    " which the device may have a copy",
                    "leave it out",
                    key,
                )

    def decide(self, planned: Planned) -> Decision[None]:
        layout, words = planned.layout, self.facts_of(planned.facts).after_step
        reason = f"{words} is called after each update, for which the host waits"
        if layout.shards > 1:
            reason += f"; {layout.strategy} gathers all weights for it, and shares them out again"
        return Decision(None, {"after_step": reason})

    def memory_of_step(
        self, options: MemoryOptions, facts: Facts, _: BatchSizes, shards: int
    ) -> MemoryTerm | None:
        """The whole weights, where devices have shards."""
        if shards == 1:
            return None
        width = options.itemsize
        formula = f"{facts.params} x {width} B, whole for {self.facts_of(facts).after_step}"
        return MemoryTerm("after step", facts.params * width, formula)


FEATURE = AfterStep()
