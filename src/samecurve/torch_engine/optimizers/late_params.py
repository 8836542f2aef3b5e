"""Optimizers for parameters that the loss uses for the first time after the first step of a run.

A parameter that the loss has not used yet is left out of every update. Parameters that are used
first in the same step form a group with an optimizer of its own, whose count of updates begins with
that step, as each parameter's count does in torch.optim. A checkpoint holds the number of a
parameter's group: 0 for the parameters that are not used yet, 1 for the first that began late, and
so on. Parameters of the first step have no such number.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence

from samecurve.torch_engine.optimizers import (
    JoinedOptimizers,
    OptimizerParam,
    OptimizerUpdate,
)
from samecurve.torch_engine.optimizers.user_optimizer import UserOptimizer
from samecurve.torch_engine.step import State, Update

_UNUSED = 0
_FIRST_STEP = -1  # stands for the group of the parameters that the first step used


def note_first_use(
    state: State,
    update: Update,
    used: Collection[str],
    unused: Collection[str],
    *,
    is_first_step: bool,
) -> None:
    """Change the optimizers before the update of a step that uses parameters for the first time.

    used: names of these parameters. unused: names of those that no step has used.
    """
    if is_first_step:
        set_late(state, {**state.late, **dict.fromkeys(unused, _UNUSED)}, [update])
        return
    optimizer, late = update.optimizer, dict(state.late)
    if isinstance(optimizer, UserOptimizer):
        state.late = {name: group for name, group in late.items() if name not in used}
        optimizer.leave_out(_named(update.trained, state.late))
        return
    assert isinstance(optimizer, LateOptimizer)
    group = 1 + max(late.values())
    state.late = late | dict.fromkeys(used, group)
    optimizer.begin(used, group)


def set_late(state: State, late: Mapping[str, int], updates: Sequence[Update]) -> None:
    """Make optimizers for these groups of late parameters; their state is empty.

    late: number of the group, by name of the parameter.
    updates: those whose optimizers are to change
    """
    state.late = dict(late)
    for update in updates:
        if isinstance(update.optimizer, UserOptimizer):
            update.optimizer.leave_out(_named(update.trained, late))
            continue
        is_whole = state.optimizer is update.optimizer
        # free the memory of the old state before the new one is made
        update.optimizer = LateOptimizer(update, (), {})
        if is_whole:
            state.optimizer = update.optimizer
        if _named(update.trained, late):
            update.optimizer = LateOptimizer(update, update.trained, late)
        else:
            update.optimizer = update.make(update.trained, update.phase)
        if is_whole:
            state.optimizer = update.optimizer


def _named(params: Sequence[OptimizerParam], names: Collection[str]) -> list[OptimizerParam]:
    return [param for param in params if param.name in names]


class LateOptimizer(JoinedOptimizers):
    """The optimizers of an update, by group.

    late: number of the group, by name of the parameter.
    """

    def __init__(
        self, update: Update, trained: Sequence[OptimizerParam], late: Mapping[str, int]
    ) -> None:
        self._make, self._phase, self._trained = update.make, update.phase, trained
        self._group_of = {param.name: late.get(param.name, _FIRST_STEP) for param in trained}
        self._optimizers: dict[int, OptimizerUpdate] = {}
        for group in sorted(set(self._group_of.values())):
            self._make_group(group)

    def begin(self, names: Collection[str], group: int) -> None:
        """Train these parameters from now on, as a new group."""
        self._group_of.update(dict.fromkeys(names, group))
        self._make_group(_UNUSED)
        self._make_group(group)

    def _make_group(self, group: int) -> None:
        self._optimizers.pop(group, None)
        params = [param for param in self._trained if self._group_of[param.name] == group]
        if params:
            # the count of updates is saved under the name of a phase (ConfigOptimizer)
            parts = [self._phase] if group == _FIRST_STEP else [self._phase, f"late/{group}"]
            self._optimizers[group] = self._make(params, "/".join(filter(None, parts)))

    def each(self) -> Iterable[OptimizerUpdate]:
        return [one for group, one in self._optimizers.items() if group != _UNUSED]

    def optimizer_of(self, param: OptimizerParam) -> OptimizerUpdate:
        return self._optimizers[self._group_of[param.name]]

    def create_state(self) -> None:
        """Also of what is not used yet: a checkpoint has its state, too."""
        for optimizer in self._optimizers.values():
            optimizer.create_state()
