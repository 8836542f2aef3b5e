"""The moving average in engine torch."""

from collections.abc import Sequence

from samecurve.features.ema.weight_average import WeightAverage
from samecurve.torch_engine.step import State
from samecurve.torch_engine.step.feature_hooks import TorchHooks
from samecurve.torch_engine.step.training_step import TrainingStep


class Hooks(TorchHooks):
    """Adds the weights to the average after the last update of a step."""

    value: float  # the decay

    def begin(self, state: State) -> None:
        state.average = WeightAverage(self.value, state.trained, self.setup.strategy)

    def add_to(self, steps: Sequence[TrainingStep]) -> None:
        average = steps[-1].state.average
        assert isinstance(average, WeightAverage), "begin() has made it"
        steps[-1].after_update.append(lambda _step, finite: average.add(finite=finite))
