"""The script to run, and what its source says about how to start it. The source is only read."""

import ast
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.machinery import PathFinder
from importlib.util import find_spec
from pathlib import Path

from samecurve.errors import UserError

_LOCAL_RANK = ("--local-rank", "--local_rank")  # spellings that torch.distributed.launch passes
_JAX = {"jax", "flax", "optax"}


@dataclass(frozen=True)
class Source:
    """The properties of a script's source that matter for its start."""

    local_rank: str | None = None  # the option's spelling, where the script's parser has one
    jax: bool = False  # the script imports jax and no torch


def find_script(target: str) -> Path:
    """The script's path. UserError: it is no script that can be read."""
    path = Path(target)
    if path.is_dir():
        raise UserError(
            f"{target} is a directory",
            f"a script in it, such as {target.rstrip('/')}/train.py; or -m for a package",
            "SCRIPT",
        )
    if not path.is_file():
        remedy = "a Python script's path"
        if target.startswith("-"):
            remedy += (
                "; options of samecurve run stand before the script: samecurve run"
                f" {target} ... SCRIPT"
            )
        raise UserError(f"{target} does not exist", f"{remedy}; -m MODULE for a module", "SCRIPT")
    if not os.access(path, os.R_OK):
        raise UserError(f"{target} can't be read", f"chmod u+r {target}, as its owner", "SCRIPT")
    return path


def find_module(target: str) -> Path | None:
    """The file that `python -m TARGET` runs; None: it is not Python source.

    UserError: there is no such module.
    """
    top = target.partition(".")[0]
    is_here = Path(f"{top}.py").exists() or Path(top).is_dir()
    if not top.isidentifier() or (find_spec(top) is None and not is_here):
        raise UserError(
            f"-m {target}: no module named {top}",
            "a module that this Python finds, or one in this directory",
            "-m",
        )
    return file_of_module(target)


def read_source(path: Path | None) -> Source:
    """Read a script's source. One that is not Python gives defaults, and fails when it runs."""
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


def file_of_module(name: str) -> Path | None:
    """Find a module's file without importing packages; None: not found, or not Python source."""
    places: list[str] | None = [str(Path.cwd()), *sys.path]
    origin: str | None = None
    for part in [*name.split("."), "__main__"]:
        if places is None:  # a plain module has no parts
            return _python_file(origin) if part == "__main__" else None
        try:
            spec = PathFinder.find_spec(part, places)
        except (ImportError, ValueError):
            return None
        if spec is None:
            return None
        origin = spec.origin
        parts = spec.submodule_search_locations
        places = None if parts is None else list(parts)
    return _python_file(origin)


def _python_file(origin: str | None) -> Path | None:
    return Path(origin) if origin and origin.endswith(".py") else None
