"""The registry of tasks: ours and those of installed packages by name, users' files by place.

Nothing here imports an engine.
"""

import functools
import importlib
from collections.abc import Mapping
from importlib.metadata import EntryPoint, entry_points

from samecurve.core.config.loading import TaskSections
from samecurve.core.config.unsupported import USER_TASK
from samecurve.errors import UserError
from samecurve.tasks.entry import TaskEntry, UserFile
from samecurve.tasks.user_class.class_place import place_of

ENTRY_POINTS = "samecurve.tasks"  # the group under which an installed package names its entry
_BUILT_IN = {  # the package that has each task's ENTRY
    "language": "samecurve.tasks.language",
    "huggingface": "samecurve.tasks.huggingface",
    "timeseries": "samecurve.tasks.timeseries",
}
_LATER = ("vision", "diffusion")


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
        return entry_of(task).sections()


def entry_of(task: str) -> TaskEntry:
    """The entry of a task that the registry knows.

    UserError: an installed package's entry can't be loaded.
    """
    place = place_of(task)
    if place is not None:
        return UserFile(classes={}, place=place)
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
