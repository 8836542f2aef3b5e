"""The file of a user's task: read, to know what its class has without running it, and loaded.

class_place.py says where it is, user_errors.py what its code raises. No engine is imported here.
"""

import ast
import functools
import hashlib
import importlib.util
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType

from samecurve.core.config.document import suggest
from samecurve.errors import UserError
from samecurve.tasks.user_class.class_place import Place
from samecurve.tasks.user_class.kept_class import FOR_LAUNCHER, check_python, is_kept, read_header
from samecurve.tasks.user_class.kept_class import load as load_kept
from samecurve.tasks.user_class.user_errors import StartedWhileLoading, calling, explain_raised

_STOPPED = "__stopped_by_samecurve__"  # in a module that was run up to a call that starts a run


def check_class_exists(task: Place) -> None:
    """Whether file and class are there, without running the file.

    UserError: they are not, or it is not Python.
    """
    if is_kept(task.path):
        check_python(read_header(task.path))
        return
    tree = _parse(task.path)
    bound: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            bound.add(node.name)
        elif isinstance(node, ast.ImportFrom | ast.Import):
            bound |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            bound.add(node.id)
    classes = [node.name for node in tree.body if isinstance(node, ast.ClassDef)]
    if task.name not in bound and "*" not in bound:
        raise _no_class(task, classes)


def declares_for_launcher(task: Place) -> bool:
    """Whether the class may hold what the launcher asks for: its own sections, or data_stamp.

    Told without running the file, which would import an engine. A class that is not defined in
    this file, or has a base that is not, may hold anything. False: no, or the file can't be read
    (which check_class_exists tells).
    """
    try:
        if is_kept(task.path):
            return read_header(task.path).declares
        tree = _parse(task.path)
    except UserError:
        return False
    classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
    if task.name in classes:
        return _may_hold(classes[task.name], classes)
    brought = [node for node in tree.body if isinstance(node, ast.ImportFrom | ast.Assign)]
    return any(task.name in _bound(statement) for statement in brought)


def _may_hold(node: ast.ClassDef, classes: Mapping[str, ast.ClassDef]) -> bool:
    bound = {name for statement in node.body for name in _bound(statement)}
    if not bound.isdisjoint(FOR_LAUNCHER):
        return True
    for base in node.bases:
        inner = classes.get(base.id) if isinstance(base, ast.Name) else None
        if inner is None or inner is node or _may_hold(inner, classes):
            return True
    return False


@functools.lru_cache(maxsize=8)
def _tree(source: bytes, path: str) -> ast.Module:
    """One start asks for a file's several times. Not to be changed."""
    return ast.parse(source, path)


def _parse(path: Path) -> ast.Module:
    try:
        return _tree(_source(path), str(path))
    except (SyntaxError, ValueError) as error:
        raise explain_raised("loading it", error, path, UserError) from None


def _bound(statement: ast.stmt) -> set[str]:
    """The names that a statement at the top of a file or class gives a value."""
    if isinstance(statement, ast.ClassDef | ast.FunctionDef):
        return {statement.name}
    if isinstance(statement, ast.ImportFrom):
        return {alias.asname or alias.name for alias in statement.names}
    if isinstance(statement, ast.Assign):
        return {target.id for target in statement.targets if isinstance(target, ast.Name)}
    return set()


def load_class(task: Place) -> type:
    """The class, its file run once in a process: as a module of its own, or imported by its name.

    A file that starts a run (samecurve.train(), without the guard that scripts have) is run up to
    that call.

    UserError: it can't be run, or has no such class.
    """
    try:
        if is_kept(task.path):
            with calling("loading it", task.path):
                return load_kept(task.path)
        module = _imported(task) if task.module else _module(task.path)
    except StartedWhileLoading:
        raise _starts_too_early(task) from None
    task_class = getattr(module, task.name, None)
    if isinstance(task_class, type):
        return task_class
    if _STOPPED in vars(module):
        raise _starts_too_early(task)
    classes = {name: value for name, value in vars(module).items() if isinstance(value, type)}
    defined_here = [name for name, kind in classes.items() if kind.__module__ == module.__name__]
    raise _no_class(task, defined_here)


def _source(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        near = suggest(path.name, [other.name for other in path.parent.glob("*.py")])
        raise UserError(
            f"{path} does not exist; this is {Path.cwd()}",
            near
            or "task: path/to/file.py:MyTask, from the directory in which samecurve is started",
            "task",
        ) from None
    except OSError as error:
        raise UserError(
            f"{path} can't be read: {error.strerror}", "check its path and permissions", "task"
        ) from None


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
    """The module by its name, which another process finds from here too."""
    assert task.module is not None
    depth = task.module.count(".") + (task.path.name == "__init__.py")
    root = str(task.path.resolve().parents[depth])
    with calling("importing it", task.path):
        if importlib.util.find_spec(task.module.partition(".")[0]):
            return importlib.import_module(task.module)
        with _beside(root):
            return importlib.import_module(task.module)


class _AsItStands(SourceFileLoader):
    """Compiled from the file each time.

    Python's own cache takes a file of equal size, changed within the same second, for the old one.
    """

    def get_code(self, fullname: str) -> CodeType:
        del fullname  # the loader serves one file
        return compile(self.get_data(self.path), self.path, "exec", dont_inherit=True)


def _module(path: Path) -> ModuleType:
    """The file as a module, named after its path and content.

    It is found under that name, so that what its classes make can be pickled.
    """
    absolute = path.resolve()
    digest = hashlib.sha256(bytes(absolute) + b"\0" + _source(path)).hexdigest()[:12]
    stem = re.sub(r"\W", "_", path.stem)
    name = f"samecurve_user_{stem}_{digest}"
    if name in sys.modules:
        return sys.modules[name]
    loader = _AsItStands(name, str(absolute))
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
    """The file's neighbours can be imported.

    Before all others while it is loaded; after all others from then on (by its methods).
    """
    sys.path.insert(0, directory)
    try:
        yield
    finally:
        sys.path.remove(directory)
        if directory not in sys.path:
            sys.path.append(directory)


def _no_class(task: Place, classes: list[str]) -> UserError:
    has = f"it has {', '.join(classes)}" if classes else "it has no class at all"
    example = f"task: {task.path}:{classes[0] if classes else 'MyTask'}"
    return UserError(
        f"{task.path} has no class {task.name}; {has}",
        suggest(task.name, classes) or example,
        "task",
    )
