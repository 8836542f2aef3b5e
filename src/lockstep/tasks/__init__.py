"""The tasks, found by name, and users' own, found by file and class. Their fields import no engine; their models are imported where they are trained."""

import importlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lockstep.core.config import Config, TaskFields
from lockstep.errors import UserError
from lockstep.tasks.own.fields import FIELDS, place_of
from lockstep.tasks.own.loading import check

if TYPE_CHECKING:  # numpy is not imported for a config error
    from lockstep.core.facts import Facts
    from lockstep.core.protocols import Task

_HERE = ("language",)
_LATER = ("timeseries", "vision", "huggingface", "diffusion")


class Tasks:
    """The registry that the config reads."""

    def names(self) -> tuple[str, ...]:
        return _HERE

    def later(self) -> tuple[str, ...]:
        return _LATER

    def knows(self, task: object) -> bool:
        """A name, or path/to/file.py:Class, whether or not that file exists."""
        return task in _HERE or place_of(task) is not None

    def fields(self, task: str) -> TaskFields:
        if place_of(task):
            return FIELDS
        found: TaskFields = importlib.import_module(f"lockstep.tasks.{task}.fields").FIELDS
        return found

    def stamp(self, config: Config) -> object:
        """What the data is made from, as far as it can be told without reading it: changes when a file does. None: it can't be told.

        UserError: missing files.
        """
        place = place_of(config.task)
        if place:
            check(place)
            return None
        return importlib.import_module(f"lockstep.tasks.{config.task}.corpus").stamp(config.data)


def engines_of(config: Config) -> tuple[str, ...]:
    """The engines that have a model of this task, the config's own first: a user's has one."""
    return (config.engine,) if place_of(config.task) else (config.engine, "jax" if config.engine == "torch" else "torch")


def facts(config: Config, cache: str) -> "Facts":
    """What plan() must know of the task. Imports an engine only for a user's own, whose model must be looked at."""
    if place_of(config.task):
        return open_task(config, cache).facts()
    found: Facts = importlib.import_module(f"lockstep.tasks.{config.task}.task").facts(config, cache)
    return found


def open_task(config: Config, cache: str) -> "Task":
    """The task of a config, its data ready in `cache`. Imports the engine's model code."""
    made: Task = _module(config, config.engine).open_task(config, cache)
    return made


def open_saved(config: Config, assets: Path, shapes: Mapping[str, tuple[int, ...]]) -> tuple[Any, Callable[[Any, str, int, float, int], str]]:
    """What a checkpoint's weights go into (with torch, whichever engine trained them), and how it continues a prompt (model, prompt, tokens, temperature, seed). UserError: it makes nothing to show."""
    if place_of(config.task):
        raise UserError(f"{config.task} is a task of your own: how it would continue a prompt is not known", "load its weights in Python", "RUN")
    opened: tuple[Any, Callable[[Any, str, int, float, int], str]] = _module(config, "torch").open_saved(config, assets, shapes)
    return opened


def other_data(task: str, source: str, assets: Path, reference: Mapping[str, float]) -> Mapping[str, Any]:
    """Config values by which a task reads all of another source, in the words of the run whose assets and reference figures these are."""
    if place_of(task):
        return {"data.source": source}
    found: Mapping[str, Any] = importlib.import_module(f"lockstep.tasks.{task}.fields").other_data(source, assets, reference)
    return found


def _module(config: Config, engine: str) -> Any:
    return importlib.import_module(f"lockstep.tasks.{'own' if place_of(config.task) else config.task}.{engine}_task")
