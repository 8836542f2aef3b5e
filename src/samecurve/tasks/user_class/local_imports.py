"""The files that a user's class is made of: its own, and the modules beside it that it imports.

The sources are read, not run. What is imported from elsewhere, or by a computed name, is not found.
"""

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from samecurve.tasks.user_class import Place


class LocalFiles(NamedTuple):
    """Sources under one directory, from which they import each other."""

    root: Path
    entry: str  # the path of the class's own file, relative to the root
    sources: dict[str, bytes]  # relative path -> content


def local_files(place: Place) -> LocalFiles:
    """The class's file and the files under the same root that it imports, and so on.

    OSError: a file can't be read.
    """
    path = place.path.resolve()
    root = path.parent
    if place.module:
        root = path.parents[place.module.count(".") + (path.name == "__init__.py")]
    sources: dict[str, bytes] = {}
    waiting = [path, *_packages_of(path, root)] if place.module else [path]
    while waiting:
        file = waiting.pop()
        name = file.relative_to(root).as_posix()
        if name not in sources:
            sources[name] = file.read_bytes()
            waiting += _imported(file, sources[name], root)
    return LocalFiles(root, path.relative_to(root).as_posix(), sources)


def tree_of(source: bytes) -> str | bytes:
    """The code of a source without comments and layout; the source as it is, if it is no code."""
    try:
        return ast.dump(ast.parse(source))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return source


def _imported(file: Path, source: bytes, root: Path) -> Iterator[Path]:
    """The files under the root that a source imports, with the packages that they lie in."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):  # loading the class says so
        return
    for node in ast.walk(tree):
        for parts, home in _modules_named(node, file, root):
            for length in range(1, len(parts) + 1):
                yield from _files_of(home.joinpath(*parts[:length]))


def _modules_named(node: ast.AST, file: Path, root: Path) -> Iterator[tuple[list[str], Path]]:
    """The modules that a statement may import, each with the directory to look in."""
    if isinstance(node, ast.Import):
        for alias in node.names:
            yield alias.name.split("."), root
    elif isinstance(node, ast.ImportFrom):
        home = root
        if node.level:
            home = file.parents[node.level - 1] if node.level <= len(file.parents) else root
        if not home.is_relative_to(root):
            return
        parts = node.module.split(".") if node.module else []
        for alias in node.names:
            yield [*parts, alias.name], home


def _files_of(module: Path) -> Iterator[Path]:
    """The file of a module or of a package."""
    for file in (module.with_name(f"{module.name}.py"), module / "__init__.py"):
        if file.is_file():
            yield file


def _packages_of(path: Path, root: Path) -> list[Path]:
    """The `__init__.py` of each package that a file lies in."""
    inside = [parent for parent in path.parents if parent != root and parent.is_relative_to(root)]
    return [parent / "__init__.py" for parent in inside if (parent / "__init__.py").is_file()]
