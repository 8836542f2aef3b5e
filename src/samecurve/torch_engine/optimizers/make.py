"""The optimizers of a run: the config's by their names, or the task's own."""

from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any

from samecurve.torch_engine.optimizers.optimizer import BuiltInOptimizer, OptimizerUpdate
from samecurve.torch_engine.optimizers.optimizer_params import OptimizerParam
from samecurve.torch_engine.state import Update
from samecurve.torch_engine.step.setup import EngineSetup


def make_updates(
    setup: EngineSetup, trained: Sequence[OptimizerParam], hidden: Collection[str]
) -> tuple[list[Update], OptimizerUpdate]:
    """The updates of a step, and the optimizer of all of them.

    hidden: names of the matrices of hidden layers.

    UserError: a parameter belongs to no phase of the task, or to two.
    """
    make: Callable[..., Any] | None = getattr(setup.task, "optimizer", None)

    def make_optimizer(params: Sequence[OptimizerParam], phase: str) -> OptimizerUpdate:
        if make is None:
            return make_built_in(setup, params, hidden, phase)
        from samecurve.torch_engine.optimizers.user_optimizer import UserOptimizer

        return UserOptimizer(partial(make, phase=phase), setup.optimizer, params)

    patterns = getattr(setup.task, "phases", None)
    if not patterns:
        optimizer = make_optimizer(trained, "")
        return [Update(trained, optimizer)], optimizer
    from samecurve.torch_engine.step.phases import PhasedOptimizer, updates_by_phase

    updates = updates_by_phase(patterns, trained, make_optimizer)
    return updates, PhasedOptimizer(updates)


def make_built_in(
    setup: EngineSetup,
    trained: Sequence[OptimizerParam],
    hidden: Collection[str],
    phase: str = "",
) -> OptimizerUpdate:
    """The config's optimizer.

    hidden: names of the matrices of hidden layers.
    phase: of a step, where there are several.
    """
    if setup.optimizer.name == "adafactor":
        from samecurve.torch_engine.optimizers.adafactor import Adafactor

        return Adafactor(setup, trained, phase)
    if setup.optimizer.name == "adamw8bit":
        from samecurve.torch_engine.optimizers.adamw_8bit import AdamW8bit

        return AdamW8bit(setup, trained, phase)
    if setup.optimizer.name == "muon":
        from samecurve.core.planning.optimizer_state import muon_names
        from samecurve.torch_engine.optimizers.muon import Muon

        shapes = {param.name: tuple(param.parameter.shape) for param in trained}
        matrices = muon_names(setup.optimizer.rules, shapes, hidden)
        return Muon(setup, trained, matrices, phase)
    return BuiltInOptimizer(setup.optimizer, trained, phase)
