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
"""

import gc
import io
import json
import os
import select
import signal
import socket
import sys
import time
import traceback
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from samecurve.processes import LARGEST, Call, import_ahead, replace_environment
from samecurve.terminal import unbuffered

_ADOPTION = 0.0005  # seconds between two looks at who the parent is


def main(descriptor: str, *modules: str) -> None:
    """Be the server: import modules and fork processes, until the process that asks is gone."""
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    requests = socket.socket(fileno=int(descriptor))
    to_import, asked = list(modules), set(modules)
    while True:
        if to_import and not select.select([requests], [], [], 0)[0]:
            import_ahead(to_import.pop(0))
            continue
        message, stdio, _, _ = socket.recv_fds(requests, LARGEST, 3)
        if not message:
            return
        request = json.loads(message)
        if "modules" in request:
            to_import += [module for module in request["modules"] if module not in asked]
            asked.update(request["modules"])
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
        assert call.environment is not None  # the asker's own
        replace_environment(call.environment)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        code = call.make() or 0
    except SystemExit as leaving:
        code = leaving.code if isinstance(leaving.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        with suppress(OSError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)
