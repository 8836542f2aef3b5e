"""What a user's code raises, as an error with its place in the user's own file.

Around each call of that code: `with calling("MyTask.loss()", file): ...`.
"""

import dis
import errno
import os
import sysconfig
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import NoReturn

import samecurve
from samecurve.errors import RunError, SamecurveError, UserError, is_ctrl_c, message_of
from samecurve.tasks.user_class.kept_class import is_kept, read_header

# what a moment later may not be
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


class StartedWhileLoading(BaseException):
    """A file that is loaded for its class has come to a call that would start a run.

    What stands above that call has been run; nothing of ours but load_class() may catch this.
    """


@contextmanager
def calling(what: str, path: Path | None, kind: type[SamecurveError] = UserError) -> Iterator[None]:
    """Around a call of the user's code, of which `path` is the file; None: the code is ours.

    An error of this kind: what it raised, and at which of the user's lines. A lost peer and lack of
    memory are told elsewhere.
    """
    if path is None:
        yield
        return
    process = os.getpid()
    try:
        yield
    except (SamecurveError, StartedWhileLoading, MemoryError):
        raise
    except BaseException as error:
        if os.getpid() != process:
            traceback.print_exc()
            _end_copy(what)
        if isinstance(error, GeneratorExit) or is_ctrl_c(error) or _of_a_peer(error):
            raise
        raise explain_raised(what, error, path, kind) from error
    if os.getpid() != process:
        _end_copy(what)


def _end_copy(what: str) -> NoReturn:
    """Of this process, which the user's code has forked: it would train the same run once more."""
    text = (
        f"warn   {what} has forked this process, and the copy came back from it: the copy is"
        " ended; end it there with os._exit(0)\n"
    )
    os.write(2, text.encode())
    os._exit(1)


def _of_a_peer(error: BaseException) -> bool:
    """Raised by a collective, inside torch's own code."""
    frames = traceback.extract_tb(error.__traceback__)
    return bool(frames) and (
        "/torch/distributed/" in frames[-1].filename
        or frames[-1].filename.endswith("/torch/nn/parallel/distributed.py")
    )


def explain_raised(
    what: str, error: BaseException, path: Path, kind: type[SamecurveError]
) -> SamecurveError:
    if isinstance(error, SyntaxError):
        return UserError(
            f"not valid Python: {error.msg}",
            "mend it at this place",
            f"{_shown(error.filename or str(path))}:{error.lineno or 1}",
        )
    notes = getattr(error, "__notes__", ())
    cause = ": ".join([what, *notes, type(error).__name__, message_of(error)]).rstrip(": ")
    remedy = _remedy(error, path)
    if isinstance(error, OSError) and not isinstance(error, FileNotFoundError):
        transient = error.errno in _TRANSIENT or isinstance(error, ConnectionError | TimeoutError)
        if transient:
            remedy = (
                "a disk or a network failed, not the program: the same command again goes on from"
                " the last save"
            )
        return RunError(cause, remedy, _where(error, path), again=transient)
    return kind(cause, remedy, _where(error, path))


def _remedy(error: BaseException, path: Path) -> str:
    """What most likely helps; for what people forget, how it is written."""
    if isinstance(error, ModuleNotFoundError) and error.name == "lockstep":
        return "that program is called Samecurve now: from samecurve import Mean"
    if isinstance(error, ModuleNotFoundError):
        beside = Path(read_header(path).origin) if is_kept(path) else path
        return f"install {error.name}, or put it beside {beside.name}"
    if isinstance(error, AttributeError) and "before Module.__init__() call" in message_of(error):
        return "super().__init__() as the first line of the module's own __init__"
    if "mixed torch.Tensor and DTensor" in message_of(error):
        return (
            "fsdp gathers a block's weights while the block (an element of a ModuleList or"
            " Sequential) is called: call it as a whole, and read weights outside of blocks; or"
            " --strategy ddp"
        )
    if isinstance(error, AttributeError) and _of_another_phase(error):
        return (
            "nothing passes from one phase to the next: compute it in each phase, in those that"
            " don't train it under torch.no_grad() or with .detach(); noise that both want alike is"
            " a column of the data"
        )
    if isinstance(error, AttributeError) and _forgot_init(error):
        return (
            f"def __init__(self, model, data): self.{error.name} = ...: it is given the config's"
            " model and data sections"
        )
    return "mend it at this place"


def _of_another_phase(error: AttributeError) -> bool:
    """An attribute that the task's own methods set, as one phase does and another reads it."""
    kind = type(error.obj)
    if not getattr(kind, "phases", None) or isinstance(error.obj, type):
        return False
    methods = [method for base in kind.__mro__ for method in vars(base).values()]
    codes = [getattr(method, "__code__", None) for method in methods]
    return any(
        step.opname == "STORE_ATTR" and step.argval == error.name
        for code in codes
        if code is not None
        for step in dis.get_instructions(code)
    )


def _forgot_init(error: AttributeError) -> bool:
    """An attribute that only __init__ could have set, of a class of the user's that has none."""
    kind = type(error.obj)
    return (
        error.obj is not None
        and kind.__init__ is object.__init__
        and not isinstance(error.obj, type | ModuleType)
    )


def _where(error: BaseException, path: Path) -> str:
    """The innermost of the user's lines: in the task's directory, but not in a library there."""
    home = path.resolve().parent
    places = [Path(sysconfig.get_path(kind)) for kind in ("stdlib", "purelib", "platlib")]
    libraries = [place for place in places if not home.is_relative_to(place)]
    libraries.append(Path(samecurve.__file__).parent)

    def is_users(file: Path) -> bool:
        here = is_kept(path) or file.is_relative_to(home)  # a session's code is anywhere
        return here and not any(map(file.is_relative_to, libraries))

    frames = traceback.extract_tb(error.__traceback__)
    user_frames = [
        frame
        for frame in frames
        if not frame.filename.startswith("<frozen") and is_users(Path(frame.filename))
    ]
    if not user_frames:
        return read_header(path).origin if is_kept(path) else str(path)
    return f"{_shown(user_frames[-1].filename)}:{user_frames[-1].lineno}"


def _shown(path: str) -> str:
    """As one would type it from here."""
    return os.path.relpath(path) if Path(path).is_relative_to(Path.cwd()) else path
