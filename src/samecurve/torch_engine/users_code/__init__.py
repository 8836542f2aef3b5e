"""The user's code: which files it is in, where a function begins, what it reads, at which of its
lines a call stands, and whether two of its values are the same.
"""

import inspect
import sysconfig
from collections import deque
from functools import cache
from pathlib import Path
from types import CodeType, FrameType
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
import torch
from torch import nn

from samecurve.core.system import KERNEL, PRODUCTS

if TYPE_CHECKING:
    from samecurve.torch_engine.step import EngineSetup

_INSTALLED = {"site-packages", "dist-packages"}
_LIBRARIES = tuple(sysconfig.get_path(name) for name in ("purelib", "platlib"))


class Site(NamedTuple):
    """The lines from which a call was made, each a file and a number; None: there is none.

    deepest: the innermost line outside of torch and of this program
    users: the innermost line that is in no library
    """

    deepest: tuple[str, int] | None
    users: tuple[str, int] | None

    @property
    def where(self) -> str:
        """file:line in the user's code, else in a library; '': in neither."""
        at = self.users or self.deepest
        return f"{shown_path(at[0])}:{at[1]}" if at else ""


def site_of(frame: FrameType | None, base: FrameType | None, line: int | None = None) -> Site:
    """The site of the call that a frame makes.

    base: the frame that called the task, where the search ends
    line: the frame's line at the time of the call, where the frame has gone on since
    """
    deepest = None
    while frame is not None and frame is not base:
        at = frame.f_code.co_filename, frame.f_lineno if line is None else line
        kind = kind_of(at[0])
        if kind != "ours":
            deepest = deepest or at
        if kind == "users":
            return Site(deepest, at)
        frame, line = frame.f_back, None
    return Site(deepest, None)


def caller() -> FrameType | None:
    """The frame that called the function which calls caller()."""
    frame = inspect.currentframe()
    return frame and frame.f_back and frame.f_back.f_back


def place_of_method(task: object, method: str) -> str:
    """file:line at which a task's method begins."""
    code = _code(task, method)
    return place_of(code) if code else "task"


def loss_place(setup: "EngineSetup") -> str:
    """file:line at which the user's loss begins."""
    return place_of_method(setup.task, "features" if setup.plan.sees_whole_batch else "loss")


def place_of(code: CodeType) -> str:
    """file:line at which a function begins."""
    return f"{shown_path(code.co_filename)}:{code.co_firstlineno}"


def names_read(task: object, method: str) -> set[str]:
    """Names of the attributes and variables in a task's method, and in functions within it."""
    names, waiting = set(), [_code(task, method)]
    while waiting:
        code = waiting.pop()
        if code is not None:
            names |= {*code.co_names, *code.co_freevars}
            waiting += [constant for constant in code.co_consts if isinstance(constant, CodeType)]
    return names


@cache
def kind_of(filename: str) -> Literal["users", "library", "ours"]:
    """The owner of a file's code. "ours" includes torch and Python's own library, which draw and
    mix for others; a task that comes with this program is a library.
    """
    if filename.startswith("<") and not filename.startswith("<ipython"):
        return "ours"
    path = Path(filename)
    if path.is_relative_to(Path(torch.__file__).parent):
        return "ours"
    if path.is_relative_to(KERNEL):
        return "ours"
    if path.is_relative_to(PRODUCTS):
        return "library"
    if any(path.is_relative_to(library) for library in _LIBRARIES):
        return "library"
    if not _INSTALLED.isdisjoint(path.parts):  # a user's own, or another environment's
        return "library"
    if any(path.is_relative_to(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib")):
        return "ours"
    return "users"


def shown_path(path: str) -> str:
    """A path relative to the library's or the current directory, where it is within one."""
    # an environment may lie in the directory where the command was typed
    for home in (*map(Path, _LIBRARIES), Path.cwd()):
        if Path(path).is_relative_to(home):
            return str(Path(path).relative_to(home))
    return path


def _code(task: object, method: str) -> CodeType | None:
    return _code_of(getattr(getattr(task, "task", task), method, None))


def _code_of(function: object) -> CodeType | None:
    code = getattr(getattr(function, "__func__", function), "__code__", None)
    return code if isinstance(code, CodeType) else None


def users_code(function: object) -> CodeType | None:
    """The code of a function or method of the user's; None: it is none."""
    code = _code_of(function)
    return code if code and kind_of(code.co_filename) == "users" else None


def has_users_code(task: object, model: nn.Module) -> bool:
    """Whether a class of the task, or of one of the model's modules, is of the user's code."""
    return any(is_users(type(part)) for part in (getattr(task, "task", task), *model.modules()))


def is_users(kind: type) -> bool:
    """Whether a class is of the user's code."""
    return any(map(users_code, tuple(vars(kind).values())))


def equal(one: object, other: object) -> bool:
    """Whether two values are the same, as far as that can be seen."""
    if one is other:
        return True
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return _equal_tensors(one.detach(), other.detach())
    if isinstance(one, np.ndarray) and isinstance(other, np.ndarray):
        return np.array_equal(one, other)
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(equal(one[name], other[name]) for name in one)
    if isinstance(one, list | tuple | deque) and type(one) is type(other):
        items: Any = other
        if set(map(type, one)) == {int}:  # as the state of Python's generator: hundreds of numbers
            return bool(one == items)
        return len(one) == len(items) and all(map(equal, one, items))
    plain = (int, float, complex, str, bytes, set)
    return isinstance(one, plain) and isinstance(other, plain) and one == other


def _equal_tensors(one: torch.Tensor, other: torch.Tensor) -> bool:
    if (one.shape, one.dtype, one.device) != (other.shape, other.dtype, other.device):
        return False
    if not (is_there(one) and is_there(other)):
        return False
    same = one == other
    if one.is_floating_point() or one.is_complex():
        same |= one.isnan() & other.isnan()
    return bool(same.all())


def is_there(tensor: torch.Tensor) -> bool:
    """Whether a tensor's numbers can be read: fsdp frees weights of which a module may keep a view,
    and reading such a view would end the process.
    """
    if tensor.layout != torch.strided or not tensor.numel():
        return True
    return tensor.untyped_storage().nbytes() > 0
