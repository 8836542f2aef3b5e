"""train.compile: torch.compile of each repeated block."""

from samecurve.core.config import Section
from samecurve.core.config.sections import Config
from samecurve.core.feature import Feature, Planned
from samecurve.core.planning import Decision
from samecurve.core.planning.layout import Layout
from samecurve.errors import UserError

KEY = "train.compile"


class CompileFields(Section):
    """The keys of `train`."""

    compile: bool = False
    """engine torch: torch.compile of each repeated block; faster steps, slower first ones; same
    results up to rounding"""


class Compile(Feature[CompileFields, bool]):
    """The feature."""

    order = 60  # layers are converted before
    fields = CompileFields
    value = bool
    plan_off = False
    is_in_each_plan = True
    table_only = ("compile",)
    compiles_blocks = True
    excludes = ("devices.offload_frozen",)
    hooks = ("torch",)

    def check(self, config: Config, layout: Layout | None) -> None:
        """UserError: the model can't be compiled here."""
        del layout
        if config.engine == "jax":
            raise UserError(
                f"{KEY} is for engine torch: jax compiles its step anyway",
                f"leave --compile out (--set {KEY}=false, where a file asks for it)",
                KEY,
            )

    def decide(self, planned: Planned) -> Decision[bool | None]:
        parts, blocks = "the model as a whole: it has no repeated blocks", planned.facts.blocks
        if blocks > 1:
            parts = f"{blocks} blocks, one program for all that are alike"
        reason = f"{parts}; the first steps, and the first of each other shape, take longer"
        if planned.compute.deterministic:
            reason += "; every rank compiles the same programs, which is checked"
        return Decision(True, {"compile": reason})


FEATURE = Compile()
