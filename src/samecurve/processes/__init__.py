"""Processes: start them, wait for them, end them.

start() starts a function of ours (a Call), start_program() any program, and output_of() runs a
program to its end. A ForkServer forks calls from a process that has imported what they need
(server.py). orphan_guard.py kills process groups when this process is gone.

A child of Python finds modules where the command `samecurve` finds them: on PYTHONPATH and where
packages are installed. It never searches the working directory, which may be a run that somebody
else made: a file `random.py` or `samecurve/__init__.py` there would be executed, or would break the
child. A task's file still imports what lies beside it (tasks/user_class/load_class.py).

No other room starts a process; tests/test_python_children.py looks for it.
"""

import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from importlib import import_module
from pathlib import Path
from typing import IO, Any, Protocol, TypedDict, Unpack

OUTLIVES = 0  # the process goes on when the process that asked for it has ended
_SOON, _LATER = 0.002, 0.05  # seconds between two looks at processes that are about to end
_SET_CHILD_SUBREAPER = 36  # of prctl
LARGEST = 1 << 20  # bytes of a message to the server


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


def replace_environment(environment: Mapping[str, str]) -> None:
    """Give this process another environment, as if it had been started with it."""
    os.environ.clear()
    os.environ.update(environment)


@dataclass(frozen=True)
class Call:
    """A function that a process of its own runs: `module.function(*arguments)`.

    The module is imported in the new process alone: the one that asks needs neither torch nor a
    user's file.
    """

    module: str
    arguments: Sequence[str] = ()
    function: str = "main"  # what it returns is the exit code; None: 0
    environment: Mapping[str, str] | None = None  # the whole environment; None: as here
    new_session: bool = False  # leads a session and process group of its own: no Ctrl-C reaches it
    ended_by: int = signal.SIGKILL  # the signal when this process ends, even by kill -9; OUTLIVES
    unbuffered: bool = False  # its output comes at once
    parent: int = field(default_factory=os.getpid)

    @property
    def command(self) -> list[str]:
        """The command line of the process, where it is started and not forked."""
        end = (str(self.parent), str(int(self.ended_by)))
        words = (self.module, self.function, *end, *self.arguments)
        return python_module(__name__, *words, unbuffered=self.unbuffered)

    def make(self) -> Any:
        """Make the call in this process, and return what the function returns."""
        if self.ended_by:
            end_with(self.parent, self.ended_by)
        return getattr(import_module(self.module), self.function)(*self.arguments)


def end_with(parent: int, by: int = signal.SIGKILL) -> None:
    """Have the system end this process when its parent ends. Linux only; elsewhere it goes on."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, by)  # PR_SET_PDEATHSIG
        if os.getppid() != parent:
            os._exit(1)


class Files(TypedDict, total=False):
    """The files of a process, as subprocess.Popen takes them."""

    stdin: int | None
    stdout: int | None
    stderr: int | None
    pass_fds: Collection[int]
    cwd: Path | None


class Process(Protocol):
    """A child of this process, with the methods of subprocess.Popen."""

    @property
    def pid(self) -> int: ...
    @property
    def stdin(self) -> IO[bytes] | None: ...
    @property
    def stdout(self) -> IO[bytes] | None: ...
    @property
    def stderr(self) -> IO[bytes] | None: ...
    @property
    def returncode(self) -> int | None: ...  # negative for a signal
    def poll(self) -> int | None: ...
    def wait(self) -> int: ...
    def send_signal(self, sig: int) -> None: ...
    def kill(self) -> None: ...


def start_process(
    call: Call, *, server: "ForkServer | None" = None, **files: Unpack[Files]
) -> Process:
    """Start a process that makes the call.

    The process ends with the thread that starts it, unless the call outlives this process.

    server: forks the process, where it can and no pipe is wanted; not beside `cwd` and `pass_fds`
    """
    streams = (files.get("stdin"), files.get("stdout"), files.get("stderr"))
    if server and subprocess.PIPE not in streams and (forked := server.fork(call, streams)):
        return forked
    return start_program(
        call.command, environment=call.environment, new_session=call.new_session, **files
    )


def start_program(
    words: Sequence[str],
    *,
    environment: Mapping[str, str] | None = None,
    new_session: bool = False,
    **files: Unpack[Files],
) -> "subprocess.Popen[bytes]":
    """Start a program. OSError: there is no such program, or it can't be started.

    environment: the whole environment; None: as here
    new_session: the process leads a session and process group of its own
    """
    return subprocess.Popen(words, env=environment, start_new_session=new_session, **files)


def output_of(
    words: Sequence[str],
    *,
    environment: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    seconds: float | None = None,
) -> "subprocess.CompletedProcess[str]":
    """Run a program to its end, with nothing to read. Returns its exit code and what it printed.

    OSError: there is no such program. TimeoutError: it took longer than `seconds`.
    """
    try:
        return subprocess.run(
            words,
            env=environment,
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="backslashreplace",
            timeout=seconds,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise TimeoutError(f"{words[0]} took more than {seconds:g} s") from error


def wait_for(processes: Collection[Process], seconds: float) -> bool:
    """Wait until all these processes have ended. False: some live on after so many seconds."""
    until, pause = time.monotonic() + seconds, _SOON
    while any(process.poll() is None for process in processes):
        if time.monotonic() > until:
            return False
        time.sleep(pause)
        pause = min(2 * pause, _LATER)
    return True


def signal_group(group: int, number: int = signal.SIGKILL) -> None:
    """Send a signal to a process group, that is to a session's leader and what it has started."""
    with suppress(ProcessLookupError, PermissionError):  # all of them have ended
        os.killpg(group, number)


