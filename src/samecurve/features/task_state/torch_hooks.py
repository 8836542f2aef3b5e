"""The state of a task's code under torch: attributes that have changed since the run began.

Looked at are the task, and modules of the user's own classes. Attributes of a module are kept
together or not at all: a count of what it has cached is worth nothing without the cache.
"""

import json
from collections.abc import Mapping
from contextlib import suppress
from functools import cached_property
from typing import Any

import torch

from samecurve.errors import UserError
from samecurve.torch_engine.process_group import texts_of_all
from samecurve.torch_engine.step.feature_hooks import Start, TorchHooks
from samecurve.torch_engine.users_code import VARIABLE, is_users, names_read, place_of_method
from samecurve.torch_engine.users_code.side_effects import Attributes

KEEP_IN_MODEL = (
    "what follows from the weights and the step, which loss(self, model, batch, step) and"
    " after_step(self, model, step) are given; what is learnt from samples belongs in the model:"
    " parameters, or register_buffer() with a row for each sample's id"
)
_TASK = "task"  # the path of a task's attributes
_SHOWN = 60  # characters of a value
Values = dict[str, Any]  # as JSON has them, by the attribute's full name


class Hooks(TorchHooks):
    """Notes the attributes as a run begins, and gives those that have changed to a checkpoint."""

    _start: Start | None = None  # None: nothing is trained
    _restored: frozenset[str] = frozenset()  # names of attributes that a checkpoint had

    @cached_property
    def _task(self) -> object:
        return getattr(self.setup.task, "task", self.setup.task)

    @cached_property
    def _attributes(self) -> Attributes:
        return Attributes(self.setup.strategy.models[0], self._task)

    @cached_property
    def _users(self) -> frozenset[str]:
        """Paths of what has a class of the user's."""
        modules = self.setup.strategy.models[0].named_modules()
        named = {_TASK: self._task, **{name or "model": module for name, module in modules}}
        return frozenset(path for path, one in named.items() if is_users(type(one)))

    def begin_training(self, start: Start) -> Mapping[str, Any]:
        self._start = start
        attributes = self._attributes  # as they are made, whatever a checkpoint has
        if not start.kept:
            return {}
        from samecurve.features.task_state.written_values import read

        restored = set()
        for name, value in start.kept.items():
            with suppress(KeyError):  # its holder is gone: the code has changed, as a line has said
                attributes.set(name, read(value))
                restored.add(name)
        self._restored = frozenset(restored)
        return {}

    def kept(self) -> Values:
        values, failing, differing = self._compared()
        failing = {**differing, **failing}
        if failing:
            self._refuse_if_needed(failing)
        return {name: value for name, value in values.items() if not _is_left(name, failing)}

    def differing(self) -> dict[str, str]:
        """What ranks hold in other values, in words, by the attribute's name; all ranks call it
        together.
        """
        return self._compared()[2]

    def _compared(self) -> tuple[Values, dict[str, str], dict[str, str]]:
        """This rank's values; why some can't be written down, on any rank; and which differ."""
        values, failing = self._written()
        both = json.dumps([values, failing], sort_keys=True).encode()
        texts = texts_of_all(self.setup.comm, both, self.setup.device)
        of_ranks = [json.loads(text) for text in texts]
        for _, of_rank in of_ranks:
            failing |= of_rank
        differing: dict[str, str] = {}
        for name in sorted({name for values, _ in of_ranks for name in values}):
            each = [values.get(name) for values, _ in of_ranks]
            other = next((rank for rank, one in enumerate(each) if one != each[0]), None)
            if other is not None:
                shown = f"{_shown(each[0])} on rank 0, and {_shown(each[other])} on rank {other}"
                differing[name] = f"is {shown}"
        return values, failing, differing

    def _written(self) -> tuple[Values, dict[str, str]]:
        """The values that can be written down, and why others can't be, by name."""
        changed = self._attributes.changed()
        for name in self._restored - changed.keys():
            changed[name] = self._attributes.read(name)
        changed = {name: value for name, value in changed.items() if self._is_of_user(name)}
        values: Values = {}
        failing: dict[str, str] = {}
        if not changed:
            return values, failing
        from samecurve.features.task_state.written_values import CantBeWrittenError, written

        for name, value in changed.items():
            try:
                values[name] = written(value)
            except CantBeWrittenError:
                kind = type(value).__name__
                failing[name] = f"is a {kind} that is too large for a checkpoint, or no plain value"
        return values, failing

    def _is_of_user(self, name: str) -> bool:
        if name.startswith(VARIABLE):
            return True
        path = name.rpartition(".")[0]
        if path == _TASK or path.startswith(f"{_TASK}."):
            return _TASK in self._users
        return path in self._users

    def _refuse_if_needed(self, failing: Mapping[str, str]) -> None:
        """UserError: the loss, or what follows an update, depends on such an attribute."""
        readers = ("after_step", "schedule")
        read_later = {name for method in readers for name in names_read(self._task, method)}
        names = [name for name in sorted(failing) if name.rpartition(".")[2] in read_later]
        for name in () if names else sorted(failing):
            if self._loss_depends(name):
                names = [name]
                break
        if not names:
            return
        first = names[0].replace(f"{_TASK}.", "self.", 1)
        raise UserError(
            f"the training depends on {first}, which changes as it goes and {failing[names[0]]}: a"
            " resumed run, and one on other devices, would give another curve",
            KEEP_IN_MODEL,
            place_of_method(self._task, "features" if self.setup.plan.sees_whole_batch else "loss"),
        )

    def _loss_depends(self, name: str) -> bool:
        """Whether the loss is another one with the attribute as it was in the beginning, on any
        rank.
        """
        if self._start is None:
            return False
        from samecurve.features.guard.additivity import compare_repeats
        from samecurve.features.guard.trials import Trials

        trials = Trials(self.setup, self._start.rows, self._start.stage)
        with trials.prepared():
            now = trials.loss_if_any(trials.samples)
            trials.put_back()
            self._attributes.put_back([name])
            then = trials.loss_if_any(trials.samples)
        differs = (now is None) != (then is None)
        if now and then:
            differs = compare_repeats(now, then, 0.0) is not None
        flag = torch.tensor(float(differs), dtype=torch.float64, device=self.setup.device)
        return bool(self.setup.comm.all_reduce(flag)() > 0)


def _is_left(name: str, failing: Mapping[str, str]) -> bool:
    """Whether an attribute is not saved: it differs, or belongs to a module with one that does."""
    path = name.rpartition(".")[0]
    if path == _TASK or name.startswith(VARIABLE):
        return name in failing
    return any(other.rpartition(".")[0] == path for other in failing)


def _shown(value: object) -> str:
    text = "absent" if value is None else json.dumps(value)
    return text if len(text) <= _SHOWN else text[: _SHOWN - 3] + "..."
