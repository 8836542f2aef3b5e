"""The optimizers of a run: the config's by their names, or the task's own."""

from collections.abc import Collection, Mapping, Sequence
from functools import partial
from importlib import import_module
from typing import Any

from samecurve.torch_engine.optimizers.optimizer import (
    BuiltInOptimizer,
    OptimizerParam,
    OptimizerUpdate,
)
from samecurve.torch_engine.step.setup import EngineSetup, Update

# name -> module:class, imported when it is used; adamw and sgd are BuiltInOptimizer
OPTIMIZERS: Mapping[str, str] = {
    "adafactor": "adafactor:Adafactor",
    "adamw8bit": "adamw_8bit:AdamW8bit",
    "muon": "muon:Muon",
}


def make_updates(
    setup: EngineSetup, trained: Sequence[OptimizerParam], hidden: Collection[str]
) -> tuple[list[Update], OptimizerUpdate]:
    """The updates of a step, and the optimizer of all of them.

    hidden: names of the matrices of hidden layers.

    UserError: a parameter belongs to no phase of the task, or to two.
    """
    make = setup.task.optimizer

    def make_optimizer(params: Sequence[OptimizerParam], phase: str) -> OptimizerUpdate:
        if make is None:
            return make_built_in(setup, params, hidden, phase)
        from samecurve.torch_engine.optimizers.user_optimizer import UserOptimizer

        return UserOptimizer(partial(make, phase=phase), setup.optimizer, params)

    patterns = setup.task.phases
    if not patterns:
        optimizer = make_optimizer(trained, "")
        return [Update(trained, optimizer, make_optimizer)], optimizer
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
    name = setup.optimizer.name
    if name not in OPTIMIZERS:
        return BuiltInOptimizer(setup.optimizer, trained, phase)
    module, _, class_name = OPTIMIZERS[name].partition(":")
    make: Any = getattr(import_module(f"{__package__}.{module}"), class_name)
    optimizer: OptimizerUpdate = make(setup, trained, hidden, phase)
    return optimizer
