"""The config's optimizers by their names."""

from collections.abc import Collection, Sequence

from samecurve.core.planning.optimizer_state import muon_names
from samecurve.torch_engine.optimizers.adafactor import Adafactor
from samecurve.torch_engine.optimizers.adamw_8bit import AdamW8bit
from samecurve.torch_engine.optimizers.muon import Muon
from samecurve.torch_engine.optimizers.optimizer import BuiltInOptimizer, OptimizerUpdate
from samecurve.torch_engine.optimizers.optimizer_params import OptimizerParam
from samecurve.torch_engine.step.setup import EngineSetup


def make_built_in(
    setup: EngineSetup,
    trained: Sequence[OptimizerParam],
    hidden: Collection[str],
    phase: str = "",
) -> OptimizerUpdate:
    """hidden: names of the matrices of hidden layers
    phase: of a step, where there are several
    """
    if setup.optimizer.name == "adafactor":
        return Adafactor(setup, trained, phase)
    if setup.optimizer.name == "adamw8bit":
        return AdamW8bit(setup, trained, phase)
    if setup.optimizer.name == "muon":
        shapes = {param.name: tuple(param.parameter.shape) for param in trained}
        matrices = muon_names(setup.optimizer.rules, shapes, hidden)
        return Muon(setup, trained, matrices, phase)
    return BuiltInOptimizer(setup.optimizer, trained, phase)
