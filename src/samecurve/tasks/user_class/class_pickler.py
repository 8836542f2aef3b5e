"""How a class of this Python session is named for other processes.

A class of a module is named by its module. Any other class is written to a file as it is in memory,
and pickled_class.py reads it: a class of a script (`__main__`), of a notebook, of an interactive
session or inside of a function.

What such a class uses of its session is copied with it. Ranks therefore don't run the script again,
and they see the values that the script has set (a width from its arguments). What can be imported
is named, not copied.
"""

import hashlib
import io
import json
import linecache
import os
import re
import site
import sys
import sysconfig
from collections import ChainMap
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

import cloudpickle

from samecurve.errors import UserError
from samecurve.processes import Call, output_of
from samecurve.tasks import user_class
from samecurve.tasks.user_class import TASK_PICKLE
from samecurve.tasks.user_class.pickled_class import (
    FOR_LAUNCHER,
    OWN_FILE,
    Header,
    python_version,
    remember,
)
from samecurve.units import show_bytes

_NOTED = 100 << 20  # bytes of a pickled class from which the user is told its size


def task_of(task_class: type, directory: Path) -> str:
    """The config's `task`, by which any other process started here finds the class.

    directory: where the class is written if no other process can import it

    UserError: the class uses something that can't be pickled.
    """
    module, name = task_class.__module__, task_class.__name__
    file = _module_file(task_class)
    packages = [sysconfig.get_path(kind) for kind in ("purelib", "platlib")]
    is_installed = file is not None and any(map(file.is_relative_to, packages))
    if file is not None and "." not in module and not is_installed:
        return f"{os.path.relpath(file) if file.is_relative_to(Path.cwd()) else file}:{name}"
    if file is not None and _found_by_others(module) == file:
        return f"{module}:{name}"
    return f"{write_pickled(task_class, directory)}:{name}"


def _module_file(task_class: type) -> Path | None:
    """The file of the module that has the class under its own name; None: there is none."""
    module = _module_of(task_class)
    if module is None or module.__name__ == "__main__":
        return None
    if getattr(module, task_class.__qualname__, None) is not task_class:
        return None
    file = getattr(module, "__file__", None)
    return Path(file).resolve() if file and file.endswith(".py") else None


def _found_by_others(module: str) -> Path | None:
    """The file of a module as a fresh process in this directory finds it."""
    done = output_of(Call(user_class.__name__, (module,), "print_file").command)
    done.check_returncode()
    return Path(done.stdout.strip()).resolve() if done.stdout.strip() else None


def write_pickled(task_class: type, directory: Path) -> Path:
    """Write the class to a file in this directory.

    UserError: the class uses something that can't be pickled.
    """
    buffer = io.BytesIO()
    pickler = _Pickler(buffer)
    try:
        pickler.dump(task_class)
    except Exception as error:  # whatever a value of the session's raises
        raise _not_picklable(task_class, pickler.codes, error) from error
    payload = buffer.getbuffer()
    if len(payload) > _NOTED:
        sys.stderr.write(_size_note(task_class, pickler.codes, len(payload)))
    sources = {
        _shown(code): "".join(linecache.getlines(code.co_filename)) for code in pickler.codes
    }
    origins = [_shown(method.__code__) for method in _own_methods(task_class)]
    header = Header(
        name=task_class.__name__,
        origin=origins[0] if origins else str(getattr(_module_of(task_class), "__file__", "")),
        declares=any(hasattr(task_class, name) for name in FOR_LAUNCHER),
        digest=_digest(task_class, pickler.codes),
        python=python_version(),
        paths=_paths(),
        sources={name: text for name, text in sources.items() if text},
    )
    path = directory / TASK_PICKLE
    with open(path, "wb") as file:
        file.write(json.dumps(asdict(header)).encode() + b"\n")
        file.write(payload)
    remember(path)
    return path


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """The pickler of cloudpickle with three changes.

    Functions of a module that is pickled by value share the namespace of a module of ours when
    they are read again, as compilers expect. The code of a cell is named by the cell. A class that
    is read again is a new one, where cloudpickle would write over the session's own.
    """

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self.codes: list[CodeType] = []

    def persistent_id(self, obj: object) -> tuple[int, str] | None:
        """The number and the package of a module, for the namespace of a session's module."""
        if isinstance(obj, dict):
            for number, namespace in enumerate(self.globals_ref.values()):
                if obj is namespace:
                    return number, namespace.get("__package__") or ""
        return None

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, CodeType):
            self.codes.append(obj)
            return self.dispatch_table[CodeType](obj.replace(co_filename=_shown(obj)))
        reduced = super().reducer_override(obj)
        if isinstance(obj, type) and isinstance(reduced, tuple):
            function, arguments, *rest = reduced
            return (function, tuple(map(_without_tracking, arguments)), *rest)
        return reduced


