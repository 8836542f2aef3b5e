"""devices.compress: gradients are sent in fewer bytes than they are computed in."""

from typing import Literal

from samecurve.core.config import Section
from samecurve.core.config.sections import Config
from samecurve.core.feature import Feature, Planned
from samecurve.core.planning import Decision
from samecurve.core.planning.layout import Layout
from samecurve.core.strategies import StrategySpec
from samecurve.errors import UserError

KEY = "devices.compress"
Compress = Literal["none", "bf16", "fp16", "powersgd"]
_BYTES = {"bf16": 2, "fp16": 2}


class CompressFields(Section):
    """The keys of `devices`."""

    compress: Compress = "none"
    """ddp: what gradients are reduced as; changes results"""


class CompressedSums(Feature[CompressFields, str]):
    """The feature. Its value is the config's word."""

    order = 40
    section = "devices"
    fields = CompressFields
    value = Compress
    plan_off = "none"
    is_in_each_plan = True
    of_some_strategies = True
    follows_devices = True
    hooks = ("sum",)

    def check(self, config: Config, layout: Layout | None) -> None:
        """UserError: no gradients could be sent so, or results would be others than asked for."""
        if layout is None:
            return
        how = self.fields_of(config).compress
        _check_strategy(layout.spec)
        if config.train.precision == "f64":
            raise UserError(
                f"compress {how} would throw away what f64 is for",
                "leave --compress out, or --dtype f32",
                KEY,
            )

    def not_same_bits(self, config: Config) -> str:
        return f"compress {self.fields_of(config).compress} rounds what each device sends"

    def decide(self, planned: Planned) -> Decision[str | None]:
        how = self.fields_of(planned.config).compress
        warning = (
            f"gradients are reduced as {how}: results change with it and with the number of devices"
        )
        return Decision(how, {}, (warning,))

    def bytes_sent(self, value: str, width: int) -> int:
        return _BYTES.get(value, width)

    def not_simulated(self, config: Config) -> tuple[str, str] | None:
        if self.fields_of(config).compress != "powersgd":
            return None
        return "--machine does not predict --compress powersgd", "none, bf16 or fp16"


def _check_strategy(spec: StrategySpec) -> None:
    """UserError: under this strategy no buckets of gradients are summed."""
    if spec.engine != "torch":
        raise UserError(f"{KEY} is for engine torch", "leave it out, or --engine torch", KEY)
    if not spec.sums_buckets:
        raise UserError(
            f"{KEY} is for strategy ddp, not {spec.name}: it shortens what ddp's all-reduce sends",
            "--strategy ddp, or leave --compress out",
            KEY,
        )


FEATURE = CompressedSums()
