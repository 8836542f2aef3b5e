"""At which lines of a task's code, or of a library that it calls, a call stands."""

import inspect
import sysconfig
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Literal, NamedTuple

import torch

import samecurve

_INSTALLED = {"site-packages", "dist-packages"}
_LIBRARIES = tuple(sysconfig.get_path(name) for name in ("purelib", "platlib"))


class Site(NamedTuple):
    """Lines at which a task's code is, each a file and a number; None: there is none."""

    deepest: tuple[str, int] | None  # outside of torch and of this program
    users: tuple[str, int] | None  # the deepest that is in no library

    @property
    def where(self) -> str:
        """file:line of the user's, else of a library's; '': of neither."""
        at = self.users or self.deepest
        return f"{shown_path(at[0])}:{at[1]}" if at else ""


def site_of(frame: FrameType | None, base: FrameType | None, line: int | None = None) -> Site:
    """base: the frame from which the task was called, at which the search ends.

    line: the innermost frame's, where it has gone on since.
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


@cache
def kind_of(filename: str) -> Literal["users", "library", "ours"]:
    """ours: torch's code too, which draws and mixes for others."""
    if filename.startswith("<") and not filename.startswith("<ipython"):
        return "ours"
    path = Path(filename)
    if path.is_relative_to(Path(torch.__file__).parent):
        return "ours"
    own = Path(samecurve.__file__).parent
    if path.is_relative_to(own):
        inner = path.relative_to(own).parts
        is_task = len(inner) > 2 and inner[0] == "tasks" and inner[1] != "adapter"
        return "library" if is_task else "ours"
    if any(path.is_relative_to(library) for library in _LIBRARIES):
        return "library"
    if not _INSTALLED.isdisjoint(path.parts):  # a user's own, or another environment's
        return "library"
    if any(path.is_relative_to(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib")):
        return "ours"
    return "users"


def shown_path(path: str) -> str:
    """As one would type it from here, or import it."""
    # an environment may lie in the directory where the command was typed
    for home in (*map(Path, _LIBRARIES), Path.cwd()):
        if Path(path).is_relative_to(home):
            return str(Path(path).relative_to(home))
    return path


def caller() -> FrameType | None:
    """The frame that called the function which calls this."""
    frame = inspect.currentframe()
    return frame and frame.f_back and frame.f_back.f_back
