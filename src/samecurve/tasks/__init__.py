"""Tasks: a class says what is trained (protocol.py); engines see it through an adapter.

The registry of tasks is here: ours and those of installed packages by name, users' files by place.
Importing this imports no engine; a task's class is imported where it is opened.
"""

import hashlib
import importlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel

from samecurve.core.config import Section
from samecurve.core.config.loading import DEFAULT_TASK, USER_TASK, TaskSections
from samecurve.core.config.sections import (
    Config,
    DataSection,
    FreeData,
    FreeModel,
    section_argument,
)
from samecurve.core.system.cache import cache_home
from samecurve.errors import UserError
from samecurve.tasks.user_class import Place, is_pickled, place_of

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

    # numpy is not imported for a config error
    from samecurve.core.planning.facts import Facts
    from samecurve.tasks.adapter import TaskAdapter


_ADAPTERS = {
    "torch": "samecurve.tasks.adapter.torch_adapter:TorchAdapter",
    "jax": "samecurve.tasks.adapter.jax_adapter:JaxAdapter",
}


@dataclass(frozen=True, kw_only=True)
class TaskEntry:
    """Where a task's classes are. An installed package names its entry; `classes` is enough.

    Each class is "package.module:Class", imported when it is needed.

    classes: engine -> the task's class for it
    engine_free: what the classes share, with facts() and data_stamp(), without an engine
    model, data: the config's sections; left out: Model and Data of the class, or else any fields
    libraries: modules of others that the class for torch imports; a start imports them ahead
    engines_of: which engines have the model of a config's section; left out: all of `classes`
    """

    classes: Mapping[str, str]
    engine_free: str | None = None
    model: type[Section] | None = None
    data: type[DataSection] | None = None
    libraries: Sequence[str] = ()
    engines_of: Callable[[Any], Sequence[str]] | None = None

    def class_of(self, engine: str) -> type:
        """The class for an engine. UserError: the task has none."""
        if engine not in self.classes:
            raise UserError(
                f"this task has no class for engine {engine}",
                f"--engine {' or '.join(self.classes)}",
                "engine",
            )
        return _import(self.classes[engine])

    def launcher_class(self) -> type | None:
        """The class that the launcher asks for sections and for what comes before a task is opened.

        Without an engine-free class, the first one whose source declares such things. None: there
        is nothing to ask, and no class is imported.
        """
        if self.engine_free:
            return _import(self.engine_free)
        from samecurve.tasks.user_class.class_source import declares_for_launcher

        for where in self.classes.values():
            place = place_of(where)
            if place and declares_for_launcher(place):
                return _import(where)
        return None

    def sections(self) -> TaskSections:
        """The fields of the config's sections. UserError: the class declares them wrongly."""
        model, data = self.model, self.data
        if model is None or data is None:
            task_class = self.launcher_class()
            model = model or _declared_section(task_class, "Model", Section) or FreeModel
            data = data or _declared_section(task_class, "Data", DataSection) or FreeData
        return TaskSections(model, data)

    def engines(self, config: Config) -> tuple[str, ...]:
        """The engines that the task has a class for, the config's own first."""
        others = (engine for engine in self.classes if engine != config.engine)
        return (config.engine, *others)

    def open(
        self, config: Config, cache: Path | str, *, engine: str = "", assets: Path | None = None
    ) -> "TaskAdapter":
        """The task with its data ready in `cache`. Imports the model code of the engine.

        engine: '': the config's
        assets: what a run has kept of the task, where the task is opened to use a trained model
        """
        engine = engine or config.engine
        task_class = self.class_of(engine)
        module, _, name = _ADAPTERS[engine].partition(":")
        adapter: TaskAdapter = getattr(importlib.import_module(module), name)(
            task_class, config, cache, assets=assets, file=self.file_of(task_class)
        )
        return adapter

    def open_trained(self, config: Config, cache: Path | str, assets: Path) -> "TaskAdapter":
        """The task of a run, to use its model: with torch if torch has the model.

        assets: what the run has kept of the task
        """
        engines = list(self.classes)
        if self.engines_of is not None:
            engines = list(self.engines_of(section_argument(config.model)))
        engine = "torch" if "torch" in engines else config.engine
        return self.open(config, cache, engine=engine, assets=assets)

    def facts(self, config: Config, cache: Path | str) -> "Facts":
        """The facts of the task, which plan() needs.

        An engine is imported only if the engine-free class does not tell `arrays`: the model is
        then built, without values, to be described.
        """
        if self.engine_free and hasattr(_import(self.engine_free), "facts"):
            adapter = self._open_engine_free(config, cache)
            if "arrays" in adapter.own_facts:
                return adapter.facts()
        return self.open(config, cache).facts()

    def data_stamp(self, config: Config) -> object:
        """A cheap stamp of all that the facts follow from beside the config.

        The stamp changes when a file does. None: facts must be obtained anew each time.
        UserError: files are missing.
        """
        stamp_of = getattr(self.launcher_class(), "data_stamp", None)
        if stamp_of is None:
            return None
        sections = [section_argument(config.data)]
        if "model" in inspect.signature(stamp_of).parameters:
            sections.append(section_argument(config.model))
        stamp = stamp_of(*sections)
        return stamp if self._is_ours or stamp is None else [*self.code_stamp(config), stamp]

    def code_stamp(self, config: Config) -> list[object]:
        """A stamp of all that the facts follow from beside the config and the data."""
        if self._is_ours:
            return []
        train = config.train  # a user's model, optimizer and schedule may be built by them
        built_by: list[object] = [train.precision, train.seed, config.optimizer.lr]
        built_by.append(train.plan_chooses_bits)  # whether more is tried
        files = [hashlib.sha256(file.read_bytes()).hexdigest() for file in self._source_files()]
        return [*built_by, *files]

    def mentions(self, word: str) -> bool:
        """Whether the source of the task's classes has the word; True where it can't be read."""
        from samecurve.tasks.user_class.class_source import mentions

        return mentions(self._source_files(), word)

    def other_data(
        self, source: str, assets: Path, reference: Mapping[str, float]
    ) -> Mapping[str, Any]:
        """Config values by which the task reads all of another source.

        assets, reference: those of the run whose model reads the source
        """
        values = self._ask("other_data", source, assets, reference)
        return {"data.source": source} if values is None else values

    def plain_data(self) -> Mapping[str, Any]:
        """Config values by which the task reads its training data without random changes."""
        return self._ask("plain_data") or {}

    def first_weights(self, config: Config) -> Path | None:
        """The weights that the model begins from, as --init-from names them; None: its own."""
        path: Path | None = self._ask("first_weights", section_argument(config.model))
        return path

    def _ask(self, method: str, *arguments: object) -> Any:
        """What a staticmethod of the class gives; None: it has no such method."""
        asked = getattr(self.launcher_class(), method, None)
        return None if asked is None else asked(*arguments)

    def has(self, method: str, config: Config) -> bool:
        """Whether the class for the config's engine has a method."""
        return hasattr(self.class_of(config.engine), method)

    def object_with(self, method: str, config: Config) -> Any:
        """An object of the task's class, without an engine if it needs none; None: the class has
        no such method.
        """
        task_class = self.launcher_class() or self.class_of(config.engine)
        if not hasattr(task_class, method):
            return None
        return self._open_engine_free(config, cache_home()).task

    def file_of(self, task_class: type) -> Path | None:
        """The file whose lines errors of the task's code name; None: the code is ours."""
        return None if self._is_ours else Path(inspect.getfile(task_class))

    @property
    def _is_ours(self) -> bool:
        """Whether the classes are this program's, whose errors are not explained as a user's."""
        return any(where.startswith("samecurve_products.") for where in self.classes.values())

    def _source_files(self) -> list[Path]:
        """The files of the classes, as far as they have any."""
        wheres = [*self.classes.values(), *([self.engine_free] if self.engine_free else [])]
        places = [place for where in wheres if (place := place_of(where))]
        return [place.path for place in places]

    def _open_engine_free(self, config: Config, cache: Path | str) -> "TaskAdapter":
        """The part of the task that needs no engine; without one, the whole task."""
        from samecurve.tasks.adapter import TaskAdapter

        if self.engine_free is None:
            return self.open(config, cache)
        task_class = _import(self.engine_free)
        return TaskAdapter(task_class, config, cache, file=self.file_of(task_class))


