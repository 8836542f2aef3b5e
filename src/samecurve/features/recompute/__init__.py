"""train.recompute: blocks run again in backward, in place of keeping their activations."""

from collections.abc import Sequence
from typing import Literal

from samecurve.core.config import Section
from samecurve.core.config.sections import Config
from samecurve.core.events import Activity
from samecurve.core.feature import Feature, Planned
from samecurve.core.planning import Decision
from samecurve.core.planning.facts import Facts
from samecurve.core.planning.memory import MemoryOptions, Way
from samecurve.core.strategies import StrategySpec
from samecurve.errors import UserError
from samecurve.units import first_and_count

KEY = "train.recompute"
Recompute = Literal["none", "block", "selective"]
_BY_COST: tuple[Recompute, ...] = ("none", "selective", "block")


class RecomputeFields(Section):
    """The keys of `train`."""

    recompute: Recompute = "none"
    """block: keep only each block's input and run it again in backward; selective: keep attention
    and every second matrix product (engine jax: each), run the rest again; same results, less
    memory"""


class RecomputeFeature(Feature[RecomputeFields, str]):
    """The feature. Its value is the config's word."""

    order = 110  # blocks are compiled, and their weights moved, before
    fields = RecomputeFields
    value = Recompute
    plan_off = "none"
    is_in_each_plan = True
    remedy_order = 10
    reruns_blocks = True
    hooks = ("torch", "jax")

    def check_model(self, config: Config, facts: Facts) -> None:
        """UserError: the model has no blocks, or may not run them twice."""
        if facts.coupled:
            raise UserError(
                f"{first_and_count(facts.coupled)} would count its statistics twice where blocks"
                " are computed again",
                f"leave {KEY} out",
                KEY,
            )
        if facts.blocks < 2:
            raise UserError(
                f"{KEY} {self.rerun(config)}: the model has no repeated blocks that could be run"
                " again",
                "its layers in a ModuleList or Sequential, or leave it out",
                KEY,
            )

    def decide(self, planned: Planned) -> Decision[str | None]:
        return Decision(self.rerun(planned.config))

    def ways(self, options: MemoryOptions, facts: Facts, _spec: StrategySpec) -> Sequence[Way]:
        more = _BY_COST[_BY_COST.index(self.fields_of(options.config).recompute) + 1 :]
        counted = facts.activations.recompute_bytes
        return [
            Way({"recompute": how}, f"{KEY}={how}", "keeps less for backward")
            for how in more
            if how in counted
        ]

    def remedy(self, value: str | None, activity: Activity) -> str:
        if value or activity == "evaluate":
            return ""
        return f"--set {KEY}=block keeps fewer activations"

    def rerun(self, config: Config) -> str:
        return self.fields_of(config).recompute

    def rerun_share(self, value: str, engine: str) -> float:
        """Of the matrix products, "selective" keeps every second with torch, and each with jax."""
        if value == "selective":
            return 0.5 if engine == "torch" else 0.0
        return 1.0


FEATURE = RecomputeFeature()
