"""The training step of a run, put together from its plan: a TrainingStep for each update, with the
hooks that only some runs need.
"""

from functools import partial

from samecurve.torch_engine.optimizers.optimizer import HostCopyParam
from samecurve.torch_engine.step.first_steps import HeldByTask, UsageWatch
from samecurve.torch_engine.step.setup import EngineSetup, State
from samecurve.torch_engine.step.training_step import Step, TrainingStep


def make_training_step(setup: EngineSetup, state: State) -> Step:
    """The step of this process."""
    features = setup.features.values()
    kinds = [hooks.step_class for hooks in features if hooks.step_class] or [TrainingStep]
    steps: list[TrainingStep] = [kinds[0](setup, state, update) for update in state.updates]
    for step in steps:
        _move_host_copies_back(step)
        _watch_first_steps(step)
        _time_forward(step)
    _check_held_tensors(steps[-1])
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
    if plan.layout.world_size == 1 or plan.layout.shards > 1 or plan.compute.norm_sync:
        return
    from samecurve.torch_engine.profiling.forward_timer import ForwardTimer

    timer = ForwardTimer(step.setup.device, step.report)
    step.before_forward.append(timer.begin)
    step.after_forward.append(timer.end)


def _check_held_tensors(step: TrainingStep) -> None:
    """Check once, after a backward pass: the loss trains no tensor that is outside of the model."""
    task, strategy = step.setup.task, step.setup.strategy
    step.after_reduction.append(lambda: HeldByTask(task, strategy.models[0]).refuse_learned())


def _watch(step: TrainingStep) -> None:
    """Time the parts of the step where a profile is taken (`samecurve profile`)."""
    timeline = step.comm.timeline
    if timeline is None:
        return
    from samecurve.torch_engine.profiling.timeline import time_parts

    time_parts(step, timeline)