@dataclass(frozen=True, kw_only=True)
class UserFile(TaskEntry):
    """The entry of a user's file: one class, for the engine of the config."""

    place: Place

    def class_of(self, engine: str) -> type:
        """The file's class, whatever the engine."""
        del engine
        from samecurve.tasks.user_class.load_class import load_class

        return load_class(self.place)

    def launcher_class(self) -> type | None:
        from samecurve.tasks.user_class.class_source import declares_for_launcher

        return self.class_of("") if declares_for_launcher(self.place) else None

    def data_stamp(self, config: Config) -> object:
        from samecurve.tasks.user_class.class_source import check_class_exists

        check_class_exists(self.place)
        return super().data_stamp(config)

    def file_of(self, task_class: type) -> Path:
        del task_class  # it may be another file's, which the user's file imports
        return self.place.path

    def _source_files(self) -> list[Path]:
        """The class's file, and the modules beside it that it imports."""
        if is_pickled(self.place.path):
            return [self.place.path]
        from samecurve.tasks.user_class.local_imports import local_files

        try:
            local = local_files(self.place)
        except OSError:  # what reads the file says so
            return [self.place.path]
        return [local.root / name for name in sorted(local.sources)]


def _declared_section(task_class: type | None, name: str, base: type[Section]) -> type[Any] | None:
    """The class's own `Model` or `Data`; None: it has none, or another thing of that name.

    UserError: it is written as a section, and is none.
    """
    declared = getattr(task_class, name, None)
    if isinstance(declared, type) and issubclass(declared, base):
        return declared
    if isinstance(declared, type) and (
        issubclass(declared, BaseModel) or declared.__bases__ == (object,)
    ):
        assert task_class is not None
        raise UserError(
            f"{task_class.__name__}.{name} is no samecurve.{base.__name__}",
            f"class {name}(samecurve.{base.__name__}): with one typed field a line",
            "task",
        )
    return None


