"""The state of a task's code under torch: attributes and variables that have changed since the run
began, and buffers that no checkpoint has otherwise.

Looked at are the task, modules of the user's own classes, and variables of the user's code.
Attributes of a module are kept together or not at all: a count of what it has cached is worth
nothing without the cache.
"""

import json
from collections.abc import Mapping, Sequence, Set
from contextlib import suppress
from functools import cached_property
from typing import Any

import torch
from torch import nn

from samecurve.errors import UserError
from samecurve.torch_engine.process_group import texts_of_all
from samecurve.torch_engine.step.feature_hooks import Start, TorchHooks
from samecurve.torch_engine.step.training_step import TrainingStep
from samecurve.torch_engine.users_code import is_users, loss_place, names_read
from samecurve.torch_engine.users_code.holders import Holder, Variables
from samecurve.torch_engine.users_code.side_effects import Attributes, Position

KEEP_IN_MODEL = (
    "what follows from the weights and the step, which loss(self, model, batch, step) and"
    " after_step(self, model, step) are given; what is learnt from samples belongs in the model:"
    " parameters, or register_buffer() with a row for each sample's id"
)
_OF_ALL_RANKS = (
    "--strategy ddp, where each rank has the whole gradient; or an optimizer that keeps plain"
    " values, which follow from each number by itself"
)
_TASK = "task"  # the path of a task's attributes
_SHOWN = 60  # characters of a value
_BUFFER = "buffer of"  # the path of buffers that a module does not save, before the module's name
_OPTIMIZER = "optimizer"  # the path of its attributes, before its class's name
_IS_ITERATOR = "is an iterator, whose place no checkpoint can hold"
Values = dict[str, Any]  # as JSON has them, by the attribute's full name


