"""What the source of a task's class speaks of, told without running it."""

import ast
from collections.abc import Iterator
from pathlib import Path

from samecurve.tasks.registry import entry_of
from samecurve.tasks.user_class.class_place import file_of_module, place_of
from samecurve.tasks.user_class.kept_class import is_kept


def mentions(task: str, word: str) -> bool:
    """Whether the task's file has the word as a name or a text of its own.

    True where its source can't be read: it may.
    """
    files = _sources(task)
    if not files:
        return True
    try:
        trees = [ast.parse(file.read_bytes()) for file in files]
    except (OSError, SyntaxError, ValueError):  # loading it says so
        return True
    return any(word in _words(node) for tree in trees for node in ast.walk(tree))


def _sources(task: str) -> list[Path]:
    place = place_of(task)
    if place is not None:
        return [] if is_kept(place.path) else [place.path]
    modules = {where.partition(":")[0] for where in entry_of(task).classes.values()}
    return [file for file in map(file_of_module, modules) if file]


def _words(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node.value
    elif isinstance(node, ast.Attribute):
        yield node.attr
    elif isinstance(node, ast.arg | ast.keyword) and node.arg:
        yield node.arg
