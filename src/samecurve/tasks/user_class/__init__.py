"""Where a task's class is: in a file, in a module, or pickled (pickled_class.py).

A place is written `path/to/file.py:MyTask`, `package.module:MyTask` or `run/task.pickle:MyTask`.
Nothing is imported or run to find it.
"""

import hashlib
import importlib.util
import re
from importlib.machinery import PathFinder
from pathlib import Path
from typing import NamedTuple

from samecurve.core.config.document import Document

TASK_PICKLE = "task.pickle"  # the file of a pickled class, in a run directory too
SOURCES, SOURCE_INDEX = "source", "source.json"  # a run's copy of a class's source, and its index


class Place(NamedTuple):
    """The file of a class, its name, and the module if it is imported by name."""

    path: Path
    name: str
    module: str | None = None


def is_pickled(path: Path) -> bool:
    return path.name == TASK_PICKLE


def place_of(task: object, folder: Path | None = None) -> Place | None:
    """The place that a text names; None: it is of another form, or there is no such module.

    task: my/file.py:MyTask, package.module:MyTask, a/run/task.pickle:MyTask
    folder: where modules are looked for first; None: in Python's own places
    """
    match = re.fullmatch(r"(.+):([^\W\d]\w*)", task) if isinstance(task, str) else None
    if match is None:
        return None
    path = Path(match[1])
    if path.suffix == ".py" or is_pickled(path):
        return Place(path, match[2]) if path.stem else None
    file = file_of_module(match[1], folder)
    return Place(file, match[2], match[1]) if file else None


def identity_of(task: str) -> str:
    """A task's identity: its config value, or the name of a pickled class, wherever it lies."""
    place = place_of(task)
    return f"class {place.name}" if place and is_pickled(place.path) else task


def find_pickled_class(document: Document, home: Path) -> None:
    """Point a config to the pickled class that lies beside it, wherever both were moved to.

    home: the config's directory
    """
    place = place_of(document.value.get("task"))
    if place and is_pickled(place.path) and (home / TASK_PICKLE).is_file():
        document.value["task"] = f"{home / TASK_PICKLE}:{place.name}"


def code_of(place: Place) -> tuple[str, str]:
    """The source of the class in words, and its digest; both are the same in every process."""
    if is_pickled(place.path):
        from samecurve.tasks.user_class.pickled_class import read_header

        header = read_header(place.path)
        return f"the class {place.name} of {header.origin}", header.digest
    return f"the file {place.path}", hashlib.sha256(place.path.read_bytes()).hexdigest()


def file_of_module(module: str, folder: Path | None = None) -> Path | None:
    """The source of a module that this process, or one started here or in a folder, can import.

    Nothing is imported. None: there is no such module, or it has no source.
    """
    top, *parts = module.split(".")
    if not all(part.isidentifier() for part in (top, *parts)) or top == "__main__":
        return None
    try:
        spec = PathFinder.find_spec(top, [str(folder)]) if folder else None
        spec = spec or importlib.util.find_spec(top)
        spec = spec or PathFinder.find_spec(top, [str(Path.cwd())])
    except ValueError:  # a module that was made by hand
        return None
    if spec is None:
        return None
    homes = [Path(home) for home in spec.submodule_search_locations or ()]
    if not parts:
        return Path(spec.origin) if spec.origin and spec.origin.endswith(".py") else None
    candidates = [
        candidate
        for home in homes
        for candidate in (
            home.joinpath(*parts).with_suffix(".py"),
            home.joinpath(*parts, "__init__.py"),
        )
    ]
    return next((candidate for candidate in candidates if candidate.is_file()), None)


def print_file(module: str) -> None:
    """Print the file of a module as this process finds it: class_pickler.py asks a fresh one."""
    print(file_of_module(module) or "")