class Hooks(TorchHooks):
    """Notes the attributes as a run begins, and gives those that have changed to a checkpoint."""

    _start: Start | None = None  # None: nothing is trained
    _buffers: Set[str] = frozenset()  # names of the model's buffers before the first step
    _restored: frozenset[str] = frozenset()  # names of attributes that a checkpoint had
    _optimizers: Sequence[torch.optim.Optimizer] = ()  # that the task has made

    @cached_property
    def _task(self) -> object:
        return getattr(self.setup.task, "task", self.setup.task)

    @cached_property
    def _attributes(self) -> Attributes:
        model = self.setup.strategy.models[0]
        more: dict[str, Holder] = {
            f"{_BUFFER} {name or 'model'}": _unsaved_buffers(module)
            for name, module in model.named_modules()
        }
        for optimizer in self._optimizers:
            more[f"{_OPTIMIZER} {type(optimizer).__name__}"] = _own_attributes(optimizer)
        return Attributes(model, self._task, more)

    @cached_property
    def _modules(self) -> dict[str, bool]:
        """Whether a module's class is of the user's, by its path; of the task, too."""
        modules = self.setup.strategy.models[0].named_modules()
        named = {_TASK: self._task, **{name or "model": module for name, module in modules}}
        return {path: is_users(type(one)) for path, one in named.items()}

    def begin_training(self, start: Start) -> Mapping[str, Any]:
        self._start = start
        of_task = (getattr(update.optimizer, "of_task", None) for update in start.state.updates)
        self._optimizers = [optimizer for optimizer in of_task if optimizer is not None]
        self._buffers = {name for name, _ in self.setup.strategy.models[0].named_buffers()}
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

    def add_to(self, steps: Sequence[TrainingStep]) -> None:
        steps[-1].after_reduction.append(self._take_new_buffers)

    def _take_new_buffers(self) -> None:
        """After the first backward pass, and before each save: buffers that have come to be are
        saved here, as a model that is made for a resume does not have them yet.
        """
        for name, _ in self.setup.strategy.models[0].named_buffers():
            if name not in self._buffers:
                path, _, own = name.rpartition(".")
                module = self.setup.strategy.models[0].get_submodule(path)
                module._non_persistent_buffers_set.add(own)  # noqa: SLF001 - no other way

    def kept(self) -> Values:
        self._take_new_buffers()
        values, failing, differing = self._compared()
        failing = {**differing, **failing}
        if failing:
            self._refuse_if_needed(failing)
        return {name: value for name, value in values.items() if not self._is_left(name, failing)}

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
                failing[name] = _why_not_written(value)
        return values, failing

    def _is_of_user(self, name: str) -> bool:
        path = name.rpartition(".")[0]
        if " " in name.partition(".")[0]:  # a variable, or a buffer
            return True
        if path == _TASK or path.startswith(f"{_TASK}."):
            return self._modules[_TASK]
        return self._modules.get(path, False)

    def _is_left(self, name: str, failing: Mapping[str, str]) -> bool:
        """Whether an attribute is not saved: it is failing, or belongs to a module with one that
        is.
        """
        path = name.rpartition(".")[0]
        if path == _TASK or path not in self._modules:
            return name in failing
        return any(other.rpartition(".")[0] == path for other in failing)

    def _refuse_if_needed(self, failing: Mapping[str, str]) -> None:
        """UserError: the loss, or what follows an update, depends on such an attribute."""
        readers = ("after_step", "schedule")
        read_later = {name for method in readers for name in names_read(self._task, method)}
        names = [
            name
            for name, why in sorted(failing.items())
            if name.rpartition(".")[2] in read_later
            or (why == _IS_ITERATOR and name.startswith("closure"))  # others may be of the data
            or name.startswith(f"{_OPTIMIZER} ")
        ]
        for name in () if names else sorted(failing):
            if self._loss_depends(name):
                names = [name]
                break
        if not names:
            return
        first, is_of_optimizer = shown_name(names[0]), names[0].startswith(f"{_OPTIMIZER} ")
        raise UserError(
            f"the training depends on {first}, which changes as it goes and {failing[names[0]]}: a"
            " resumed run, and one on other devices, would give another curve",
            _OF_ALL_RANKS if is_of_optimizer else KEEP_IN_MODEL,
            "task" if is_of_optimizer else loss_place(self.setup),
        )

    def _loss_depends(self, name: str) -> bool:
        """Whether the loss is another one with the attribute as it was in the beginning, on any
        rank.
        """
        if self._start is None:
            return False
        from samecurve.features.guard.additivity import compare_repeats
        from samecurve.features.guard.trials import Trials, is_on_any_rank

        trials = Trials(self.setup, self._start.rows, self._start.stage)
        with trials.prepared():
            now = trials.loss_if_any(trials.samples)
            trials.put_back()
            self._attributes.put_back([name])
            then = trials.loss_if_any(trials.samples)
        differs = (now is None) != (then is None)
        if now and then:
            differs = compare_repeats(now, then, 0.0) is not None
        return is_on_any_rank(self.setup, differs)


def _unsaved_buffers(module: nn.Module) -> Variables:
    """The buffers of a module that are not persistent, by name."""
    buffers = module._buffers  # noqa: SLF001 - torch tells neither elsewhere
    names = module._non_persistent_buffers_set  # noqa: SLF001
    return Variables(lambda: sorted(names), lambda name: (buffers, name))


def _own_attributes(optimizer: torch.optim.Optimizer) -> Variables:
    """What an optimizer keeps in attributes of its own, beside what each one of torch has."""
    of_torch = vars(torch.optim.SGD([torch.zeros(())]))
    attributes = vars(optimizer)
    names = lambda: [name for name in attributes if name not in of_torch]  # noqa: E731
    return Variables(names, lambda name: (attributes, name))


def _why_not_written(value: object) -> str:
    if isinstance(value, Position):
        return _IS_ITERATOR
    if hasattr(value, "cache_info"):
        return "keeps results, as functools.cache does, which no checkpoint can hold"
    kind = type(value).__name__
    return f"is a {kind} that is too large for a checkpoint, or no plain value"


def shown_name(name: str) -> str:
    """The name of an attribute or variable, for the user."""
    return f"self.{name.removeprefix(_TASK + '.')}" if name.startswith(f"{_TASK}.") else name


def _shown(value: object) -> str:
    text = "absent" if value is None else json.dumps(value)
    return text if len(text) <= _SHOWN else text[: _SHOWN - 3] + "..."
