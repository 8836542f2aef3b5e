"""Which tasks there are: ours by name, installed packages' by name, users' files by their place.

A TaskEntry says where a task's classes are and which fields its config sections have. Nothing here
imports an engine; a class is imported where it is needed.
"""

import functools
import hashlib
import importlib
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from samecurve.core.config.loading import TaskSections
from samecurve.core.config.section import Section
from samecurve.core.config.sections import Config, DataSection
from samecurve.core.config.unsupported import USER_TASK
from samecurve.errors import UserError
from samecurve.tasks.free_sections import FreeData, FreeModel
from samecurve.tasks.user_class.class_place import Place, place_of
from samecurve.tasks.user_class.user_file import (
    check_class_exists,
    declares_for_launcher,
    load_class,
)

ENTRY_POINTS = "samecurve.tasks"  # the group under which an installed package names its entry
_BUILT_IN = {  # each package's ENTRY
    "language": "samecurve.tasks.language",
    "huggingface": "samecurve.tasks.huggingface",
    "timeseries": "samecurve.tasks.timeseries",
}
_LATER = ("vision", "diffusion")


@dataclass(frozen=True, kw_only=True)
class TaskEntry:
    """Where a task's classes are, and what its config sections hold.

    Each class is "package.module:Class", imported when it is needed.
    """

    classes: Mapping[str, str]  # engine -> the task's class for it
    model: type[Section] = FreeModel  # the `model:` section; without one, any fields, as a dict
    data: type[DataSection] = FreeData  # likewise `data:`
    engine_free: str | None = None  # what the classes share: facts() and data_stamp without engines
    # facts() of engine_free tells no `arrays`: the model is built, empty, to be described
    described_by_engine: bool = False
    libraries: Sequence[
        str
    ] = ()  # modules of others that its torch class imports: ahead, by a start
    built_in: bool = False  # errors of its code are ours, and are not explained as a user's

    def class_of(self, engine: str) -> type:
        """UserError: the task has no class for this engine."""
        if engine not in self.classes:
            raise UserError(
                f"this task has no class for engine {engine}",
                f"--engine {' or '.join(self.classes)}",
                "engine",
            )
        return _import(self.classes[engine])

    def launcher_class(self) -> type | None:
        """The class that may be asked without an engine; None: there is none."""
        return _import(self.engine_free) if self.engine_free else None


@dataclass(frozen=True, kw_only=True)
class UserFile(TaskEntry):
    """The entry of a user's file: one class, for the engine of the config."""

    place: Place

    def class_of(self, engine: str) -> type:
        """The file's class, which is for the engine of the config."""
        del engine
        return load_class(self.place)

    def launcher_class(self) -> type | None:
        return load_class(self.place) if declares_for_launcher(self.place) else None


class Tasks:
    """The registry that a config is read with."""

    def __init__(self, only: str | None = None) -> None:
        """only: the one task that names() lists; None: all that have a name.

        UserError: there is no such task.
        """
        self._only: str | None = None
        if only is not None and not self.knows(only):
            raise UserError(
                f"--task {only} is no task",
                f"tasks: {', '.join(self.names())}; {USER_TASK}",
                "--task",
            )
        self._only = only

    def names(self) -> tuple[str, ...]:
        if self._only is not None:
            return (self._only,)
        return (*_BUILT_IN, *(name for name in installed() if name not in _BUILT_IN))

    def later(self) -> tuple[str, ...]:
        return _LATER

    def knows(self, task: object) -> bool:
        """A name, or path/to/file.py:Class, whether or not that file exists."""
        if not isinstance(task, str):
            return False
        return task in _BUILT_IN or place_of(task) is not None or task in installed()

    def sections(self, task: str) -> TaskSections:
        entry = entry_of(task)
        return TaskSections(entry.model, entry.data)


def entry_of(task: str) -> TaskEntry:
    """The entry of a task that the registry knows.

    UserError: an installed package's entry can't be loaded, or a user's sections are none.
    """
    place = place_of(task)
    if place is not None:
        return _entry_of_file(place)
    if task in _BUILT_IN:
        entry = importlib.import_module(_BUILT_IN[task]).ENTRY
    else:
        entry = _load_installed(task, installed()[task])
    assert isinstance(entry, TaskEntry)
    return entry


