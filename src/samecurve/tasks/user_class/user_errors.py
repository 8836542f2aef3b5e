"""Calls of a user's code, and their errors, which name the line in the user's own file.

`with calling("MyTask.loss()", file): ...` surrounds each call of that code.
"""

import errno
import os
import sysconfig
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import NoReturn

from samecurve.core.system import KERNEL, PRODUCTS
from samecurve.errors import RunError, SamecurveError, UserError, is_ctrl_c, message_of
from samecurve.tasks.user_class import is_pickled

# errors that may be gone a moment later
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


# what waits for peers: files of ours and of torch's ddp; fsdp does so in the user's forward pass
_COLLECTIVES = (
    "/torch/nn/parallel/distributed.py",
    *(
        f"/samecurve/{name}.py"
        for name in (
            "features/compress/powersgd",
            "torch_engine/process_group",
            "torch_engine/profiling/timeline",
            "torch_engine/strategies/reducers/tree",
            "torch_engine/strategies/sharded/link",
            "torch_engine/strategies/sharded/once",
            "torch_engine/strategies/sharded/sums",
            "torch_engine/whole_matrices",
        )
    ),
)


class StartedWhileLoading(BaseException):
    """A file that is loaded for its class has reached a call that would start a run.

    The lines above that call have been run. Only load_class() may catch this.
    """


@contextmanager
def calling(what: str, path: Path | None, kind: type[SamecurveError] = UserError) -> Iterator[None]:
    """Surround a call of the user's code.

    what: the call, for errors: "MyTask.loss()"
    path: the user's file; None: the code is ours, and its errors pass as they are

    An error of this kind: what the code raised, and at which of the user's lines.
    """
    process = os.getpid()
    try:
        yield
    except BaseException as error:
        raise_explained(error, what, path, kind, process)
    if path is not None and os.getpid() != process:
        end_copy(what)


def raise_explained(
    error: BaseException, what: str, path: Path | None, kind: type[SamecurveError], process: int
) -> NoReturn:
    """Raise what the user's code has raised as an error that names the user's line.

    Our own errors, Ctrl-C, a lost peer and a lack of memory pass as they are: others explain them.

    what, path, kind: as calling() takes them
    process: the id of the process that called the code
    """
    passes = SamecurveError | StartedWhileLoading | MemoryError
    if path is None or isinstance(error, passes):
        raise error
    if os.getpid() != process:
        traceback.print_exception(error)
        end_copy(what)
    if isinstance(error, GeneratorExit) or is_ctrl_c(error) or _of_a_peer(error):
        raise error
    raise explain_raised(what, error, path, kind) from error


def end_copy(what: str) -> NoReturn:
    """End this process, a copy that the user's code has forked: it would train the run again."""
    text = (
        f"warn   {what} has forked this process, and the copy came back from it: the copy is"
        " ended; end it there with os._exit(0)\n"
    )
    os.write(2, text.encode())
    os._exit(1)


def _of_a_peer(error: BaseException) -> bool:
    """Whether a collective that has peers has raised the error, inside torch's code or our own."""
    if "Default process group has not been initialized" in message_of(error):
        return False  # a process alone has no peers
    frames = traceback.extract_tb(error.__traceback__)
    return bool(frames) and (
        "/torch/distributed/" in frames[-1].filename or frames[-1].filename.endswith(_COLLECTIVES)
    )


def explain_raised(
    what: str, error: BaseException, path: Path, kind: type[SamecurveError]
) -> SamecurveError:
    if isinstance(error, SyntaxError):
        return UserError(
            f"not valid Python: {error.msg}",
            "correct the syntax of this line, or of the line above it",
            f"{_shown(error.filename or str(path))}:{error.lineno or 1}",
        )
    notes = getattr(error, "__notes__", ())
    cause = ": ".join([what, *notes, type(error).__name__, message_of(error)]).rstrip(": ")
    from samecurve.tasks.user_class.user_remedies import remedy_for

    places = _places(error, path)
    remedy = remedy_for(error, _origin_of(path), places[-1] if places else None)
    if isinstance(error, OSError) and not isinstance(error, FileNotFoundError):
        transient = error.errno in _TRANSIENT or isinstance(error, ConnectionError | TimeoutError)
        if transient:
            remedy = (
                "a disk or a network failed, not the program: the same command again goes on from"
                " the last save"
            )
        return RunError(cause, remedy, _where(places, path), again=transient)
    return kind(cause, remedy, _where(places, path))


def _places(error: BaseException, path: Path) -> list[TracebackType]:
    """The places in the user's code: in the task's directory, but not in a library there."""
    home = path.resolve().parent
    places = [Path(sysconfig.get_path(kind)) for kind in ("stdlib", "purelib", "platlib")]
    libraries = [place for place in places if not home.is_relative_to(place)]
    libraries += [KERNEL, PRODUCTS]

    def is_users(file: str) -> bool:
        if file.startswith("<frozen"):
            return False
        here = is_pickled(path) or Path(file).is_relative_to(home)  # a session's code is anywhere
        return here and not any(map(Path(file).is_relative_to, libraries))

    found, at = [], error.__traceback__
    while at is not None:
        if is_users(at.tb_frame.f_code.co_filename):
            found.append(at)
        at = at.tb_next
    return found


def _where(places: Sequence[TracebackType], path: Path) -> str:
    """The innermost of the user's lines."""
    if not places:
        return _origin_of(path)
    return f"{_shown(places[-1].tb_frame.f_code.co_filename)}:{places[-1].tb_lineno}"


def _origin_of(path: Path) -> str:
    """Where the class was written: the file itself, or the place that a pickled class came from."""
    if not is_pickled(path):
        return str(path)
    from samecurve.tasks.user_class.pickled_class import read_header

    return read_header(path).origin


def _shown(path: str) -> str:
    """A path as one would type it from the current directory."""
    return os.path.relpath(path) if Path(path).is_relative_to(Path.cwd()) else path
