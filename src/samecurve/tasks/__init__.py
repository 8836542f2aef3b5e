"""The tasks, found by name, and users' own, found by file and class.

Their fields import no engine; their models are imported where they are trained.
"""

import importlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from samecurve.core.config.sections import Config, TaskFields
from samecurve.errors import UserError
from samecurve.tasks.user.fields import FIELDS, place_of
from samecurve.tasks.user.loading import check

if TYPE_CHECKING:  # numpy is not imported for a config error
    from samecurve.core.planning.facts import Facts
    from samecurve.core.protocols import StoredArrays, Task

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
        found: TaskFields = importlib.import_module(f"samecurve.tasks.{task}.fields").FIELDS
        return found

    def stamp(self, config: Config) -> object:
        """What the data is made from, as far as it can be told without reading it: changes when a
        file does. None: it can't be told.

        UserError: missing files.
        """
        place = place_of(config.task)
        if place:
            check(place)
            return None
        return importlib.import_module(f"samecurve.tasks.{config.task}.corpus").stamp(config.data)


def engines_of(config: Config) -> tuple[str, ...]:
    """The engines that have a model of this task, the config's own first: a user's has one."""
    return (
        (config.engine,)
        if place_of(config.task)
        else (config.engine, "jax" if config.engine == "torch" else "torch")
    )


def facts(config: Config, cache: str) -> "Facts":
    """What plan() must know of the task.

    Imports an engine only for a user's own, whose model must be looked at.
    """
    if place_of(config.task):
        return open_task(config, cache).facts()
    found: Facts = importlib.import_module(f"samecurve.tasks.{config.task}.task").facts(
        config, cache
    )
    return found


def open_task(config: Config, cache: str) -> "Task":
    """The task of a config, its data ready in `cache`. Imports the engine's model code."""
    made: Task = _module(config, config.engine).open_task(config, cache)
    return made


def load_model(config: Config, cache: str, weights: "StoredArrays") -> Any:
    """The model with these weights, by a checkpoint's names: with torch whichever engine trained
    them, but for a user's own task, which has one engine.
    """
    return _module(config, config.engine if place_of(config.task) else "torch").load_model(
        config, cache, weights
    )


def speaking(config: Config, assets: Path) -> Callable[[Any, str, int, float, int], str]:
    """How a model continues a prompt (model, prompt, tokens, temperature, seed).

    UserError: it makes nothing to show.
    """
    if place_of(config.task):
        raise UserError(
            f"{config.task} is a task of your own: how it would continue a prompt is not known",
            "samecurve.load(RUN) gives the model in Python",
            "RUN",
        )
    found: Callable[[Any, str, int, float, int], str] = _module(config, "torch").speaking(
        config, assets
    )
    return found


def named_tensors(config: Config, model: Any) -> dict[str, Any]:
    """A loaded model's weights by the model's own names, as torch tensors; weights that are tied
    come under each of their names.
    """
    found: dict[str, Any] = _module(
        config, config.engine if place_of(config.task) else "torch"
    ).named_tensors(model)
    return found


def huggingface_of(config: Config) -> Any:
    """How a task's models look to the Hugging Face libraries: renamed(), write().

    UserError: they know no such model.
    """
    if place_of(config.task):
        raise UserError(
            f"{config.task} is a task of your own: the Hugging Face libraries know no such model",
            "--format safetensors",
            "--format",
        )
    return importlib.import_module(f"samecurve.tasks.{config.task}.huggingface")


def our_names(config: Config, names: Sequence[str]) -> Mapping[str, str]:
    """What others call the model's arrays -> what a checkpoint calls them; names of what is not
    needed are left out.
    """
    return (
        {name: name for name in names}
        if place_of(config.task)
        else importlib.import_module(f"samecurve.tasks.{config.task}.huggingface").ours(names)
    )


def unlike(config: Config, said: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """What else is said of a model than the config says, though its arrays may fit: what makes its
    weights meaningless here, and what only changes their use. said: its `model` section, or its
    config.json.
    """
    if not place_of(config.task):
        found: tuple[list[str], list[str]] = importlib.import_module(
            f"samecurve.tasks.{config.task}.huggingface"
        ).unlike(config.model, said)
        return found
    here = config.model.model_dump()
    return [], [
        f"{name} {value}, here {here[name]}"
        for name, value in said.items()
        if name in here and here[name] != value
    ]


def other_data(
    task: str, source: str, assets: Path, reference: Mapping[str, float]
) -> Mapping[str, Any]:
    """Config values by which a task reads all of another source, in the words of the run whose
    assets and reference figures these are.
    """
    if place_of(task):
        return {"data.source": source}
    found: Mapping[str, Any] = importlib.import_module(f"samecurve.tasks.{task}.fields").other_data(
        source, assets, reference
    )
    return found


def _module(config: Config, engine: str) -> Any:
    return importlib.import_module(
        f"samecurve.tasks.{'user' if place_of(config.task) else config.task}.{engine}_task"
    )
