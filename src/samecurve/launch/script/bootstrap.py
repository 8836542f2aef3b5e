"""What a rank of `samecurve run` is before it is the user's script: it dies with its launcher, and
leaves word of how it ended.

Run by its path, without the package, so that it starts as fast as the script alone: bootstrap.py
WORD LAUNCHER SIGNAL script|module TARGET ARGS... Inside, sys.argv, sys.path and __main__ are what
`python SCRIPT` or `python -m MODULE` would make them, so that pickles and spawned processes find
their way. The traceback of an uncaught exception goes into the word, free of frames from here; the
launcher puts it into the rank's log, and tells the cause once.
"""

import os
import sys
from typing import Any

_PACKAGE = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))


def main() -> None:
    if sys.path[:1] == [os.path.dirname(os.path.abspath(__file__))]:
        del sys.path[0]  # first of all: what is beside this file would shadow other modules
    _, word, launcher, number, kind, *argv = sys.argv
    _die_with(int(launcher))
    _watched(word, int(number))
    me, error = os.getpid(), None
    try:
        (_module if kind == "module" else _script)(argv)
    except BaseException as raised:
        error = raised
    if os.getpid() != me:  # a fork of the script that came back through here: Python's own ending
        if error is not None:
            raise error
        return
    code = _leave(word, error)
    error = None
    sys.exit(code)


def _die_with(parent: int) -> None:
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(1, 9)  # PR_SET_PDEATHSIG, SIGKILL
        if os.getppid() != parent:
            os._exit(1)


def _watched(word: str, number: int) -> None:
    """number: of the signal that asks where it hangs; 0: nobody will."""
    if number:
        from importlib.util import module_from_spec, spec_from_file_location

        spec = spec_from_file_location(
            "samecurve_flight_recorder", os.path.join(_PACKAGE, "worker", "flight_recorder.py")
        )
        assert spec is not None
        assert spec.loader is not None
        recorder = module_from_spec(spec)
        spec.loader.exec_module(recorder)
        recorder.begin(os.path.dirname(word), os.environ["RANK"], number)


def _fresh() -> dict[str, Any]:
    """A new __main__, which stays until the process ends, for exit handlers and threads."""
    import builtins
    import types

    made = types.ModuleType("__main__")
    made.__dict__.update(__builtins__=builtins, __annotations__={})
    sys.modules["__main__"] = made
    return made.__dict__


def _script(argv: list[str]) -> None:
    import io
    from importlib.machinery import SourceFileLoader

    path, space = os.path.abspath(argv[0]), _fresh()
    sys.argv = argv
    if not getattr(sys.flags, "safe_path", False):
        sys.path.insert(0, os.path.dirname(os.path.realpath(path)))
    space.update(__file__=path, __cached__=None, __loader__=SourceFileLoader("__main__", path))
    with io.open_code(path) as file:
        source = file.read()
    exec(compile(source, path, "exec", dont_inherit=True), space)


def _module(argv: list[str]) -> None:
    import runpy

    _fresh()
    sys.argv = ["-m", *argv[1:]]
    if not getattr(sys.flags, "safe_path", False):
        sys.path.insert(0, os.getcwd())
    runpy._run_module_as_main(argv[0])  # type: ignore[attr-defined]  # what the interpreter itself calls for -m


def _leave(path: str, error: BaseException | None) -> int:
    """Word of how it ended; said: what Python would have put on stderr. Returns the exit code."""
    import json
    import time

    code, cause, trace, said = _told(error)
    word = {
        "code": code,
        "cause": cause,
        "trace": trace,
        "said": said,
        "joined": _joined(),
        "torch": "torch" in sys.modules,
        "time": time.time(),
    }
    try:
        with open(f"{path}.part", "w") as file:
            json.dump(word, file)
        os.replace(f"{path}.part", path)
    except OSError:  # no room: said here, as it would be without a launcher
        sys.stderr.write(said)
    return code


def _told(error: BaseException | None) -> tuple[int, str, str, str]:
    """Exit code, cause in a line, traceback, and all that stderr would show."""
    if error is None or (isinstance(error, SystemExit) and error.code is None):
        return 0, "", "", ""
    if isinstance(error, SystemExit):
        return (
            (error.code & 0xFF, "", "", "")
            if isinstance(error.code, int)
            else (1, str(error.code), "", f"{error.code}\n")
        )
    import traceback

    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename in {__file__, "<frozen runpy>"}:
        trace = trace.tb_next
    error.__traceback__ = trace
    text = "".join(traceback.format_exception(error))
    cause = "".join(traceback.format_exception_only(error)).strip()
    return (
        130 if isinstance(error, KeyboardInterrupt) else 1,
        cause.splitlines()[-1] if isinstance(error, SyntaxError) else cause,
        text,
        _hooked(error, text),
    )


def _hooked(error: BaseException, text: str) -> str:
    """What sys.excepthook says, which the script or a library may have set."""
    import contextlib
    import io
    import traceback

    buffer = io.StringIO()
    try:
        with contextlib.redirect_stderr(buffer):
            sys.excepthook(type(error), error, error.__traceback__)
    except BaseException:
        return (
            f"{buffer.getvalue()}Error in sys.excepthook:\n{traceback.format_exc()}\nOriginal"
            f" exception was:\n{text}"
        )
    return buffer.getvalue() or text


def _joined() -> bool:
    """Whether this process was ever one of several that know of each other, as far as what it has
    imported can tell.
    """
    c10d, jax = (
        sys.modules.get("torch.distributed.distributed_c10d"),
        sys.modules.get("jax._src.distributed"),
    )
    if c10d is not None and (
        c10d.is_initialized()
        or getattr(c10d, "_default_pg_init_method", None) is not None
        or getattr(sys.excepthook, "__module__", "") == c10d.__name__
    ):
        return True  # the hook stays when the group is destroyed
    return getattr(getattr(jax, "global_state", None), "num_processes", 1) not in {None, 1} or not {
        "mpi4py.MPI",
        "horovod",
    }.isdisjoint(sys.modules)


if __name__ == "__main__":
    main()
