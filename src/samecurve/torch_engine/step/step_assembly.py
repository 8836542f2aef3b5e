"""The training step of a run, put together from its plan: the updates with their optimizers, the
config's by their names or the task's own; a TrainingStep for each; the hooks that only some runs
need.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import partial

import torch

from samecurve.core.feature_list import spec_of
from samecurve.errors import UserError
from samecurve.torch_engine.optimizers import (
    BuiltInOptimizer,
    HostCopyParam,
    JoinedOptimizers,
    OptimizerParam,
    OptimizerUpdate,
)
from samecurve.torch_engine.step import EngineSetup, State, Update
from samecurve.torch_engine.step.training_step import Step, TrainingStep

_MOST_STEPS = 100  # after which the parameters are named that the loss has not used


def make_training_step(setup: EngineSetup, state: State) -> Step:
    """The step of this process."""
    features = setup.features.values()
    kinds = {name: one.step_class for name, one in setup.features.items() if one.step_class}
    if len(kinds) > 1:
        names = " and ".join(kinds)
        raise UserError(f"{names} each have a step of their own", "leave one of them out")
    kind = next(iter(kinds.values()), TrainingStep)
    steps: list[TrainingStep] = [kind(setup, state, update) for update in state.updates]
    for step in steps:
        _move_host_copies_back(step)
        _watch_first_steps(step)
        _time_forward(step)
    for hooks in features:
        hooks.add_to(steps)
    for step in steps:
        _watch(step)
    if len(steps) == 1:
        return steps[0].run
    joined: Step = next(filter(None, (hooks.joined(steps) for hooks in features)))
    return joined


def _move_host_copies_back(step: TrainingStep) -> None:
    """Give parameters that lie whole on a GPU the values of their copies in host memory."""
    for param in step.update.trained:
        if isinstance(param, HostCopyParam):
            step.after_update.append(partial(_move_back, param))


def _move_back(copied: HostCopyParam, _step: int, _finite: object) -> None:
    copied.move_back()


def _watch_first_steps(step: TrainingStep) -> None:
    """Agree on the names of means, and look for parameters that the loss does not use."""
    setup = step.setup
    agree = partial(step.named_means.agree, setup.comm, setup.device)
    step.after_reduction += [agree, UsageWatch(setup, step.state, step.update).end_step]


def _time_forward(step: TrainingStep) -> None:
    """Time a forward pass of each rank, unless it waits for other ranks. These times tell the slow
    rank from the ranks that wait for it.
    """
    plan = step.plan
    if plan.layout.world_size == 1 or plan.layout.shards > 1 or plan.syncs_norms:
        return
    from samecurve.torch_engine.profiling.forward_timer import ForwardTimer

    timer = ForwardTimer(step.setup.device, step.report)
    step.before_forward.append(timer.begin)
    step.after_forward.append(timer.end)


def _watch(step: TrainingStep) -> None:
    """Time the parts of the step where a profile is taken (`samecurve profile`)."""
    timeline = step.comm.timeline
    if timeline is None:
        return
    from samecurve.torch_engine.profiling.timeline import time_parts

    time_parts(step, timeline)


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


class UsageWatch:
    """Watches which parameters of an update the loss has used, until it has used all of them.

    A parameter is trained from the first step in which any sample of the global batch gives it a
    gradient, as in a plain loop on one device. Until then it stays as it is. From then on a step
    that does not use the parameter gives it a zero gradient.

    All ranks must know of the first use before the update, so each watched step ends with one small
    all-reduce, for which the host waits. It names only the parameters that are still unused.
    """

    def __init__(self, setup: EngineSetup, state: State, update: Update) -> None:
        self._setup, self._state, self._update = setup, state, update
        plan = setup.plan
        self._last_step = min(plan.order.steps_per_epoch, _MOST_STEPS, plan.steps)
        self._step = state.step
        self._unused = [
            param for param in update.trained if not self._step or state.late.get(param.name) == 0
        ]

    def end_step(self) -> bool:
        """Note what a step used. Returns whether something is left to watch. All ranks call it,
        between the reduction and the update.
        """
        is_first = not self._step
        self._step += 1
        used = self._used()
        unused = [param for param in self._unused if param.name not in used]
        if unused if is_first else used:
            from samecurve.torch_engine.optimizers.late_params import note_first_use

            names = [param.name for param in unused]
            note_first_use(self._state, self._update, used, names, is_first_step=is_first)
        self._unused = unused
        if unused and self._step == self._last_step:
            from samecurve.core.unused_params import unused_line

            self._setup.notes.append(unused_line([param.name for param in unused]))
        return bool(unused)

    def _used(self) -> set[str]:
        """The watched parameters that this step's loss used, on any rank."""
        has_gradient = self._setup.strategy.has_gradient
        counts = [float(has_gradient(param.parameter)) for param in self._unused]
        if self._setup.comm.group is not None and counts:
            sent = torch.tensor(counts, dtype=torch.float64, device=self._setup.device)
            counts = self._setup.comm.all_reduce(sent)().tolist()
        return {param.name for param, count in zip(self._unused, counts, strict=True) if count}
