"""Tasks: a class says what is trained (protocol.py); engines see it through an adapter.

The registry of tasks is here: ours and those of installed packages by name, users' files by place.
Importing this imports no engine; a task's class is imported where it is opened.
"""

import functools
import importlib
from collections.abc import Mapping
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import TYPE_CHECKING

from samecurve.core.config.loading import DEFAULT_TASK, USER_TASK, TaskSections
from samecurve.errors import UserError
from samecurve.tasks.entry import TaskEntry
from samecurve.tasks.user_class import place_of

if TYPE_CHECKING:  # numpy is not imported for a config error
    from samecurve.core.config.sections import Config
    from samecurve.tasks.adapter import TaskAdapter


def open_task(config: "Config", cache: Path | str) -> "TaskAdapter":
    """The task of a config, its data ready in `cache`. Imports the engine's model code."""
    return entry_of(config.task).open(config, cache)


ENTRY_POINTS = "samecurve.tasks"  # the group under which an installed package names its entry


@functools.cache
def built_in() -> Mapping[str, str]:
    """Our tasks by name, each with its package: a folder beside this file that has an ENTRY.

    The default task comes first.
    """
    pages = Path(__file__).parent.glob("*/__init__.py")
    names = [page.parent.name for page in pages if "\nENTRY = TaskEntry(" in page.read_text()]
    names.sort(key=lambda name: (name != DEFAULT_TASK, name))
    return {name: f"samecurve.tasks.{name}" for name in names}


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
        return task in built_in() or place_of(task) is not None or task in installed()

    def sections(self, task: str) -> TaskSections:
        return entry_of(task).sections()


def entry_of(task: str) -> TaskEntry:
    """The entry of a task that the registry knows.

    UserError: an installed package's entry can't be loaded.
    """
    place = place_of(task)
    if place is not None:
        from samecurve.tasks.user_entry import UserFile

        return UserFile(classes={}, place=place)
    if task in built_in():
        entry = importlib.import_module(built_in()[task]).ENTRY
    else:
        entry = _load_installed(task, installed()[task])
    assert isinstance(entry, TaskEntry)
    return entry


@functools.cache
def installed() -> Mapping[str, EntryPoint]:
    """The tasks that installed packages register, by name."""
    return {point.name: point for point in entry_points(group=ENTRY_POINTS)}


def _load_installed(task: str, point: EntryPoint) -> object:
    package = point.dist.name if point.dist else point.value
    try:
        entry = point.load()
    except Exception as error:  # whatever that package's code raises
        raise UserError(
            f"task {task} of the installed package {package} can't be loaded:"
            f" {type(error).__name__}: {error}",
            f"install {package} again, or correct {point.value}",
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
