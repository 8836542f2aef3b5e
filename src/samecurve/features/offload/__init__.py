"""devices.offload: shards of weights, gradients and optimizer state lie in host memory."""

from dataclasses import replace

from samecurve.core.config import Section
from samecurve.core.config.sections import Config
from samecurve.core.feature import Feature, Planned
from samecurve.core.planning import Decision
from samecurve.core.planning.facts import Facts
from samecurve.core.planning.layout import Layout
from samecurve.core.planning.memory import MemoryOptions, MemoryTerm
from samecurve.core.strategies import StrategySpec
from samecurve.errors import UserError

KEY = "devices.offload"


class OffloadFields(Section):
    """The keys of `devices`."""

    offload: bool = False
    """fsdp, hsdp: weights, gradients and optimizer in host memory"""


class Offload(Feature[OffloadFields, bool]):
    """The feature. Strategies with shards ask the plan for it."""

    order = 90
    section = "devices"
    fields = OffloadFields
    value = bool
    plan_off = False
    is_in_each_plan = True
    of_some_strategies = True
    keeps_state_on_host = True

    def check(self, config: Config, layout: Layout | None) -> None:
        """UserError: nothing could lie in host memory instead, or something else asks for what
        this is to avoid.
        """
        if layout is None:
            return
        if layout.engine != "torch":
            raise UserError(f"{KEY} is for engine torch", "leave it out, or --engine torch", KEY)
        on_cpu = layout.devices[0].kind == "cpu"
        if layout.shards == 1 or on_cpu:
            why = "these are CPU ranks: their state is in host memory already"
            if layout.shards == 1:
                why = f"strategy {layout.strategy} holds the whole model on each device"
            raise UserError(f"{KEY}: {why}", "leave it out, or --strategy fsdp on GPUs", KEY)
        if config.devices.gather == "step":
            raise UserError(
                f"devices.gather step: whole weights stay on the device, which {KEY} is to avoid",
                "leave one of them out",
                "devices.gather",
            )

    def not_same_bits(self, config: Config) -> str:
        del config
        return (
            f"with {KEY} the host's CPU makes the updates, and it rounds in another way than the"
            " devices"
        )

    def decide(self, _planned: Planned) -> Decision[bool | None]:
        return Decision(True)

    def placed(
        self, terms: list[MemoryTerm], _options: MemoryOptions, _facts: Facts, _spec: StrategySpec
    ) -> list[MemoryTerm]:
        return [replace(term, bytes=0, formula=f"{term.formula}: in host memory") for term in terms]

    def not_simulated(self, config: Config) -> tuple[str, str] | None:
        del config
        return (
            f"--machine does not predict {KEY}, whose updates are made by the host",
            "leave one of them out",
        )


FEATURE = Offload()
