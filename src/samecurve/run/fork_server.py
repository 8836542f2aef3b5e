"""A server that imports an engine once, and forks the processes that need it.

Importing torch takes 2 to 7 s of a processor. The server does so while the command still reads its
config and makes its plan. The process that describes the task, and the ranks, are then forked from
the server within milliseconds. The server runs no code of a user's and computes nothing: it forks
only while it has a single thread and no GPU driver. Otherwise, and elsewhere than on Linux,
processes are started afresh.

A forked process is orphaned at once and adopted by the process that asked (its subreaper, for that
moment). So the asker can wait for the process, and the process dies with the asker, like a child
that the asker started itself. multiprocessing's forkserver has neither: its children keep their
server alive after a SIGKILL of the asker, and it can't import more modules once it serves.

WarmStart holds the early imports of one command. A single rank trains in the process of the
command, which imports the engine in a thread.
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
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from types import TracebackType
from typing import IO, TYPE_CHECKING

from samecurve.core.system.child_process import child_environment, die_with, python_module
from samecurve.errors import Interrupted
from samecurve.probe import replace_environment
from samecurve.terminal import unbuffered

if TYPE_CHECKING:  # importing it takes as long as beginning
    from samecurve.core.planning.layout import Layout

_FIRST = ("torch", "samecurve.tasks.adapter.torch_adapter")
_ENGINE = "samecurve.torch_engine.engine"
# a call waits for its own module, and so for all modules before it
_DESCRIBES, _TRAINS = "samecurve.run.describe", "samecurve.worker.rank_main"
# of a command that is one rank of several; the last of them is called
_COMMAND = ("samecurve.launch.external", "samecurve.cli.train", "samecurve.cli.entry")


class WarmStart:
    """The early imports of one command. Their process ends with the block."""

    def __init__(self) -> None:
        self.server: ForkServer | None = None
        self._imports: threading.Thread | None = None  # imports in this process

    def __enter__(self) -> "WarmStart":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()
        # else an interpreter that ends meanwhile prints the thread's traceback; an interrupted
        # command doesn't wait for its interpreter to end
        if self._imports and not isinstance(error, Interrupted):
            self._imports.join()

    def begin(self) -> None:
        """Begin to import torch. To be stopped where another engine is wanted."""
        self.server = fork_server(_FIRST)

    def stop(self) -> None:
        if self.server:
            self.server.close()
        self.server = None

    def expect(self, layout: "Layout", libraries: Sequence[str], *, may_grow: bool = False) -> None:
        """Import what the layout needs, and `libraries`, modules that the task imports.

        may_grow: whether the plan may take several ranks where the layout has one
        """
        if self.server is None:
            return
        described = (*libraries, _DESCRIBES)
        if layout.is_one_process:
            if may_grow:
                described = (*described, _ENGINE, "numpy.ma", "torch._dynamo", _TRAINS)
            self.server.preload(described)
            # without the libraries: transformers can't be imported by two threads at once
            self._imports = threading.Thread(target=import_ahead, args=(_ENGINE,), name="imports")
            self._imports.start()
            return
        # torch's wrapper of a model on several ranks imports these modules, and the first np.unique
        # imports numpy's masked arrays
        wrapper = "torch.distributed.fsdp" if layout.shards > 1 else "torch._dynamo"
        self.server.preload((*described, _ENGINE, "numpy.ma", wrapper, _TRAINS))

    def wait_for_imports(self) -> None:
        """Wait for what is imported in this process: two threads can't import torch at once."""
        if self._imports:
            self._imports.join()

    def expect_command(self, libraries: Sequence[str]) -> None:
        """Import what commands need that train as ranks of any strategy.

        libraries: modules that the task imports
        """
        if self.server is None:
            return
        engine = (*libraries, _DESCRIBES, _ENGINE, "numpy.ma", "torch._dynamo", _TRAINS)
        self.server.preload((*engine, *_COMMAND, "torch.distributed.fsdp"))

    def wait_for_command(self) -> None:
        """Wait until a command of expect_command() can start at once."""
        if self.server:
            self.server.wait(_COMMAND[-1])


_SET_CHILD_SUBREAPER = 36  # of prctl
_LARGEST = 1 << 20  # bytes of a message
_ADOPTION = 0.0005  # seconds between two looks at who the parent is


