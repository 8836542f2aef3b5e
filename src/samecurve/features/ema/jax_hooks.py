"""The moving average in engine jax."""

from samecurve.jax_engine.array_types import Arrays
from samecurve.jax_engine.feature_hooks import JaxHooks


class Hooks(JaxHooks):
    """Adds the weights to the average in the program of a step."""

    value: float  # the decay
    keeps_average = True

    def average_after(self, average: Arrays, moved: Arrays) -> Arrays:
        return {
            name: values + (1 - self.value) * (moved[name] - values)
            for name, values in average.items()
        }