def _import(where: str) -> type:
    module, _, name = where.partition(":")
    task_class = getattr(importlib.import_module(module), name)
    assert isinstance(task_class, type)
    return task_class


def open_task(config: Config, cache: Path | str) -> "TaskAdapter":
    """The task of a config, its data ready in `cache`. Imports the engine's model code."""
    return entry_of(config.task).open(config, cache)


def built_in() -> tuple[str, ...]:
    """The names of the tasks that come with this program; the default task comes first."""
    from samecurve.core.entry_points import ours

    return tuple(sorted(ours("tasks"), key=lambda name: (name != DEFAULT_TASK, name)))


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
        return (*built_in(), *(name for name in installed() if name not in built_in()))

    def knows(self, task: object) -> bool:
        """A name, or path/to/file.py:Class, whether or not that file exists."""
        if not isinstance(task, str):
            return False
        return place_of(task) is not None or _point_of(task) is not None

    def sections(self, task: str) -> TaskSections:
        return entry_of(task).sections()


def entry_of(task: str) -> TaskEntry:
    """The entry of a task that the registry knows.

    UserError: an installed package's entry can't be loaded.
    """
    place = place_of(task)
    if place is not None:
        return UserFile(classes={}, place=place)
    point = _point_of(task)
    assert point is not None
    return _load_installed(task, point)


def _point_of(task: str) -> "EntryPoint | None":
    from samecurve.core.entry_points import find

    return find("tasks", task)


def installed() -> "Mapping[str, EntryPoint]":
    """The tasks that installed packages register, by name."""
    from samecurve.core.entry_points import installed as installed_entries

    return installed_entries("tasks")


def _load_installed(task: str, point: "EntryPoint") -> TaskEntry:
    from samecurve.core.entry_points import load

    entry: object = load(point, "task")
    if not isinstance(entry, TaskEntry):
        package = point.dist.name if point.dist else point.value
        raise UserError(
            f"task {task} of the installed package {package}: {point.value} is"
            f" {type(entry).__name__}, not a samecurve.TaskEntry",
            f'{task} = "package.module:ENTRY", where ENTRY = samecurve.TaskEntry(classes=...)',
            "task",
        )
    return entry
