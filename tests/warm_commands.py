"""Commands of the program, and its fork servers, without the import of torch.

A command imports torch twice, in its own process and in its fork server: 4 s of a processor, more
than most tests then compute. So one process of the session, the template, imports the libraries.
Every command of `commands.samecurve` is forked from the template, and so is every fork server
that the test process starts. A command's own fork server is forked from the command. All of them
are processes as an ordinary start makes them: with a pid, an environment, a directory, streams and
an exit code of their own. Tests of starting, signals and kills start commands afresh.
"""

import os
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

from samecurve import processes
from samecurve.cli.main import main
from samecurve.core.config.sections import Config
from samecurve.processes import (
    OUTLIVES,
    Call,
    ForkedProcess,
    ForkServer,
    child_environment,
    end_with,
    replace_environment,
)
from samecurve.processes import server as server_process
from samecurve.run import describe

# A command waits until the last of these modules is imported, this one.
MODULES = (
    *("torch", "samecurve.tasks.adapter.torch_adapter", "samecurve.run.describe"),
    *("samecurve.torch_engine.engine", "numpy.ma"),
    *(
        "transformers.modeling_utils",
        "peft",
        "samecurve.worker.rank_main",
        "samecurve.launch.local",
    ),
    *("samecurve.run.prepare", "samecurve.cli.train", "samecurve.launch.pool", __name__),
)
_SERVER = {"OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0", "PYTHONUNBUFFERED": "1"}
_HERE = str(Path(__file__).parent)


class Live(NamedTuple):
    """A live command, and what waits for its end."""

    pid: int
    end: Callable[[], subprocess.CompletedProcess[str]]


class Template:
    """The process from which others are forked."""

    def __init__(self) -> None:
        path = os.pathsep.join([_HERE, os.environ.get("PYTHONPATH", "")])
        with patch.dict(os.environ, PYTHONPATH=path):
            self._server = ForkServer(MODULES)

    def close(self) -> None:
        self._server.close()

    def start(self, call: Call, stdio: Sequence[int]) -> ForkedProcess:
        process = self._server.fork(call, stdio)
        assert process, "the template has threads: one of its modules starts them"
        return process

    def run(
        self, command: Sequence[str], cwd: Path, timeout: float
    ) -> subprocess.CompletedProcess[str]:
        """Run a command of the program to its end. command: without `samecurve`."""
        with self.running(command, cwd, timeout) as live:
            return live.end()

    @contextmanager
    def running(self, command: Sequence[str], cwd: Path, timeout: float) -> Iterator[Live]:
        """A live command, ended with the block."""
        call = Call(__name__, (str(cwd), *command), "run", ended_by=OUTLIVES)
        with (
            open(os.devnull, "rb") as nothing,
            tempfile.TemporaryFile("w+") as out,
            tempfile.TemporaryFile("w+") as err,
        ):
            process = self.start(call, (nothing.fileno(), out.fileno(), err.fileno()))

            def end() -> subprocess.CompletedProcess[str]:
                _wait(process, command, timeout)
                code = process.wait()
                out.seek(0)
                err.seek(0)
                return subprocess.CompletedProcess(command, code, out.read(), err.read())

            try:
                yield Live(process.pid, end)
            finally:
                process.kill()
                process.wait()


@cache
def template() -> Template:
    """The session's template, started with the first command."""
    return Template()


def _wait(process: ForkedProcess, command: Sequence[str], timeout: float) -> None:
    """subprocess.TimeoutExpired: the process still runs."""
    ended = os.pidfd_open(process.pid)
    try:
        with selectors.DefaultSelector() as selector:
            selector.register(ended, selectors.EVENT_READ)
            if not selector.select(timeout):
                raise subprocess.TimeoutExpired(command, timeout)
    finally:
        os.close(ended)


class ServerOfTemplate(ForkServer):
    """A fork server of the test process, forked from the template."""

    def __init__(self, modules: Sequence[str]) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        environment = {**_SERVER, **child_environment()}
        call = Call(__name__, (os.getcwd(), *modules), "serve", environment, new_session=True)
        with theirs, open(os.devnull, "wb") as nothing:
            stdio = (theirs.fileno(), nothing.fileno(), nothing.fileno())
            self._process = template().start(call, stdio)


def serve(cwd: str, *modules: str) -> None:
    """Be a fork server of the test process, whose socket is this process's standard input."""
    _enter(cwd)
    server_process.main("0", *modules)


def _enter(cwd: str) -> None:
    """Be in a directory as if `python -P -m` had been called there."""
    os.chdir(cwd)
    given = list(filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep)))
    rest = [place for place in sys.path if place != _HERE and place not in given]
    sys.path[:] = [*given, *rest]


class ServerOfCommand(ForkServer):
    """The fork server of a command, forked from the command before it has a second thread."""

    def __init__(self, modules: Sequence[str]) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command, environment = os.getpid(), {**_SERVER, **child_environment()}
        with theirs:
            pid = os.fork()
            if not pid:
                _serve(theirs.detach(), command, environment, modules)
        self._process = ForkedProcess(pid)


def _serve(
    requests: int, command: int, environment: dict[str, str], modules: Sequence[str]
) -> None:
    """Be the fork server, in the state of a process that was started afresh."""
    try:
        os.setsid()
        os.dup2(requests, 3)
        nothing = os.open(os.devnull, os.O_RDWR)
        # The numbers of the command's files stay taken: objects of the command are forked with it,
        # and one that is collected here would close a file of this process.
        for number in map(int, os.listdir("/proc/self/fd")):
            if number not in {3, nothing}:
                with suppress(OSError):  # of the listing itself
                    os.fstat(number)
                    os.dup2(nothing, number)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        replace_environment(environment)
        end_with(command)
        server_process.main("3", *modules)
    finally:
        os._exit(0)


@contextmanager
def warm_servers() -> Iterator[None]:
    """Within the block, fork servers and describing processes are forked from the template.

    Elsewhere than on Linux all processes are started afresh.
    """
    if sys.platform != "linux":
        yield
        return
    described = partial(_described, describe._in_subprocess, ServerOfTemplate)
    try:
        with (
            patch.object(processes, "ForkServer", ServerOfTemplate),
            patch.object(describe, "_in_subprocess", described),
        ):
            yield
    finally:
        if template.cache_info().currsize:
            template().close()


def _described(
    describe_task: Callable[..., Any],
    start: Callable[[Sequence[str]], ForkServer],
    config: Config,
    cache_home: Path,
    server: ForkServer | None,
) -> Any:
    """Describe a task as describe_task does, without a start afresh. start: starts a server."""
    if server:
        return describe_task(config, cache_home, server)
    own = start(())
    try:
        return describe_task(config, cache_home, own)
    finally:
        own.close()


def run(cwd: str, *command: str) -> None:
    """Be `python -m samecurve` in the directory: the call of a process forked from the template."""
    _enter(cwd)
    sys.argv = ["samecurve", *command]
    processes.ForkServer = ServerOfCommand  # type: ignore[misc]
    describe._in_subprocess = partial(_described, describe._in_subprocess, ServerOfCommand)
    code: object = 1
    try:
        main()
        code = 0
    except SystemExit as leaving:
        code = leaving.code
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code if isinstance(code, int) else 0 if code is None else 1)