def _without_tracking(argument: object) -> object:
    """The argument, or None for the id by which cloudpickle would find the session's own class."""
    is_id = isinstance(argument, str) and re.fullmatch("[0-9a-f]{32}", argument)
    return None if is_id else argument


def _shown(code: CodeType) -> str:
    """The name that tracebacks give the file of a code: a path, or `Cell In[3]`."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython else None
    if shell is not None and (cell := shell.compile.format_code_name(code.co_filename)):
        return " ".join(cell)
    if os.path.exists(code.co_filename):
        return os.path.abspath(code.co_filename)
    return code.co_filename


def _own_methods(task_class: type) -> list[FunctionType]:
    """The methods that the class itself defines, in their order."""
    members = [getattr(value, "__func__", value) for value in vars(task_class).values()]
    return [member for member in members if isinstance(member, FunctionType)]


def _module_of(task_class: type) -> ModuleType | None:
    return sys.modules.get(task_class.__module__)


def _paths() -> tuple[str, ...]:
    """Where this process finds modules, beside Python's own places."""
    python_places = {sysconfig.get_path(kind) for kind in ("stdlib", "platstdlib")}
    python_places |= {*site.getsitepackages(), site.getusersitepackages()}
    paths = dict.fromkeys(os.path.abspath(entry) for entry in sys.path)
    return tuple(
        path
        for path in paths
        if os.path.isdir(path)
        and path not in python_places
        and os.path.dirname(path) not in python_places  # lib-dynload
    )


def _digest(task_class: type, codes: Sequence[CodeType]) -> str:
    """A digest of the class's code, the same in every process that has the same code."""
    texts = sorted(
        repr((code.co_qualname, code.co_code, code.co_names, *map(_constant, code.co_consts)))
        for code in codes
    )
    if not codes:  # the class is imported by its name
        file = getattr(_module_of(task_class), "__file__", None)
        texts = [Path(file).read_text()] if file else []
    return hashlib.sha256("\n".join([task_class.__qualname__, *texts]).encode()).hexdigest()


def _constant(value: object) -> str:
    if isinstance(value, CodeType):
        return value.co_qualname
    if isinstance(value, frozenset):  # the order of a set differs between processes
        return str(sorted(map(repr, value)))
    return repr(value)


def _used_values(task_class: type, codes: Sequence[CodeType]) -> dict[str, Any]:
    """The values of the session that the class uses, by name; classes and functions last."""
    used = {name for code in codes for name in code.co_names}
    namespaces = [method.__globals__ for method in _own_methods(task_class)]
    values = {name: value for name, value in ChainMap(*namespaces).items() if name in used}
    return dict(sorted(values.items(), key=lambda item: callable(item[1])))


def _size(value: object) -> int:
    """How many bytes the pickle of a value has; -1: it can't be pickled."""
    buffer = io.BytesIO()
    try:
        _Pickler(buffer).dump(value)
    except Exception:  # whatever the value's own code raises
        return -1
    return buffer.tell()


def _not_picklable(task_class: type, codes: Sequence[CodeType], error: Exception) -> UserError:
    name = task_class.__name__
    values = _used_values(task_class, codes)
    culprit = next((used for used, value in values.items() if _size(value) < 0), None)
    uses = f"uses {culprit}, which" if culprit else "uses something that"
    return UserError(
        f"{name} {uses} can't be taken to another process: {type(error).__name__}: {error}",
        f"make it where it is used, in a method of {name}; or {OWN_FILE}",
        "task",
    )


def _size_note(task_class: type, codes: Sequence[CodeType], size: int) -> str:
    sizes = {name: _size(value) for name, value in _used_values(task_class, codes).items()}
    largest = max(sizes, key=lambda name: sizes[name], default="")
    most = f", most of it in {largest}" if largest else ""
    return (
        f"note   {task_class.__name__} is kept with what it uses, {show_bytes(size)}{most}; what"
        " its methods make or read themselves is not\n"
    )
