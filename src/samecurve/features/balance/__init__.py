"""devices.balance: faster devices compute more microbatches of a step."""

import math
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, PositiveFloat

from samecurve.core.config import Section
from samecurve.core.config.sections import Config
from samecurve.core.feature import Feature, Planned
from samecurve.core.planning import Decision
from samecurve.core.planning.batch import BatchSplit
from samecurve.core.planning.facts import Facts, Speed, Speeds
from samecurve.core.planning.layout import Layout
from samecurve.errors import UserError
from samecurve.features.balance.uneven_split import choose_uneven_split
from samecurve.units import counted, first_and_count

KEY = "devices.balance"


def _balance(value: object) -> str | tuple[float, ...]:
    """The word, or a relative speed for each device; `2,1`, as on a command line, is a list too."""
    if isinstance(value, str) and value in {"even", "measured"}:
        return value
    parts: Sequence[Any] = []
    if isinstance(value, str):
        parts = _numbers(value.split(","))
    elif isinstance(value, list | tuple):
        parts = value
    if not parts or not all(
        isinstance(part, int | float) and not isinstance(part, bool) and 0 < part < math.inf
        for part in parts
    ):
        raise ValueError("must be even, measured, or a relative speed for each device: [2, 1]")
    return tuple(map(float, parts))


def _numbers(texts: Sequence[str]) -> list[float]:
    try:
        return [float(text) for text in texts]
    except ValueError:
        return []


Balance = Annotated[
    Literal["even", "measured"] | tuple[PositiveFloat, ...], BeforeValidator(_balance)
]


class BalanceFields(Section):
    """The keys of `devices`."""

    balance: Balance = "even"
    """dp, ddp with engine torch: as many microbatches for each device, or by its measured speed, or
    by relative speeds given here; same results"""


class BalanceFeature(Feature[BalanceFields, None]):
    """The feature. Its split of the step is in the plan."""

    order = 30
    section = "devices"
    fields = BalanceFields
    of_some_strategies = True
    fixes_devices = True

    def check(self, config: Config, layout: Layout | None) -> None:
        """UserError: this layout or batch can't be split unevenly."""
        if layout is None:
            return
        balance, refusal = balance_of(config), layout.spec.even_because
        if layout.num_devices == 1:
            raise _refused(
                "one device takes all microbatches there are", "--balance even, or more devices"
            )
        if refusal:
            raise _refused(refusal.why, refusal.remedy)
        if config.batch.samples and config.batch.accumulate:
            raise _refused(
                "batch.accumulate cuts a step evenly",
                "leave batch.accumulate out; batch.per_device is the most that a device takes at"
                " once",
            )
        if not isinstance(balance, str) and len(balance) != layout.num_devices:
            raise UserError(
                f"{KEY} gives {counted(len(balance), 'speed')} for {layout.num_devices} devices",
                "one for each, in their order",
                KEY,
            )

    def check_unmeasured(self, config: Config, layout: Layout | None) -> None:
        """UserError: the speeds can't be known."""
        if balance_of(config) != "measured" or layout is None:
            return
        if layout.num_devices > 1 and not layout.spec.even_because:
            example = "2,1,..." if layout.num_devices > 2 else "2,1"
            raise UserError(
                f"{KEY} measured: ranks that others started (torchrun, Slurm, --nnodes) can't be"
                " measured before they train",
                f"relative speeds by hand, one for each of the {layout.num_devices} devices:"
                f" --balance {example}",
                KEY,
            )

    def check_model(self, config: Config, facts: Facts) -> None:
        """UserError: smaller microbatches would change the result."""
        is_allowed = config.train.allow_coupled and not config.names("train.norm_sync")
        if facts.coupled and not is_allowed:
            raise _refused(
                f"{first_and_count(facts.coupled)} mixes the samples of a microbatch, and smaller"
                " ones would change the result",
                "--balance even, or a norm that treats each sample by itself (GroupNorm,"
                " LayerNorm)",
            )

    def split(
        self, config: Config, facts: Facts, even: BatchSplit, *, may_cut: bool
    ) -> Decision[BatchSplit] | None:
        balance, speeds = balance_of(config), facts.measured.speeds
        if not isinstance(balance, str):
            speeds = Speeds(devices=tuple(Speed(0.0, 1 / speed) for speed in balance))
        if speeds is None or not speeds.devices:
            return None
        return choose_uneven_split(speeds, even, may_cut=may_cut)

    def decide(self, _planned: Planned) -> Decision[None]:
        return Decision(None)

    def not_simulated(self, _config: Config) -> tuple[str, str]:
        return (
            f"--machine predicts equal devices; {KEY} gives them different speeds",
            "--balance even, or leave --machine out",
        )


def balance_of(config: Config) -> str | tuple[float, ...]:
    """The config's word, or a relative speed for each device."""
    return FEATURE.fields_of(config).balance


def with_even_balance(config: Config) -> Config:
    """The config with an even split, for other devices or for a trial."""
    return config.with_values(devices={"balance": "even"})


def _refused(why: str, remedy: str) -> UserError:
    return UserError(f"{KEY}: {why}", remedy, KEY)


FEATURE = BalanceFeature()
