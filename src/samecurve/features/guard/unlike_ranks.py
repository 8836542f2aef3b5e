"""The words for a loss that is another one on another rank."""

from samecurve.errors import UserError
from samecurve.torch_engine.step import EngineSetup
from samecurve.torch_engine.users_code import place_of_method


def unlike_error(setup: EngineSetup, cause: str) -> UserError:
    """The error of such a loss; all ranks call it together."""
    method = "features" if setup.plan.sees_whole_batch else "loss"
    where, state = place_of_method(setup.task, method), setup.features.get("task_state")
    differing = state.differing() if state else {}
    if differing:
        from samecurve.features.task_state.torch_hooks import KEEP_IN_MODEL, shown_name

        name, values = next(iter(differing.items()))
        return UserError(f"{cause}: {shown_name(name)} {values}", KEEP_IN_MODEL, where)
    return UserError(
        cause,
        "the loss may depend on the weights, the sample and the step alone. Look for what it reads"
        " beside them: the rank, a clock, a file, a global, a closure, a cache, and what an earlier"
        " microbatch has left in them. If there is none, a device may compute wrong:"
        " --set train.sentinel=50 finds it (docs/sentinel.md)",
        where,
    )
