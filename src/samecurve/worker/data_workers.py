"""Starts the data workers of a rank: one process opens the task, then forks them, so that what its
data holds in memory is held once.
"""

import faulthandler
import json
import os
import signal
import subprocess
import sys
import warnings
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from samecurve.core.config.document import Document
from samecurve.core.config.sections import Config, load
from samecurve.data.workers import Line, Workers, line, serve
from samecurve.system import cache_home, die_with
from samecurve.tasks import Tasks, open_task
from samecurve.worker.hang_responder import ASK


class Readers:
    """The data workers of one rank. They may be asked at once, and answer when they are ready."""

    def __init__(self, config: Config, count: int, stacks: Path) -> None:
        """stacks: the file that workers write their stacks to when they are asked where they are."""
        pairs = [line() for _ in range(count)]
        theirs = [mine for _, mine in pairs]
        status, tell = os.pipe()
        fds = [(each.jobs.fileno(), each.rows.fileno()) for each in theirs]
        self._process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "samecurve.worker.data_workers",
                json.dumps(
                    {"parent": os.getpid(), "tell": tell, "lines": fds, "stacks": str(stacks)}
                ),
            ],
            stdin=subprocess.PIPE,
            pass_fds=[tell, *(fd for pair in fds for fd in pair)],
            env={
                **os.environ,
                "OMP_NUM_THREADS": "1",
                "JAX_PLATFORMS": "cpu",
                "CUDA_VISIBLE_DEVICES": "",
            },
        )
        os.close(tell)
        for each in theirs:
            _close(each)
        assert self._process.stdin is not None
        with suppress(BrokenPipeError), self._process.stdin as config_text:
            config_text.write(config.model_dump_json().encode())
        self._status = Connection(status, writable=False)
        self.workers = Workers([asker for asker, _ in pairs], self._ended)

    def _ended(self, seconds: float) -> tuple[int, int] | None:
        if not self._status.poll(seconds):
            return None
        try:
            found: tuple[int, int] = self._status.recv()
        except EOFError:  # nobody is left who could say
            return None
        return found

    def kill(self) -> None:
        """Not waiting for what they read. Whoever waits for it learns that they are gone."""
        self._process.kill()
        self._process.wait()


def _close(ends: Line) -> None:
    ends.jobs.close()
    ends.rows.close()


def main(argument: str) -> None:
    """Open the task, fork, and say how a worker ended if one did."""
    given: dict[str, Any] = json.loads(argument)
    die_with(given["parent"])
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the launcher owns signals
    os.dup2(2, 1)  # what a user's file prints is no journal line
    config = load(Document(json.loads(sys.stdin.read())), Tasks()).config
    task = open_task(config, str(cache_home()))
    sources = [task.train_data(), task.eval_data()]
    lines = [
        Line(Connection(jobs, writable=False), Connection(rows, readable=False))
        for jobs, rows in given["lines"]
    ]
    warnings.filterwarnings(
        "ignore", message=r"os\.fork\(\)|.*use of fork\(\)"
    )  # of threads that no worker uses
    with suppress(OSError):  # a full disk: then they can't say where they hang
        faulthandler.register(ASK, file=open(given["stacks"], "a"), all_threads=True)  # noqa: SIM115 - held as long as the processes live
    pids = [_fork(sources, lines, index, given["tell"]) for index in range(len(lines))]
    for each in lines:
        _close(each)
    while pids:
        pid, status = os.wait()
        code = os.waitstatus_to_exitcode(status)
        if code:
            Connection(given["tell"], readable=False).send((pids.index(pid), code))
            os._exit(1)  # the others go with this one
        pids[pids.index(pid)] = 0
        if not any(pids):
            return


def _fork(sources: Sequence[Any], lines: Sequence[Line], index: int, tell: int) -> int:
    parent = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    try:
        die_with(parent)
        os.close(tell)
        for other, each in enumerate(lines):
            if other != index:
                _close(each)
        serve(sources, lines[index])
        os._exit(0)
    except BaseException as error:
        print(f"data worker {index}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
        os._exit(1)


if __name__ == "__main__":
    main(sys.argv[1])
