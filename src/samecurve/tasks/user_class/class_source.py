"""The source of a user's class, read without running it."""

import ast
import functools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from samecurve.core.config.document import suggest
from samecurve.errors import UserError
from samecurve.tasks.user_class import Place, is_pickled
from samecurve.tasks.user_class.pickled_class import (
    FOR_LAUNCHER,
    check_python,
    read_header,
)
from samecurve.tasks.user_class.user_errors import explain_raised


def check_class_exists(task: Place) -> None:
    """UserError: the file or its class is not there, or the file is not Python."""
    if is_pickled(task.path):
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
        raise no_class(task, classes)


def declares_for_launcher(task: Place) -> bool:
    """Whether the class may have what the launcher asks for: its own sections, or data_stamp.

    The file is not run, since that would import an engine. A class that is not defined in this
    file, or has a base that is not, may have anything. False also where the file can't be read,
    which check_class_exists() reports.
    """
    try:
        if is_pickled(task.path):
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
    """The syntax tree of a source, kept: one start needs it several times. Not to be changed."""
    return ast.parse(source, path)


def _parse(path: Path) -> ast.Module:
    try:
        return _tree(read_source(path), str(path))
    except (SyntaxError, ValueError) as error:
        raise explain_raised("loading it", error, path, UserError) from None


def _bound(statement: ast.stmt) -> set[str]:
    """The names that a statement at the top of a file or class binds."""
    if isinstance(statement, ast.ClassDef | ast.FunctionDef):
        return {statement.name}
    if isinstance(statement, ast.ImportFrom):
        return {alias.asname or alias.name for alias in statement.names}
    if isinstance(statement, ast.Assign):
        return {target.id for target in statement.targets if isinstance(target, ast.Name)}
    return set()


def mentions(files: Sequence[Path], word: str) -> bool:
    """Whether one of the files has the word as a name or a text of its own.

    True where a source can't be read: it may have the word.
    """
    try:
        trees = [ast.parse(file.read_bytes()) for file in files]
    except (OSError, SyntaxError, ValueError):  # loading the class says so
        return True
    return not trees or any(word in _words(node) for tree in trees for node in ast.walk(tree))


def _words(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node.value
    elif isinstance(node, ast.Attribute):
        yield node.attr
    elif isinstance(node, ast.arg | ast.keyword) and node.arg:
        yield node.arg


def read_source(path: Path) -> bytes:
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


def no_class(task: Place, classes: list[str]) -> UserError:
    """The error of a file that lacks the class; classes: those it has"""
    has = f"it has {', '.join(classes)}" if classes else "it has no class at all"
    example = f"task: {task.path}:{classes[0] if classes else 'MyTask'}"
    return UserError(
        f"{task.path} has no class {task.name}; {has}",
        suggest(task.name, classes) or example,
        "task",
    )