def how_ended(code: int) -> str:
    """How a process ended, in words: SIGKILL, or exit code 3. code: negative for a signal"""
    return signal.Signals(-code).name if code < 0 else f"exit code {code}"


class ForkedProcess:
    """An adopted process, with the methods of subprocess.Popen."""

    stdin: IO[bytes] | None = None
    stdout: IO[bytes] | None = None
    stderr: IO[bytes] | None = None

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None  # negative: the signal that ended it

    def poll(self) -> int | None:
        """The exit code; None: the process lives."""
        return self._wait(os.WNOHANG)

    def wait(self) -> int:
        code = self._wait(0)
        assert code is not None
        return code

    def send_signal(self, sig: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, sig)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def _wait(self, options: int) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, options)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode


class ForkServer:
    """A process that imports what others need, and forks them (processes/server.py)."""

    def __init__(self, modules: Sequence[str]) -> None:
        """Start the server, without waiting. modules: imported first, in this order."""
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        # numpy would start threads when it is imported; a rank sets torch's threads itself
        defaults = {"OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0", "PYTHONUNBUFFERED": "1"}
        with theirs:
            self._process: Process = start_program(
                Call("samecurve.processes.server", (str(theirs.fileno()), *modules)).command,
                environment={**defaults, **child_environment()},
                new_session=True,  # Ctrl-C is for the process that asks
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,  # a failed import is reported where it is needed
                pass_fds=[theirs.fileno()],
            )

    def close(self) -> None:
        self._socket.close()
        self._process.kill()
        self._process.wait()

    def preload(self, modules: Sequence[str]) -> None:
        """Import more modules, each once. A call waits for its own, and for all before it."""
        with suppress(OSError):  # the server has ended: fork() says so
            self._socket.send(json.dumps({"modules": list(modules)}).encode())

    def wait(self, module: str) -> None:
        """Wait until a module is imported, and all before it, or the server has ended."""
        with suppress(OSError):
            self._socket.send(json.dumps({"wait": module}).encode())
            self._socket.recv(LARGEST)

    def fork(self, call: Call, stdio: Sequence[int | None]) -> ForkedProcess | None:
        """Fork a process that makes a call.

        stdio: its input, output and errors: a descriptor, DEVNULL, or None for this process's own

        To be called in the main thread: the process dies with the thread that adopted it.

        None: the server can't fork, and the call has not begun.
        """
        if call.environment is None:
            call = replace(call, environment=child_environment())
        request = json.dumps({"call": asdict(call)}).encode()
        prctl = ctypes.CDLL(None).prctl
        prctl(_SET_CHILD_SUBREAPER, 1)
        try:
            with open(os.devnull, "r+b", buffering=0) as nothing:
                files = {None: None, subprocess.DEVNULL: nothing.fileno()}
                opened = [files.get(file, file) for file in stdio]
                numbers = [own if file is None else file for own, file in enumerate(opened)]
                socket.send_fds(self._socket, [request], numbers)
            answer = self._socket.recv(LARGEST)
        except OSError:
            return None
        finally:
            prctl(_SET_CHILD_SUBREAPER, 0)
        pid = int(answer or 0)  # no answer: the server has ended
        return ForkedProcess(pid) if pid else None


def fork_server(modules: Sequence[str]) -> ForkServer | None:
    """Start a server; None: this system has none."""
    return ForkServer(modules) if sys.platform == "linux" else None


def import_ahead(module: str) -> None:
    """Import a module that will be needed. The place that needs it reports a failure."""
    with suppress(Exception):
        import_module(module)
