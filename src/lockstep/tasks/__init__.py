"""The tasks, found by name. Their fields import no engine; their models are imported where they are trained."""

import importlib
from typing import TYPE_CHECKING

from lockstep.core.config import Config, TaskFields

if TYPE_CHECKING:  # numpy is not imported for a config error
    from lockstep.core.protocols import Task

_HERE = ("language",)
_LATER = ("timeseries", "vision", "huggingface", "diffusion")


class Tasks:
    """The registry that the config reads."""

    def names(self) -> tuple[str, ...]:
        return _HERE

    def later(self) -> tuple[str, ...]:
        return _LATER

    def fields(self, task: str) -> TaskFields:
        found: TaskFields = importlib.import_module(f"lockstep.tasks.{task}.fields").FIELDS
        return found

    def stamp(self, config: Config) -> object:
        """What the data is made from, as far as it can be told without reading it: changes when a file does. UserError: missing files."""
        return importlib.import_module(f"lockstep.tasks.{config.task}.corpus").stamp(config.data)


def open_task(config: Config, cache: str) -> "Task":
    """The task of a config, its data ready in `cache`. Imports the engine's model code."""
    module = importlib.import_module(f"lockstep.tasks.{config.task}.task")
    made: Task = module.open_task(config, cache)
    return made
