"""The optimizers of a run: the config's by their names, or the task's own."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import partial

from samecurve.core.feature_list import spec_of
from samecurve.torch_engine.optimizers.optimizer import (
    BuiltInOptimizer,
    JoinedOptimizers,
    OptimizerParam,
    OptimizerUpdate,
)
from samecurve.torch_engine.step.setup import EngineSetup, Update


def make_updates(
    setup: EngineSetup, trained: Sequence[OptimizerParam], hidden: Collection[str]
) -> tuple[list[Update], OptimizerUpdate]:
    """The updates of a step, and the optimizer of all of them.

    hidden: names of the matrices of hidden layers.

    UserError: a feature divides the parameters, and can't.
    """
    make = setup.task.optimizer

    def make_optimizer(params: Sequence[OptimizerParam], phase: str) -> OptimizerUpdate:
        if make is None:
            return _from_config(setup, params, hidden, phase)
        from samecurve.torch_engine.optimizers.user_optimizer import UserOptimizer

        return UserOptimizer(partial(make, phase=phase), setup.optimizer, params)

    for hooks in setup.features.values():
        if updates := hooks.updates(trained, make_optimizer):
            return updates, OptimizerOfUpdates(updates)
    optimizer = make_optimizer(trained, "")
    return [Update(trained, optimizer, make_optimizer)], optimizer


def _from_config(
    setup: EngineSetup, trained: Sequence[OptimizerParam], hidden: Collection[str], phase: str
) -> OptimizerUpdate:
    """The config's optimizer, beside adamw for the parameters that it is not for.

    hidden: names of the matrices of hidden layers.
    phase: of a step, where there are several.
    """
    fields = setup.optimizer
    built_in = _built_in(setup)
    spec = spec_of(fields.name)
    if spec is None:
        return built_in(fields, trained, phase)
    kind = spec.torch_class()
    own = kind.chosen(fields, trained, hidden)
    ids = set(map(id, own))
    others = [param for param in trained if id(param) not in ids]
    by_name: dict[str, OptimizerUpdate] = {}
    if own:
        by_name |= dict.fromkeys((param.name for param in own), kind(setup, own, phase))
    if others:
        adamw = built_in(fields.model_copy(update={"name": "adamw"}), others, phase)
        by_name |= dict.fromkeys((param.name for param in others), adamw)
    return OptimizersByName(by_name)


def _built_in(setup: EngineSetup) -> type[BuiltInOptimizer]:
    """The class of adamw and sgd."""
    if not setup.plan.compute.deterministic:
        return BuiltInOptimizer
    from samecurve.torch_engine.optimizers.vector_updates import VectorOptimizer

    return VectorOptimizer


class OptimizersByName(JoinedOptimizers):
    """An optimizer for each name of a parameter; several parameters may have the same one."""

    def __init__(self, by_name: Mapping[str, OptimizerUpdate]) -> None:
        self._by_name = by_name

    def each(self) -> Iterable[OptimizerUpdate]:
        return dict.fromkeys(self._by_name.values())

    def optimizer_of(self, param: OptimizerParam) -> OptimizerUpdate:
        return self._by_name[param.name]


class OptimizerOfUpdates(JoinedOptimizers):
    """The optimizers of several updates, as they are when they are asked for: an update may get
    another one (late_params.py).
    """

    def __init__(self, updates: Sequence[Update]) -> None:
        self._updates = updates
        self._by_name = {param.name: update for update in updates for param in update.trained}

    def each(self) -> Iterable[OptimizerUpdate]:
        return (update.optimizer for update in self._updates)

    def optimizer_of(self, param: OptimizerParam) -> OptimizerUpdate:
        return self._by_name[param.name].optimizer
