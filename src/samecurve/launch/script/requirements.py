"""What a script's source says of how it wants to be started. Nothing of it is imported or run."""

import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.machinery import PathFinder
from pathlib import Path

_LOCAL_RANK = ("--local-rank", "--local_rank")  # as torch.distributed.launch passes it
_JAX = {"jax", "flax", "optax"}


@dataclass(frozen=True)
class Source:
    """local_rank: the option's spelling, where the script's parser has one.

    jax: it imports jax and no torch.
    """

    local_rank: str | None = None
    jax: bool = False


def read(path: Path | None) -> Source:
    """An empty answer for what can't be read as Python: its own error says so when it runs."""
    try:
        tree = ast.parse(path.read_bytes()) if path else None
    except (OSError, SyntaxError, ValueError, RecursionError):
        return Source()
    if tree is None:
        return Source()
    imported = {name.partition(".")[0] for node in ast.walk(tree) for name in _imported(node)}
    return Source(next(_options(tree), None), bool(imported & _JAX) and "torch" not in imported)


def _imported(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
        yield node.module


def _options(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr == "add_argument"
        ):
            yield from (
                argument.value
                for argument in node.args
                if isinstance(argument, ast.Constant)
                and isinstance(argument.value, str)
                and argument.value in _LOCAL_RANK
            )


def of_module(name: str) -> Path | None:
    """The file that `python -m NAME` runs, found without importing its packages.

    None: not found, or not Python's source.
    """
    places: list[str] | None = [str(Path.cwd()), *sys.path[1:]]
    found = None
    for part in [*name.split("."), "__main__"]:
        if places is None:
            return (
                Path(found) if part == "__main__" and found and found.endswith(".py") else None
            )  # a plain module has no parts
        try:
            spec = PathFinder.find_spec(part, places)
        except (ImportError, ValueError):
            return None
        if spec is None:
            return None
        found, places = (
            spec.origin,
            (
                list(spec.submodule_search_locations)
                if spec.submodule_search_locations is not None
                else None
            ),
        )
    return Path(found) if found and found.endswith(".py") else None
