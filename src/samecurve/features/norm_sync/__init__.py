"""train.norm_sync: BatchNorm takes its statistics over all samples of a step."""

from collections.abc import Sequence

from samecurve.core.config import Section
from samecurve.core.config.sections import Config
from samecurve.core.feature import Feature, Planned
from samecurve.core.planning import Decision
from samecurve.core.planning.batch import BatchSplit
from samecurve.core.planning.layout import Layout
from samecurve.errors import UserError
from samecurve.units import first_and_count

KEY = "train.norm_sync"


class NormSyncFields(Section):
    """The keys of `train`."""

    norm_sync: bool = False
    """BatchNorm over the whole step's samples, on whatever devices they are"""


class NormSync(Feature[NormSyncFields, bool]):
    """The feature."""

    order = 25
    fields = NormSyncFields
    value = bool
    plan_off = False
    is_in_each_plan = True
    syncs_norms = True
    hooks = ("torch",)

    def check(self, config: Config, layout: Layout | None) -> None:
        """UserError: this engine has no such norms."""
        del layout
        if config.engine != "torch":
            raise UserError(
                f"{KEY} is for engine torch",
                "a norm that treats each sample by itself (GroupNorm, LayerNorm), or --engine"
                " torch",
                KEY,
            )

    def settles(self, coupled: Sequence[str], split: BatchSplit) -> str:
        only_norms = bool(coupled) and all(name.startswith("BatchNorm") for name in coupled)
        if only_norms and (split.num_microbatches == 1 or split.accumulation_steps == 1):
            return f"{first_and_count(coupled)}: statistics over the whole step, synchronised"
        return ""

    def decide(self, planned: Planned) -> Decision[bool | None]:
        if planned.facts.coupled:
            return Decision(True)
        if planned.config.train.allow_coupled:
            return Decision(None)
        warning = f"{KEY}: the model has no BatchNorm, so there is nothing to synchronise"
        return Decision(None, {}, (warning,))


FEATURE = NormSync()
