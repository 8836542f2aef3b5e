"""A user's task, named by its place: `path/to/file.py:MyTask`, or `package.module:MyTask`.

Its file is read, and its class loaded, here; what the user's code raises becomes an error with its
place in that file. No engine is imported here.
"""

import ast
import errno
import hashlib
import importlib.util
import os
import re
import sys
import sysconfig
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.machinery import PathFinder, SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType
from typing import NamedTuple

import samecurve
from samecurve.core.config.document import Document, suggest
from samecurve.errors import RunError, SamecurveError, UserError
from samecurve.tasks.kept_class import FOR_LAUNCHER, KEPT, check_python, is_kept, read_header
from samecurve.tasks.kept_class import load as load_kept

_STOPPED = "__stopped_by_samecurve__"  # in a module that was run up to a call that starts a run


class Place(NamedTuple):
    """Where a class is: in a file, in a module imported by its name, or kept (kept_class.py)."""

    path: Path
    name: str
    module: str | None = None


class StartedWhileLoading(BaseException):
    """A file that is loaded for its class has come to a call that would start a run.

    What stands above that call has been run; nothing of ours but load_class() may catch this.
    """


def place_of(task: object) -> Place | None:
    """The place that a text names; None: it is of another form, or there is no such module.

    task: my/file.py:MyTask, package.module:MyTask, a/run/task.pickle:MyTask
    """
    match = re.fullmatch(r"(.+):([^\W\d]\w*)", task) if isinstance(task, str) else None
    if match is None:
        return None
    path = Path(match[1])
    if path.suffix == ".py" or is_kept(path):
        return Place(path, match[2]) if path.stem else None
    file = file_of_module(match[1])
    return Place(file, match[2], match[1]) if file else None


def identity_of(task: str) -> str:
    """The task by what it is; a kept class by its name, wherever it is kept."""
    place = place_of(task)
    return f"class {place.name}" if place and is_kept(place.path) else task


def find_kept_class(document: Document, home: Path) -> None:
    """Point a config to the kept class that lies beside it, wherever both were moved to.

    home: the config's directory
    """
    place = place_of(document.value.get("task"))
    if place and is_kept(place.path) and (home / KEPT).is_file():
        document.value["task"] = f"{home / KEPT}:{place.name}"


def code_of(place: Place) -> tuple[str, str]:
    """What the class is written in, and a digest of it. The same in every process."""
    if is_kept(place.path):
        header = read_header(place.path)
        return f"the class {place.name} of {header.origin}", header.digest
    return f"the file {place.path}", hashlib.sha256(place.path.read_bytes()).hexdigest()


def file_of_module(module: str) -> Path | None:
    """The source of a module that this process, or one started here, can import.

    Nothing is imported. None: there is no such module, or it has no source.
    """
    top, *parts = module.split(".")
    if not all(part.isidentifier() for part in (top, *parts)) or top == "__main__":
        return None
    try:
        spec = importlib.util.find_spec(top) or PathFinder.find_spec(top, [os.getcwd()])
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


def _parse(path: Path) -> ast.Module:
    try:
        return ast.parse(_source(path), str(path))
    except (SyntaxError, ValueError) as error:
        raise _explained("loading it", error, path, UserError) from None


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


@contextmanager
def calling(what: str, path: Path | None, kind: type[SamecurveError] = UserError) -> Iterator[None]:
    """Around a call of the user's code, of which `path` is the file; None: the code is ours.

    An error of this kind: what it raised, and at which of the user's lines. A lost peer and lack of
    memory are told elsewhere.
    """
    if path is None:
        yield
        return
    try:
        yield
    except (SamecurveError, MemoryError):
        raise
    except (Exception, SystemExit) as error:
        if _of_a_peer(error):
            raise
        raise _explained(what, error, path, kind) from error


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


