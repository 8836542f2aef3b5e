"""Plans for machines that one doesn't have (`samecurve plan --machine`).

An installed package makes them: an entry point of the group `samecurve.predictors` names a
Predictor.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from samecurve.core.entry_points import installed, load
from samecurve.errors import UserError

if TYPE_CHECKING:
    from samecurve.core.config.loading import LoadedConfig
    from samecurve.core.planning.facts import Facts
    from samecurve.core.planning.plan import Plan


class Prediction(Protocol):
    """What a run would be on another machine."""

    @property
    def facts(self) -> "Facts": ...

    @property
    def plan(self) -> "Plan | None": ...

    @property
    def refused(self) -> UserError | None:
        """Why there is no plan, though another strategy is possible."""
        ...

    @property
    def plan_or_refuse(self) -> "Plan":
        """The plan. UserError: the config would be refused on that machine."""
        ...

    def lines(self) -> list[str]: ...

    def json(self) -> dict[str, Any]: ...


class PredictionRequest(Protocol):
    """The machine that --machine and its flags ask about."""

    def predict(self, loaded: "LoadedConfig") -> Prediction:
        """Predict. UserError: that is not possible, or nothing fits there."""
        ...


class Predictor(Protocol):
    """Reads --machine and its flags."""

    def __call__(
        self, machine: str, mfu: float | None, bench: Path | None, chart: Path | None
    ) -> PredictionRequest: ...


def request_of(
    machine: str | None, mfu: float | None, bench: Path | None, chart: Path | None
) -> PredictionRequest | None:
    """Read the flags. None: the plan is for this machine.

    UserError: a flag needs --machine, is wrong, or no installed package makes such plans.
    """
    if machine is None:
        values = {"--mfu": mfu, "--from": bench, "--chart": chart}
        for flag in (flag for flag, value in values.items() if value is not None):
            raise UserError(f"{flag} is for another machine", "name it: --machine 8xH100", flag)
        return None
    points = installed("predictors")
    if not points:
        raise UserError(
            "no installed package plans for other machines",
            "install one that has an entry point of the group samecurve.predictors",
            "--machine",
        )
    read: Predictor = load(next(iter(points.values())), "predictor")
    return read(machine, mfu, bench, chart)