@dataclass(frozen=True)
class Call:
    """The call that a forked process makes."""

    function: str  # module:name; takes strings
    arguments: Sequence[str]
    environment: Mapping[str, str]  # the whole environment
    new_session: bool  # the process leads a session and process group of its own

    @property
    def module(self) -> str:
        return self.function.partition(":")[0]


class ForkedProcess:
    """An adopted process, with the methods of subprocess.Popen."""

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
    """The server, as the process that asks it sees it."""

    def __init__(self, modules: Sequence[str]) -> None:
        """Start the server, without waiting. modules: imported first, in this order."""
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        # numpy would start threads when it is imported; a rank sets torch's threads itself
        defaults = {"OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0", "PYTHONUNBUFFERED": "1"}
        with theirs:
            self._process = subprocess.Popen(
                python_module(__spec__.name, str(theirs.fileno()), str(os.getpid()), *modules),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,  # a failed import is reported where it is needed
                pass_fds=[theirs.fileno()],
                env={**defaults, **child_environment()},
                start_new_session=True,  # Ctrl-C is for the process that asks
            )

    def close(self) -> None:
        self._socket.close()
        self._process.kill()
        self._process.wait()

    def preload(self, modules: Sequence[str]) -> None:
        """Import more modules. A call waits for its own module, and for all modules before it."""
        with suppress(OSError):  # the server has ended: fork() says so
            self._socket.send(json.dumps({"modules": list(modules)}).encode())

    def wait(self, module: str) -> None:
        """Wait until a module is imported, and all before it, or the server has ended."""
        with suppress(OSError):
            self._socket.send(json.dumps({"wait": module}).encode())
            self._socket.recv(_LARGEST)

    def fork(self, call: Call, stdio: Sequence[int]) -> ForkedProcess | None:
        """Fork a process that makes a call. stdio: its input, output and errors.

        To be called in the main thread: the process dies with the thread that adopted it.

        None: the server can't fork, and the call has not begun.
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
        pid = int(answer or 0)  # no answer: the server has ended
        return ForkedProcess(pid) if pid else None


def fork_server(modules: Sequence[str]) -> ForkServer | None:
    """Start a server; None: this system has none."""
    return ForkServer(modules) if sys.platform == "linux" else None


def main(descriptor: str, parent: str, *modules: str) -> None:
    """Be the server: import modules and fork processes, until the process that asks is gone."""
    die_with(int(parent))
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
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
        call = Call(**request["call"]) if "call" in request else None
        module = call.module if call else request["wait"]
        while to_import and module not in sys.modules:
            import_ahead(to_import.pop(0))
        if call is None:
            requests.send(b"imported")
            continue
        requests.send(str(_fork(call, stdio, requests)).encode())
        for file in stdio:
            os.close(file)


def import_ahead(module: str) -> None:
    """Import a module that will be needed. The place that needs it reports a failure."""
    with suppress(Exception):
        import_module(module)


def _is_clean() -> bool:
    """Whether this process can be forked: threads would be missing, and a GPU driver broken."""
    threads = len(os.listdir("/proc/self/task"))
    return threads == 1 and "libcuda.so" not in Path("/proc/self/maps").read_text()


def _fork(call: Call, stdio: Sequence[int], requests: socket.socket) -> int:
    """Fork a process that makes the call. Returns its process id; 0: this process can't fork."""
    if not _is_clean():
        return 0
    gc.freeze()  # else the garbage collector of the child would touch and so copy all pages
    reading, writing = os.pipe()
    middle = os.fork()
    if not middle:
        middle = os.getpid()
        if os.fork():
            os._exit(0)  # makes the child an orphan, which is adopted
        requests.close()
        os.close(reading)
        _run(call, stdio, middle, announce=writing)
    os.close(writing)
    os.waitpid(middle, 0)
    with open(reading, "rb") as announced:
        return int(announced.read() or 0)


def _open_streams() -> None:
    """Open sys.stdin, stdout and stderr anew: the server's know the server's files."""
    sys.stdin = io.TextIOWrapper(io.BufferedReader(io.FileIO(0, closefd=False)))
    sys.stdout, sys.stderr = unbuffered(1, "strict"), unbuffered(2, "backslashreplace")


def _run(call: Call, stdio: Sequence[int], middle: int, *, announce: int) -> None:
    """Make the call in this process, and exit."""
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
