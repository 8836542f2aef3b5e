"""A class that no other process could import, read from the file that class_pickler.py writes.

The file `task.pickle` is a line of JSON (Header), then the pickle. Only the Python version that
wrote the pickle reads it.
"""

import hashlib
import io
import json
import linecache
import pickle
import platform
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from samecurve.core.system.cache import cache_home
from samecurve.errors import UserError

FOR_LAUNCHER = ("Model", "Data", "data_stamp", "plain_data")  # what the launcher asks a class for
_MOST_HEADER = 1 << 26  # bytes
OWN_FILE = "give the class a file of its own, and import it: from my_task import MyTask"
# modules and rooms that have moved: the old name -> the new one
_MOVED = {
    "samecurve.core.config.section": "samecurve.core.config",
    "samecurve.core.determinism.mean": "samecurve.core.determinism",
    "samecurve.core.weights.initial_values": "samecurve.core.protocols",
    "samecurve.tasks.diffusion": "samecurve_products.pictures.diffusion",
    "samecurve.tasks.huggingface": "samecurve_products.text.huggingface",
    "samecurve.tasks.language.sections": "samecurve_products.text.language",
    "samecurve.tasks.language": "samecurve_products.text.language",
    "samecurve.tasks.timeseries": "samecurve_products.sensors",
    "samecurve.tasks.vision": "samecurve_products.pictures.vision",
}


@dataclass(frozen=True)
class Header:
    """The facts about a pickled class that are read without loading it."""

    name: str
    origin: str  # where the class was written: a file, `Cell In[3]`, <stdin>
    declares: bool  # the class has what the launcher asks for (FOR_LAUNCHER)
    digest: str  # of the class's code, and of the session's code that it uses
    python: str  # the version that wrote it, such as 3.11: no other can read it
    paths: tuple[str, ...]  # where the session found modules, beside Python's own places
    sources: Mapping[str, str]  # texts of that code, by the names that tracebacks give its files


def read_header(path: Path) -> Header:
    """The header of a pickled class. UserError: the file is not there, or is of another form."""
    try:
        with open(path, "rb") as file:
            values = json.loads(file.readline(_MOST_HEADER))
        return Header(**{**values, "paths": tuple(values["paths"])})
    except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is of another form"
        raise UserError(
            f"{path}, in which a class was kept, can't be read: {reason}",
            "the run directory whole, with its task.pickle; or train again from the session that"
            " has the class",
            "task",
        ) from None


def remember(path: Path) -> None:
    """Note in the user's cache that a session of this user has written the file."""
    with suppress(OSError):  # without a cache, the user is asked about the file
        note = _note_of(path)
        note.parent.mkdir(parents=True, exist_ok=True)
        note.touch()


def is_remembered(path: Path) -> bool:
    """Whether the file, by its content, is one that a session of this user has written."""
    try:
        return _note_of(path).exists()
    except OSError:
        return False


def _note_of(path: Path) -> Path:
    return cache_home() / "kept" / hashlib.sha256(path.read_bytes()).hexdigest()


def check_python(header: Header) -> None:
    """UserError: another Python version wrote the class."""
    if header.python != python_version():
        raise UserError(
            f"the class {header.name} of {header.origin} was kept by Python {header.python}, which"
            f" Python {python_version()} can't read",
            f"Python {header.python}; or {OWN_FILE}",
            "task",
        )


def load_pickled(path: Path) -> type:
    """The class, built anew once in a process, in a module of its own."""
    header = read_header(path)
    check_python(header)
    content = path.read_bytes()
    name = f"samecurve_kept_{hashlib.sha256(content).hexdigest()[:12]}"
    if name not in sys.modules:
        missing = [entry for entry in header.paths if entry not in sys.path]
        sys.path.extend(missing)
        for shown, text in header.sources.items():
            linecache.cache[shown] = (len(text), None, text.splitlines(keepends=True), shown)
        unpickler = _Unpickler(io.BytesIO(content[content.index(b"\n") + 1 :]), name)
        sys.modules[name] = unpickler.modules[0]
        try:
            unpickler.load_class()
        except BaseException:
            del sys.modules[name]
            raise
    task_class = vars(sys.modules[name])[header.name]
    assert isinstance(task_class, type)
    return task_class


def moved(module: str) -> str:
    """The present name of a module of ours that a pickle of an earlier version may name."""
    for old, new in _MOVED.items():
        if module == old or module.startswith(f"{old}."):
            return new + module.removeprefix(old)
    return module


class _Unpickler(pickle.Unpickler):
    """A reader of what class_pickler.py wrote, into modules of this name."""

    def __init__(self, file: io.BytesIO, name: str) -> None:
        super().__init__(file)
        self.modules = [ModuleType(name)]

    def find_class(self, module: str, name: str) -> Any:
        """A class or function by its module and name, where they are today."""
        return super().find_class(moved(module), name)

    def persistent_load(self, pid: tuple[int, str]) -> dict[str, Any]:
        number, package = pid
        while len(self.modules) <= number:
            self.modules.append(ModuleType(f"{self.modules[0].__name__}_{len(self.modules)}"))
            sys.modules[self.modules[-1].__name__] = self.modules[-1]
        namespace = vars(self.modules[number])
        namespace["__package__"] = package
        return namespace

    def load_class(self) -> None:
        """Load the class into the first module, with what it uses there."""
        names = [module.__name__ for module in self.modules]
        task_class = self.load()
        setattr(self.modules[0], task_class.__name__, task_class)
        for module, name in zip(self.modules, names, strict=False):
            for value in vars(module).values():
                if isinstance(value, type) and value.__module__ == "__main__":
                    value.__module__ = name
            module.__name__ = name  # a function that asks for its module's name has brought it


def python_version() -> str:
    """The version of this Python as two numbers: 3.11"""
    return ".".join(platform.python_version_tuple()[:2])
