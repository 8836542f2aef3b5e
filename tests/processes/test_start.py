"""Processes of calls, forked from one that has imported what they need, or started afresh."""

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from commands import until
from samecurve.processes import Call, ForkedProcess, ForkServer, child_environment

CHILD = """
import os, sys, time

assert "colorsys" in sys.modules

def say(name, code):
    print(name, os.environ["GREETING"], os.getpid() == os.getsid(0), len(os.environ), flush=True)
    print("to stderr", file=sys.stderr)
    os._exit(int(code))

def wait():
    time.sleep(60)

def fail():
    raise ValueError("by itself")
"""


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ForkServer]:
    (tmp_path / "child.py").write_text(CHILD)
    (tmp_path / "threaded.py").write_text(
        "import threading, time\n"
        "threading.Thread(target=time.sleep, args=(9,), daemon=True).start()\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    server = ForkServer(["colorsys", "no.such.module"])
    yield server
    server.close()


@contextmanager
def forked(server: ForkServer, call: Call) -> Iterator[tuple[ForkedProcess | None, list[str]]]:
    """The process, and what it has printed once the block has waited for it."""
    lines: list[str] = []
    with tempfile.TemporaryFile("w+") as output:
        process = server.fork(call, (0, output.fileno(), output.fileno()))
        yield process, lines
        output.seek(0)
        lines += output.read().splitlines()


def a_call(function: str, *arguments: str, new_session: bool = True) -> Call:
    environment = {"GREETING": "hello"}
    return Call("child", arguments, function, environment, new_session=new_session)


def test_a_forked_process_is_as_one_started(server: ForkServer) -> None:
    """What was imported is there; environment, session, files and exit code are its own."""
    with forked(server, a_call("say", "world", "7")) as (process, lines):
        assert process
        assert psutil.Process(process.pid).ppid() == os.getpid()
        assert process.wait() == 7
        assert process.poll() == 7
    assert lines == ["world hello True 1", "to stderr"]
    with forked(server, a_call("fail", new_session=False)) as (process, lines):
        assert process
        assert process.wait() == 1
    assert lines[-1] == "ValueError: by itself"
    with forked(server, a_call("wait")) as (process, _):
        assert process
        assert process.poll() is None
        process.kill()
        assert process.wait() == -signal.SIGKILL


def test_what_can_not_be_forked_whole_is_not_forked(server: ForkServer) -> None:
    """A thread would be missing in it. Nor is there anything once the server is gone."""
    process = server.fork(a_call("say", "world", "0"), (0, 1, 2))
    assert process
    assert process.wait() == 0
    server.preload(["threaded"])
    assert server.fork(a_call("say", "world", "0"), (0, 1, 2)) is None
    server.close()
    assert server.fork(a_call("say", "world", "0"), (0, 1, 2)) is None


DYING = """
import sys
from samecurve.processes import Call, ForkServer, start_process

server = ForkServer(["colorsys"])
stranger = Call("grandchild", (), "wait", new_session=True, parent=1)
assert start_process(stranger, server=server).wait() == 1  # it is no child of that one
call = Call("grandchild", (), "wait", new_session=True)
forked, afresh = start_process(call, server=server), start_process(call)
print(server._process.pid, forked.pid, afresh.pid, flush=True)
sys.stdin.read()
"""


def test_all_of_them_end_with_the_one_that_asked(tmp_path: Path) -> None:
    (tmp_path / "grandchild.py").write_text(
        "import os, time\n\ndef wait():\n    open(str(os.getpid()), 'w')\n    time.sleep(60)\n"
    )
    asker = subprocess.Popen(
        [sys.executable, "-c", DYING],
        cwd=tmp_path,
        env=child_environment(PYTHONPATH=str(tmp_path)),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    with asker:
        assert asker.stdout
        pids = [int(pid) for pid in asker.stdout.readline().split()]
        assert len(pids) == 3
        until(lambda: all((tmp_path / str(pid)).exists() for pid in pids[1:]))
        assert all(psutil.pid_exists(pid) for pid in pids)
        asker.kill()
    until(lambda: not any(psutil.pid_exists(pid) for pid in pids), 10)
