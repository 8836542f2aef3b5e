"""The data workers of a rank. One process opens the task and then forks the workers, so that they
share the memory that the task's data holds.
"""

import faulthandler
import json
import os
import signal
import sys
import warnings
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from subprocess import PIPE
from typing import Any

from samecurve.core.config.document import Document
from samecurve.core.config.loading import load_of_run
from samecurve.core.config.sections import Config
from samecurve.core.system.cache import cache_home
from samecurve.data import held_out_data
from samecurve.data.workers import Line, Workers, line, serve
from samecurve.processes import Call, child_environment, end_with, start_process
from samecurve.tasks import Tasks, open_task
from samecurve.watch import ASK_SIGNAL


class DataWorkers:
    """The data workers of one rank. They take requests at once, and answer when they are ready."""

    def __init__(
        self, config: Config, count: int, stacks: Path, evaluate: str | None = None
    ) -> None:
        """stacks: the file for the workers' stacks, which the hang watch asks for.

        evaluate: as held_out_data()
        """
        pairs = [line() for _ in range(count)]
        theirs = [each for _, each in pairs]
        status, status_writer = os.pipe()
        fds = [(each.jobs.fileno(), each.rows.fileno(), each.shared) for each in theirs]
        argument = {
            "status": status_writer,
            "lines": fds,
            "stacks": str(stacks),
            "evaluate": evaluate,
        }
        environment = child_environment(
            OMP_NUM_THREADS="1", JAX_PLATFORMS="cpu", CUDA_VISIBLE_DEVICES=""
        )
        self._process = start_process(
            Call(__name__, (json.dumps(argument),), environment=environment),
            stdin=PIPE,
            pass_fds=[status_writer, *(fd for of_line in fds for fd in of_line)],
        )
        os.close(status_writer)
        for each in theirs:
            each.close()
        assert self._process.stdin is not None
        with suppress(BrokenPipeError), self._process.stdin as config_text:
            config_text.write(config.model_dump_json().encode())
        self._status = Connection(status, writable=False)
        self.workers = Workers([asker for asker, _ in pairs], self._ended)

    def _ended(self, seconds: float) -> tuple[int, int] | None:
        """Wait for a worker to end. Returns the worker and its exit code; None: none has ended."""
        if not self._status.poll(seconds):
            return None
        try:
            worker, code = self._status.recv()
        except EOFError:  # the process that would say so is gone
            return None
        return worker, code

    def kill(self) -> None:
        """Kill the workers, whatever they read. A reader that waits learns that they are gone."""
        self._process.kill()
        self._process.wait()


def main(argument: str) -> None:
    """Open the task, fork the workers, and report a worker that failed."""
    values: dict[str, Any] = json.loads(argument)
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # the launcher owns signals
    os.dup2(2, 1)  # what a user's file prints is no journal line
    config = load_of_run(Document(json.loads(sys.stdin.read())), Tasks()).config
    task = open_task(config, str(cache_home()))
    held_out = held_out_data(task, values["evaluate"])
    sources = [task.train_data(), held_out["eval"], held_out["test"]]
    lines = [
        Line(Connection(jobs, writable=False), Connection(rows, readable=False), shared)
        for jobs, rows, shared in values["lines"]
    ]
    # warnings about threads that no worker uses
    warnings.filterwarnings("ignore", message=r"os\.fork\(\)|.*use of fork\(\)")
    with suppress(OSError):  # a full disk: then they can't say where they hang
        stacks = open(values["stacks"], "a")  # noqa: SIM115 - held as long as the processes live
        # of the main thread alone: other threads' frames may be freed while a handler reads them
        faulthandler.register(ASK_SIGNAL, file=stacks, all_threads=False)
    status = values["status"]
    pids = [_fork(sources, lines, index, status) for index in range(len(lines))]
    for each in lines:
        each.close()
    while pids:
        pid, wait_status = os.wait()
        code = os.waitstatus_to_exitcode(wait_status)
        if code:
            Connection(status, readable=False).send((pids.index(pid), code))
            os._exit(1)  # the others go with this one
        pids[pids.index(pid)] = 0
        if not any(pids):
            return


def _fork(sources: Sequence[Any], lines: Sequence[Line], index: int, status: int) -> int:
    parent = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    try:
        end_with(parent)
        os.close(status)
        for other, each in enumerate(lines):
            if other != index:
                each.close()
        serve(sources, lines[index])
        os._exit(0)
    except BaseException as error:
        print(f"data worker {index}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
        os._exit(1)