@functools.cache
def installed() -> Mapping[str, EntryPoint]:
    """The tasks that installed packages register, by name."""
    return {point.name: point for point in entry_points(group=ENTRY_POINTS)}


def data_stamp(config: Config) -> object:
    """What the facts of a task follow from beside its config, as far as that can be told cheaply.

    It changes when a file does. None: it can't be told, and facts are obtained anew each time.
    UserError: files are missing.
    """
    place = place_of(config.task)
    if place is not None:
        check_class_exists(place)
    task_class = entry_of(config.task).launcher_class()
    stamp_of = getattr(task_class, "data_stamp", None)
    if stamp_of is None:
        return None
    sections = [section_argument(config.data)]
    if "model" in inspect.signature(stamp_of).parameters:
        sections.append(section_argument(config.model))
    stamp = stamp_of(*sections)
    if place is None or stamp is None:
        return stamp
    train = config.train  # a user's model, optimizer and schedule may be built by them
    built_by = [train.precision, train.seed, config.optimizer.lr]
    return [*built_by, hashlib.sha256(place.path.read_bytes()).hexdigest(), stamp]


def engines_of(config: Config) -> tuple[str, ...]:
    """The engines that have a model of this task, the config's own first."""
    entry = entry_of(config.task)
    others = (engine for engine in entry.classes if engine != config.engine)
    return (config.engine, *others)


def file_of(entry: TaskEntry, task_class: type) -> Path | None:
    """The file whose lines errors of the task's code name; None: the code is ours."""
    if isinstance(entry, UserFile):
        return entry.place.path
    return None if entry.built_in else Path(inspect.getfile(task_class))


def section_argument(section: Section) -> Section | dict[str, Any]:
    """A section as the task's class is given it: declared ones as they are, free ones as a dict."""
    if isinstance(section, FreeModel | FreeData):
        return dict(section.model_extra or {})
    return section


def _entry_of_file(place: Place) -> UserFile:
    """Of the file's class, with the sections that the class declares as `Model` and `Data`."""
    if not declares_for_launcher(place):
        return UserFile(classes={}, place=place)
    task_class = load_class(place)
    model = _declared_section(task_class, "Model", Section) or FreeModel
    data = _declared_section(task_class, "Data", DataSection) or FreeData
    assert issubclass(data, DataSection)
    return UserFile(classes={}, place=place, model=model, data=data)


def _declared_section(task_class: type, name: str, base: type[Section]) -> type[Section] | None:
    """The class's own `Model` or `Data`; None: it has none, or another thing of that name.

    UserError: it is written as a section, and is none.
    """
    declared = getattr(task_class, name, None)
    if isinstance(declared, type) and issubclass(declared, base):
        return declared
    if isinstance(declared, type) and (
        issubclass(declared, BaseModel) or declared.__bases__ == (object,)
    ):
        raise UserError(
            f"{task_class.__name__}.{name} is no samecurve.{base.__name__}",
            f"class {name}(samecurve.{base.__name__}): with one typed field a line",
            "task",
        )
    return None


def _load_installed(task: str, point: EntryPoint) -> object:
    package = point.dist.name if point.dist else point.value
    try:
        entry = point.load()
    except Exception as error:  # whatever that package's code raises
        raise UserError(
            f"task {task} of the installed package {package} can't be loaded:"
            f" {type(error).__name__}: {error}",
            f"install {package} again, or mend {point.value}",
            "task",
        ) from error
    if not isinstance(entry, TaskEntry):
        raise UserError(
            f"task {task} of the installed package {package}: {point.value} is"
            f" {type(entry).__name__}, not a samecurve.TaskEntry",
            f'{task} = "package.module:ENTRY", where ENTRY = samecurve.TaskEntry(classes=...)',
            "task",
        )
    return entry


def _import(where: str) -> type:
    module, _, name = where.partition(":")
    task_class = getattr(importlib.import_module(module), name)
    assert isinstance(task_class, type)
    return task_class
