"""The state of a task's code under torch: attributes that changed while it trained.

Looked at are the task, and modules of the user's own classes. Attributes of a module are kept
together or not at all: a count of what a module has cached is worth nothing without the cache.
"""

import json
from collections import defaultdict
from collections.abc import Mapping
from functools import cached_property
from typing import Any

from torch import nn

from samecurve.errors import UserError
from samecurve.features.task_state.written_values import CantBeWrittenError, read, written
from samecurve.torch_engine.process_group import texts_of_all
from samecurve.torch_engine.split_check.side_effects import Attributes
from samecurve.torch_engine.split_check.user_code import kind_of, names_read
from samecurve.torch_engine.step.feature_hooks import TorchHooks
from samecurve.torch_engine.step.setup import EngineSetup, State

_READERS = ("loss", "features", "batch_loss", "after_step", "schedule")
_REMEDY = (
    "keep it in the model: a parameter, or register_buffer(); or let it follow from the step, which"
    " loss(self, model, batch, step) and after_step(self, model, step) are given"
)


class Hooks(TorchHooks):
    """Notes the attributes as a run begins, and gives those that have changed to a checkpoint."""

    def __init__(self, setup: EngineSetup, value: Any) -> None:
        super().__init__(setup, value)
        self._task = getattr(setup.task, "task", setup.task)
        self._restored: set[str] = set()
        self._told: set[str] = set()

    @cached_property
    def _attributes(self) -> Attributes:
        return Attributes(self.setup.strategy.models[0], self._task)

    def begin_training(self, state: State, kept: Mapping[str, Any]) -> None:
        del state
        attributes = self._attributes
        for name, value in kept.items():
            try:
                attributes.set(name, read(value))
            except KeyError:  # the code has changed since, which a line of the resume has said
                continue
            self._restored.add(name)

    def kept(self) -> dict[str, Any]:
        """UserError: an attribute that the loss may read can't be written down, or differs."""
        values: dict[str, Any] = {}
        by_holder: dict[str, dict[str, Any]] = defaultdict(dict)
        changed = self._attributes.changed()
        for full in self._restored:
            changed.setdefault(full, self._attributes.read(full))
        for full, value in changed.items():
            by_holder[full.rpartition(".")[0]][full] = value
        for holder, own in by_holder.items():
            if self._is_users(holder):
                values |= self._written(holder, own)
        return self._alike(values)