# what a moment later may not be
_TRANSIENT = {
    errno.EIO,
    errno.ESTALE,
    errno.ENETDOWN,
    errno.ENETUNREACH,
    errno.EHOSTDOWN,
    errno.EHOSTUNREACH,
    errno.EREMOTEIO,
    errno.EAGAIN,
}


def _of_a_peer(error: BaseException) -> bool:
    """Raised by a collective, inside torch's own code."""
    frames = traceback.extract_tb(error.__traceback__)
    return bool(frames) and (
        "/torch/distributed/" in frames[-1].filename
        or frames[-1].filename.endswith("/torch/nn/parallel/distributed.py")
    )


def _explained(
    what: str, error: BaseException, path: Path, kind: type[SamecurveError]
) -> SamecurveError:
    if isinstance(error, SyntaxError):
        return UserError(
            f"not valid Python: {error.msg}",
            "mend it at this place",
            f"{_shown(error.filename or str(path))}:{error.lineno or 1}",
        )
    notes = getattr(error, "__notes__", ())
    cause = ": ".join([what, *notes, type(error).__name__, str(error)]).rstrip(": ")
    remedy = _remedy(error, path)
    if isinstance(error, OSError) and not isinstance(error, FileNotFoundError):
        transient = error.errno in _TRANSIENT or isinstance(error, ConnectionError | TimeoutError)
        if transient:
            remedy = (
                "a disk or a network failed, not the program: the same command again goes on from"
                " the last save"
            )
        return RunError(cause, remedy, _where(error, path), again=transient)
    return kind(cause, remedy, _where(error, path))


def _remedy(error: BaseException, path: Path) -> str:
    """What most likely helps; for what people forget, how it is written."""
    if isinstance(error, ModuleNotFoundError) and error.name == "lockstep":
        return "that program is called Samecurve now: from samecurve import Mean"
    if isinstance(error, ModuleNotFoundError):
        beside = Path(read_header(path).origin) if is_kept(path) else path
        return f"install {error.name}, or put it beside {beside.name}"
    if isinstance(error, AttributeError) and "before Module.__init__() call" in str(error):
        return "super().__init__() as the first line of the module's own __init__"
    if "mixed torch.Tensor and DTensor" in str(error):
        return (
            "fsdp gathers a block's weights while the block (an element of a ModuleList or"
            " Sequential) is called: call it as a whole, and read weights outside of blocks; or"
            " --strategy ddp"
        )
    if isinstance(error, AttributeError) and _forgot_init(error):
        return (
            f"def __init__(self, model, data): self.{error.name} = ...: it is given the config's"
            " model and data sections"
        )
    return "mend it at this place"


def _forgot_init(error: AttributeError) -> bool:
    """An attribute that only __init__ could have set, of a class of the user's that has none."""
    kind = type(error.obj)
    return (
        error.obj is not None
        and kind.__init__ is object.__init__
        and not isinstance(error.obj, type | ModuleType)
    )


def _where(error: BaseException, path: Path) -> str:
    """The innermost of the user's lines: in the task's directory, but not in a library there."""
    home = path.resolve().parent
    places = [Path(sysconfig.get_path(kind)) for kind in ("stdlib", "purelib", "platlib")]
    libraries = [place for place in places if not home.is_relative_to(place)]
    libraries.append(Path(samecurve.__file__).parent)

    def is_users(file: Path) -> bool:
        here = is_kept(path) or file.is_relative_to(home)  # a session's code is anywhere
        return here and not any(map(file.is_relative_to, libraries))

    frames = traceback.extract_tb(error.__traceback__)
    user_frames = [
        frame
        for frame in frames
        if not frame.filename.startswith("<frozen") and is_users(Path(frame.filename))
    ]
    if not user_frames:
        return read_header(path).origin if is_kept(path) else str(path)
    return f"{_shown(user_frames[-1].filename)}:{user_frames[-1].lineno}"


def _shown(path: str) -> str:
    """As one would type it from here."""
    return os.path.relpath(path) if Path(path).is_relative_to(Path.cwd()) else path
