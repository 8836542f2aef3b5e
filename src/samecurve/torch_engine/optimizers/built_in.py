"""The config's optimizers by their names."""

from collections.abc import Sequence

from samecurve.torch_engine.optimizer import BuiltInOptimizer, OptimizerUpdate
from samecurve.torch_engine.optimizer_params import OptimizerParam
from samecurve.torch_engine.optimizers.adafactor import Adafactor
from samecurve.torch_engine.setup import EngineSetup


def make_built_in(
    setup: EngineSetup, trained: Sequence[OptimizerParam], phase: str = ""
) -> OptimizerUpdate:
    """phase: of a step, where there are several"""
    if setup.optimizer.name == "adafactor":
        return Adafactor(setup.optimizer, trained, setup.strategy, phase)
    return BuiltInOptimizer(setup.optimizer, trained, phase)
