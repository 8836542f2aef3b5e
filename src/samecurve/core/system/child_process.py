"""Every Python process that Samecurve starts: its command line, its environment, its end.

A child finds modules where the command `samecurve` finds them: on PYTHONPATH and where packages are
installed. It never searches the working directory, which may be a run that somebody else made: a
file `random.py` or `samecurve/__init__.py` there would be executed, or would break the child. A
task's file still imports what lies beside it (tasks/user_class/load_class.py).

Nothing else in this package starts Python; tests/test_python_children.py looks for it.
"""

import ctypes
import os
import signal
import sys


def python_module(
    module: str, *arguments: str, python: str | None = None, unbuffered: bool = False
) -> list[str]:
    """The command line of `python -m MODULE ARGUMENT...` for an installed module.

    python: of another machine; None: this one. unbuffered: its output comes at once
    """
    flags = ["-P", "-u"] if unbuffered else ["-P"]
    return [python or sys.executable, *flags, "-m", module, *arguments]


def python_alone(*words: str) -> list[str]:
    """The command line of a file, or of `-c CODE`, that needs the standard library alone.

    It starts soonest: it reads no variable of Python's, and finds no installed package.
    """
    return [sys.executable, "-I", "-S", *words]


def python_bootstrap(path: str, *arguments: str) -> list[str]:
    """The command line of a file of this package that becomes a user's script.

    The file removes its own directory from the search. The script then finds modules as `python
    SCRIPT` does, beside itself first, unless the user has set PYTHONSAFEPATH.
    """
    return [sys.executable, path, *arguments]


def child_environment(**variables: str) -> dict[str, str]:
    """This process's environment with these variables set, for a child process."""
    return {**os.environ, **variables}


def die_with(parent: int, by: int = signal.SIGKILL) -> None:
    """Have the system end this process when its parent ends, even by kill -9.

    by: the signal that ends this process. Linux only; elsewhere nothing happens.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, by)  # PR_SET_PDEATHSIG
        if os.getppid() != parent:
            os._exit(1)
