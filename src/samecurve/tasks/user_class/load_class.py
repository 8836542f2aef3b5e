"""The class of a user's task, loaded by running its file once.

No engine is imported here. Errors of the user's code name its line (user_errors.py).
"""

import hashlib
import importlib.util
import re
import sys
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType

from samecurve.errors import UserError
from samecurve.tasks.user_class import SOURCE_INDEX, SOURCES, Place, is_pickled
from samecurve.tasks.user_class.class_source import no_class, read_source
from samecurve.tasks.user_class.pickled_class import load_pickled
from samecurve.tasks.user_class.user_errors import StartedWhileLoading, calling

_STOPPED = "__stopped_by_samecurve__"  # in a module that was run up to a call that starts a run


def load_class(task: Place) -> type:
    """The class, its file run once in a process: as a module of its own, or imported by its name.

    A file that starts a run (samecurve.train(), without the guard that scripts have) is run up to
    that call.

    UserError: it can't be run, or has no such class.
    """
    try:
        if is_pickled(task.path):
            with calling("loading it", task.path):
                return load_pickled(task.path)
        module = _imported(task) if task.module else _of_file(task.path)
    except StartedWhileLoading:
        raise _starts_too_early(task) from None
    task_class = getattr(module, task.name, None)
    if isinstance(task_class, type):
        return task_class
    if _STOPPED in vars(module):
        raise _starts_too_early(task)
    classes = {name: value for name, value in vars(module).items() if isinstance(value, type)}
    defined_here = [name for name, kind in classes.items() if kind.__module__ == module.__name__]
    raise no_class(task, defined_here)


def _starts_too_early(task: Place) -> UserError:
    return UserError(
        f"loading {task.path} starts a run, before there is a class {task.name}",
        'the call of samecurve under `if __name__ == "__main__":`',
        "task",
    )


def is_loading() -> bool:
    """Whether load_class() is at work on this thread."""
    frame = sys._getframe()  # noqa: SLF001 the stack, without state of our own
    while frame.f_back is not None:
        if frame.f_code is load_class.__code__:
            return True
        frame = frame.f_back
    return False


def _imported(task: Place) -> ModuleType:
    """The module imported by its name, which another process started here finds too."""
    assert task.module is not None
    depth = task.module.count(".") + (task.path.name == "__init__.py")
    root = str(task.path.resolve().parents[depth])
    with calling("importing it", task.path):
        if importlib.util.find_spec(task.module.partition(".")[0]):
            return importlib.import_module(task.module)
        with _beside(root):
            return importlib.import_module(task.module)


def _of_file(path: Path) -> ModuleType:
    """The file as a module, taken from a run's own copy of its source if it lies in one."""
    home = next((home for home in path.resolve().parents if home.name == SOURCES), None)
    if home is None or not (home / SOURCE_INDEX).is_file():
        return _module(path)
    from samecurve.tasks.user_class.kept_source import read_kept_source

    kept = read_kept_source(home.parent)
    if kept is None:
        return _module(path)
    tops = {Path(name).parts[0].removesuffix(".py") for name in kept.files}
    with _instead_of_others(home, tops), _beside(str(home)):
        if not kept.module:
            return _module(path, "".join(sorted(kept.files.values())))
        with calling("importing it", path):
            return importlib.import_module(kept.module)


@contextmanager
def _instead_of_others(home: Path, tops: Collection[str]) -> Iterator[None]:
    """Hide modules of the same names that were imported from elsewhere, while the block loads.

    home: where the modules are to come from
    tops: names of modules and packages, without a dot
    """
    hidden = {
        name: module
        for name, module in list(sys.modules.items())
        if name.partition(".")[0] in tops
        and not Path(getattr(module, "__file__", None) or "").is_relative_to(home)
    }
    for name in hidden:
        del sys.modules[name]
    importlib.invalidate_caches()
    try:
        yield
    finally:
        of_hidden = {name.partition(".")[0] for name in hidden}
        for name in list(sys.modules):
            if name.partition(".")[0] in of_hidden:
                del sys.modules[name]
        sys.modules.update(hidden)


class _UncachedLoader(SourceFileLoader):
    """A loader that compiles the file each time.

    Python's own cache takes a file of equal size, changed within the same second, for the old one.
    """

    def get_code(self, fullname: str) -> CodeType:
        del fullname  # the loader serves one file
        return compile(self.get_data(self.path), self.path, "exec", dont_inherit=True)


def _module(path: Path, neighbours: str = "") -> ModuleType:
    """The file as a module, named after its path and content.

    The module can be found under that name, so that objects of its classes can be pickled.

    neighbours: the digests of modules that belong to it, where they are known
    """
    absolute = path.resolve()
    content = bytes(absolute) + b"\0" + read_source(path) + neighbours.encode()
    digest = hashlib.sha256(content).hexdigest()[:12]
    stem = re.sub(r"\W", "_", path.stem)
    name = f"samecurve_user_{stem}_{digest}"
    if name in sys.modules:
        return sys.modules[name]
    loader = _UncachedLoader(name, str(absolute))
    spec = importlib.util.spec_from_file_location(name, absolute, loader=loader)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        with _beside(str(absolute.parent)), calling("loading it", path):
            spec.loader.exec_module(module)
    except StartedWhileLoading:
        vars(module)[_STOPPED] = True
    except BaseException:
        del sys.modules[name]
        raise
    return module


@contextmanager
def _beside(directory: str) -> Iterator[None]:
    """Let a user's file import its neighbours.

    The directory comes first in the search while the file is loaded, and last from then on, for
    what the class's methods import.
    """
    sys.path.insert(0, directory)
    try:
        yield
    finally:
        sys.path.remove(directory)
        if directory not in sys.path:
            sys.path.append(directory)
