"""What is trained: a task is a class (protocol.py), found by the registry, seen through an adapter.

Importing this imports no engine; a task's class is imported where it is opened.
"""

import importlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from samecurve.core.system.cache import cache_home
from samecurve.tasks.registry import Tasks as Tasks
from samecurve.tasks.registry import entry_of, file_of, section_argument

if TYPE_CHECKING:  # numpy is not imported for a config error
    from collections.abc import Mapping, Sequence

    from samecurve.core.config.sections import Config
    from samecurve.core.planning.facts import Facts
    from samecurve.tasks.adapter.engine_adapter import EngineAdapter
    from samecurve.tasks.adapter.task_adapter import TaskAdapter

_ADAPTERS = {
    "torch": "samecurve.tasks.adapter.torch_adapter:TorchAdapter",
    "jax": "samecurve.tasks.adapter.jax_adapter:JaxAdapter",
}


def open_task(config: "Config", cache: Path | str) -> "EngineAdapter":
    """The task of a config, its data ready in `cache`. Imports the engine's model code."""
    return _open(config, config.engine, cache)


def open_trained(config: "Config", cache: Path | str, assets: Path) -> "EngineAdapter":
    """The task of a run, to use its model.

    With torch, whichever engine trained it, where the task has a class for torch; else with the
    engine that did.

    assets: what the run has kept of the task
    """
    engine = "torch" if "torch" in entry_of(config.task).classes else config.engine
    return _open(config, engine, cache, assets)


def open_engine_free(config: "Config", cache: Path | str) -> "TaskAdapter":
    """The part of the task that needs no engine; the whole of it, where it has no such part."""
    from samecurve.tasks.adapter.task_adapter import TaskAdapter

    entry = entry_of(config.task)
    if entry.engine_free is None:
        return open_task(config, cache)
    task_class = entry.launcher_class()
    assert task_class is not None
    return TaskAdapter(task_class, config, cache, file=file_of(entry, task_class))


def facts(config: "Config", cache: Path | str) -> "Facts":
    """What plan() must know of the task. Imports an engine only if its model must be looked at."""
    if entry_of(config.task).described_by_engine:
        return open_task(config, cache).facts()
    return open_engine_free(config, cache).facts()


def other_data(
    task: str, source: str, assets: Path, reference: "Mapping[str, float]"
) -> "Mapping[str, Any]":
    """Config values by which a task reads all of another source.

    assets, reference: of the run whose model reads it
    """
    task_class = entry_of(task).launcher_class()
    method: Any = getattr(task_class, "other_data", None)
    if method is None:
        return {"data.source": source}
    values: Mapping[str, Any] = method(source, assets, reference)
    return values


def first_weights(config: "Config") -> Path | None:
    """The weights that the config's model begins from, as --init-from names them; None: its own."""
    task_class = entry_of(config.task).launcher_class()
    method: Any = getattr(task_class, "first_weights", None)
    if method is None:
        return None
    path: Path | None = method(section_argument(config.model))
    return path


def convert_weights(
    config: "Config", arrays: "Mapping[str, Any]", task: Any = None
) -> "Mapping[str, Any]":
    """Arrays as others store them -> as the model has them: several may have become one.

    arrays: dataclasses with dtype, shape and read(), by their names there
    task: an instance of the config's class, if there is one
    """
    task_class = entry_of(config.task).class_of(config.engine)
    if not hasattr(task_class, "convert_weights"):
        return arrays
    task = task or open_task(config, cache_home()).task
    converted: Mapping[str, Any] = task.convert_weights(arrays)
    return converted


def load_hf(config: "Config", names: "Sequence[str]") -> "Mapping[str, str]":
    """What others call the model's arrays -> what a checkpoint calls them.

    Names of what is not needed are left out.
    """
    task = _task_with(config, "load_hf")
    if task is None:
        return {name: name for name in names}
    mapping: Mapping[str, str] = task.load_hf(names)
    return mapping


def unlike(config: "Config", fields: "Mapping[str, Any]") -> tuple[list[str], list[str]]:
    """In what foreign weights differ from the config's model, though their shapes may fit.

    First what makes them meaningless here, then what only changes their use.

    fields: their `model` section, or {"config.json": path}
    """
    task = _task_with(config, "unlike")
    if task is not None:
        fatal, differing = task.unlike(fields)
        return list(fatal), list(differing)
    here = config.model.model_dump()
    differing = [
        f"{name} {value}, here {here[name]}"
        for name, value in fields.items()
        if name in here and here[name] != value
    ]
    return [], differing


def _task_with(config: "Config", method: str) -> Any:
    """An instance of the task's class, if that has the method; None: it has not."""
    entry = entry_of(config.task)
    task_class = entry.launcher_class() or entry.class_of(config.engine)
    if not hasattr(task_class, method):
        return None
    return open_engine_free(config, cache_home()).task


def _open(
    config: "Config", engine: str, cache: Path | str, assets: Path | None = None
) -> "EngineAdapter":
    entry = entry_of(config.task)
    task_class = entry.class_of(engine)
    module, _, name = _ADAPTERS[engine].partition(":")
    adapter: EngineAdapter = getattr(importlib.import_module(module), name)(
        task_class, config, cache, assets=assets, file=file_of(entry, task_class)
    )
    return adapter
