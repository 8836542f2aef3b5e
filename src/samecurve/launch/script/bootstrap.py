"""The start of a rank of `samecurve run`, before it becomes the user's script.

The rank dies with its launcher, and leaves a report of how it ended. This file is run by its path,
without the package, so that the rank starts as fast as the script alone:
bootstrap.py REPORT LAUNCHER SIGNAL script|module TARGET ARGS...
SIGNAL asks the rank where it hangs; 0: hangs are not looked for.

The script sees sys.argv, sys.path and __main__ as with `python SCRIPT` or `python -m MODULE`, so
that pickles and spawned processes work. The traceback of an uncaught exception goes into the
report, without the frames of this file. The launcher puts the traceback into the rank's log, and
prints the cause once.
"""

import os
import signal
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:  # importing it would take longer than the rest of this file
    from typing import Any

PACKAGE = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
RECORDER = os.path.join("watch", "flight_recorder.py")


def main() -> None:
    if sys.path[:1] == [os.path.dirname(os.path.abspath(__file__))]:
        del sys.path[0]  # first of all: files beside this one would shadow other modules
    hears_ctrl_c = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if hears_ctrl_c:  # until the script begins, Ctrl-C ends the rank without a traceback
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    _, report, launcher, number, kind, *argv = sys.argv
    _die_with(int(launcher))
    if int(number):
        _begin_recording(os.path.dirname(report), int(number))
    own_pid, error = os.getpid(), None
    try:
        if hears_ctrl_c:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        (_module if kind == "module" else _script)(argv)
    except BaseException as raised:
        error = raised
    if os.getpid() != own_pid:  # a fork of the script: it ends as Python ends it
        if error is not None:
            raise error
        return
    code = _write_report(report, error)
    error = None
    sys.exit(code)


def _die_with(parent: int) -> None:
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(1, 9)  # PR_SET_PDEATHSIG, SIGKILL
        if os.getppid() != parent:
            os._exit(1)


def _begin_recording(home: str, number: int) -> None:
    """Start the flight recorder. number: of the signal that asks where the rank hangs."""
    from importlib.util import module_from_spec, spec_from_file_location

    path = os.path.join(PACKAGE, RECORDER)
    spec = spec_from_file_location("samecurve_flight_recorder", path)
    assert spec is not None
    assert spec.loader is not None
    recorder = module_from_spec(spec)
    spec.loader.exec_module(recorder)
    recorder.begin(home, os.environ["RANK"], number)


def _new_main() -> "dict[str, Any]":
    """Make a new __main__. It stays until the process ends, for exit handlers and threads."""
    import builtins
    import types

    module = types.ModuleType("__main__")
    module.__dict__.update(__builtins__=builtins, __annotations__={})
    sys.modules["__main__"] = module
    return module.__dict__


def _script(argv: list[str]) -> None:
    import io
    from importlib.machinery import SourceFileLoader

    path, space = os.path.abspath(argv[0]), _new_main()
    sys.argv = argv
    if not getattr(sys.flags, "safe_path", False):
        sys.path.insert(0, os.path.dirname(os.path.realpath(path)))
    space.update(__file__=path, __cached__=None, __loader__=SourceFileLoader("__main__", path))
    with io.open_code(path) as file:
        source = file.read()
    exec(compile(source, path, "exec", dont_inherit=True), space)


def _module(argv: list[str]) -> None:
    import runpy

    _new_main()
    sys.argv = ["-m", *argv[1:]]
    if not getattr(sys.flags, "safe_path", False):
        sys.path.insert(0, os.getcwd())
    # the function that the interpreter itself calls for -m; it has no public name
    run_as_main = runpy._run_module_as_main  # type: ignore[attr-defined]  # noqa: SLF001
    run_as_main(argv[0])


def _write_report(path: str, error: BaseException | None) -> int:
    """Write how the script ended. Returns the exit code."""
    import json
    import time

    code, cause, trace, stderr = _describe(error)
    report = {
        "code": code,
        "exit_place": _exit_place(error),
        "cause": cause,
        "trace": trace,
        "stderr": stderr,
        "joined": _has_joined(),
        "torch": "torch" in sys.modules,
        "time": time.time(),
    }
    try:
        with open(f"{path}.part", "w") as file:
            json.dump(report, file)
        os.replace(f"{path}.part", path)
    except OSError:  # no room: print the error here, as without a launcher
        sys.stderr.write(stderr)
    return code


def _describe(error: BaseException | None) -> tuple[int, str, str, str]:
    """The exit code, the cause in a line, the traceback, and what Python would print on stderr."""
    if error is None:
        return 0, "", "", ""
    if isinstance(error, SystemExit):
        if error.code is None:
            return 0, "", "", ""
        if isinstance(error.code, int):
            return error.code & 0xFF, "", "", ""
        return 1, str(error.code), "", f"{error.code}\n"
    import traceback

    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename in {__file__, "<frozen runpy>"}:
        trace = trace.tb_next
    error.__traceback__ = trace
    text = "".join(traceback.format_exception(error))
    cause = "".join(traceback.format_exception_only(error)).strip()
    if isinstance(error, SyntaxError):
        cause = cause.splitlines()[-1]
    code = 130 if isinstance(error, KeyboardInterrupt) else 1
    return code, cause, text, _through_excepthook(error, text)


def _exit_place(error: BaseException | None) -> str:
    """The line of the script's own code that called sys.exit() with a number; '' if none did."""
    if not isinstance(error, SystemExit) or not isinstance(error.code, int) or not error.code:
        return ""
    import traceback

    frames = traceback.extract_tb(error.__traceback__)
    own = [each for each in frames if f"{os.sep}site-packages{os.sep}" not in each.filename]
    if not own or own[-1].filename == __file__:
        return ""
    return f"{own[-1].filename}:{own[-1].lineno}"


def _through_excepthook(error: BaseException, text: str) -> str:
    """The output of sys.excepthook, which the script or a library may have set."""
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


def _has_joined() -> bool:
    """Whether this process ever joined a group of processes, as far as its libraries can tell."""
    c10d = sys.modules.get("torch.distributed.distributed_c10d")
    if c10d is not None and (
        c10d.is_initialized()
        or getattr(c10d, "_default_pg_init_method", None) is not None
        or getattr(sys.excepthook, "__module__", "") == c10d.__name__
    ):
        return True  # the hook stays when the group is destroyed
    jax = sys.modules.get("jax._src.distributed")
    processes = getattr(getattr(jax, "global_state", None), "num_processes", 1)
    if processes not in {None, 1}:
        return True
    return "mpi4py.MPI" in sys.modules or "horovod" in sys.modules


if __name__ == "__main__":
    main()
