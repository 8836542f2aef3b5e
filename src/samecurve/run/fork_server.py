"""Processes that need an engine, forked from one that has imported it.

Importing torch takes 2 to 7 s of a processor. One process does so while the command still reads its
config and makes its plan; what describes the task, and the ranks, are forked from it within
milliseconds. It runs nothing of a user's and computes nothing: it forks only while it has a single
thread and no GPU driver. Otherwise, and elsewhere than on Linux, processes are started afresh.

A forked process is orphaned at once and adopted by the process that asked (its subreaper, for that
moment): it can be waited for and dies with it as one that it had started itself.
"""

import ctypes
import gc
import io
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from typing import IO

from samecurve.core.system.parent_death import die_with
from samecurve.probe.environment import child_environment, replace_environment

_SET_CHILD_SUBREAPER = 36  # of prctl
_LARGEST = 1 << 20  # bytes of a message
_ADOPTION = 0.0005  # seconds between two looks at who the parent is


@dataclass(frozen=True)
class Call:
    """What a forked process does."""

    function: str  # module:name, of strings
    arguments: Sequence[str]
    environment: Mapping[str, str]  # all of it
    new_session: bool  # leads a session and process group of its own

    @property
    def module(self) -> str:
        return self.function.partition(":")[0]


class ForkedProcess:
    """As subprocess.Popen, of a process that was adopted."""

    stdout: IO[bytes] | None = None
    stderr: IO[bytes] | None = None

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None  # negative: the signal that ended it

    def poll(self) -> int | None:
        """Its exit code; None: it lives."""
        return self._wait(os.WNOHANG)

    def wait(self) -> int:
        code = self._wait(0)
        assert code is not None
        return code

    def kill(self) -> None:
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)

    def _wait(self, options: int) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, options)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode


class ForkServer:
    """The process that has imported an engine, as the one that asks it sees it."""

    def __init__(self, modules: Sequence[str]) -> None:
        """modules: imported first, in this order. Returns at once."""
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        # numpy's threads would start as it is imported; a rank sets torch's own
        defaults = {"OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0", "PYTHONUNBUFFERED": "1"}
        with theirs:
            self._process = subprocess.Popen(
                [
                    *(sys.executable, "-m", __spec__.name),
                    *(str(theirs.fileno()), str(os.getpid()), *modules),
                ],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,  # what it can't import is said by whoever needs it
                pass_fds=[theirs.fileno()],
                env={**defaults, **child_environment()},
                start_new_session=True,  # Ctrl-C is for the one who asks
            )

    def close(self) -> None:
        self._socket.close()
        self._process.kill()
        self._process.wait()

    def preload(self, modules: Sequence[str]) -> None:
        """Import these too. A call waits for its own module and those asked for before it."""
        with suppress(OSError):  # it has ended: fork() says so
            self._socket.send(json.dumps({"modules": list(modules)}).encode())

    def fork(self, call: Call, stdio: Sequence[int]) -> ForkedProcess | None:
        """A process that makes a call, with these files as its input, output and errors.

        In the main thread: a death signal follows the thread that adopted the process.

        None: it can't be forked. What was asked has not begun.
        """
        prctl = ctypes.CDLL(None).prctl
        prctl(_SET_CHILD_SUBREAPER, 1)
        try:
            request = json.dumps({"call": asdict(call)}).encode()
            socket.send_fds(self._socket, [request], list(stdio))
            answer = self._socket.recv(_LARGEST)
        except OSError:
            return None
        finally:
            prctl(_SET_CHILD_SUBREAPER, 0)
        pid = int(answer or 0)  # nothing: it has ended
        return ForkedProcess(pid) if pid else None


def fork_server(modules: Sequence[str]) -> ForkServer | None:
    """None: this system has no such processes."""
    return ForkServer(modules) if sys.platform == "linux" else None


def main(descriptor: str, parent: str, *modules: str) -> None:
    """Import, and fork what is asked for, until the one who asks is gone."""
    die_with(int(parent))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    requests = socket.socket(fileno=int(descriptor))
    to_import = list(modules)
    while True:
        if to_import and not select.select([requests], [], [], 0)[0]:
            import_ahead(to_import.pop(0))
            continue
        message, stdio, _, _ = socket.recv_fds(requests, _LARGEST, 3)
        if not message:
            return
        request = json.loads(message)
        if "modules" in request:
            to_import += request["modules"]
            continue
        call = Call(**request["call"])
        while to_import and call.module not in sys.modules:
            import_ahead(to_import.pop(0))
        requests.send(str(_fork(call, stdio, requests)).encode())
        for file in stdio:
            os.close(file)


def import_ahead(module: str) -> None:
    with suppress(Exception):  # whoever needs it imports it again, and fails in its own place
        import_module(module)


def _is_clean() -> bool:
    """Whether a fork of this process is whole: threads would be missing, a driver broken."""
    threads = len(os.listdir("/proc/self/task"))
    return threads == 1 and "libcuda.so" not in Path("/proc/self/maps").read_text()


def _fork(call: Call, stdio: Sequence[int], requests: socket.socket) -> int:
    """The process id of what makes the call; 0: it can't be forked."""
    if not _is_clean():
        return 0
    gc.freeze()  # what is here already is never collected, nor its pages copied by looking at it
    reading, writing = os.pipe()
    middle = os.fork()
    if not middle:
        middle = os.getpid()
        if os.fork():
            os._exit(0)  # the orphan is adopted
        requests.close()
        os.close(reading)
        _run(call, stdio, middle, announce=writing)
    os.close(writing)
    os.waitpid(middle, 0)
    with open(reading, "rb") as announced:
        return int(announced.read() or 0)


def _open_streams() -> None:
    """Anew: those of the server know its own files, which can be sought in where a pipe can't."""
    sys.stdin = io.TextIOWrapper(io.BufferedReader(io.FileIO(0, closefd=False)))
    sys.stdout, sys.stderr = (
        io.TextIOWrapper(io.FileIO(number, "w", closefd=False), errors=errors, write_through=True)
        for number, errors in ((1, "strict"), (2, "backslashreplace"))
    )


def _run(call: Call, stdio: Sequence[int], middle: int, *, announce: int) -> None:
    """Make the call in this process, and end."""
    code = 1
    try:
        if call.new_session:
            os.setsid()
        for number, file in enumerate(stdio):
            os.dup2(file, number)
            os.close(file)
        _open_streams()
        os.write(announce, str(os.getpid()).encode())
        os.close(announce)
        while os.getppid() == middle:
            time.sleep(_ADOPTION)
        replace_environment(call.environment)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        name = call.function.partition(":")[2]
        getattr(import_module(call.module), name)(*call.arguments)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        with suppress(OSError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    main(*sys.argv[1:])
