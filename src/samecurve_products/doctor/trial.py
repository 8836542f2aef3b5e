"""Processes that may hang: each has a time limit, and none is left when it is over.

A job (worker/jobs/check_job.py) runs in a process group of its own and tells in lines how far it
has come. What has not ended within its limit is killed. A process also dies with this one.
"""

import json
import os
import selectors
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

from samecurve.processes import fork_server
from samecurve.seam import Call, Process, how_ended, signal_group, start_process, wait_for

_GRACE = 2.0  # seconds for the other ranks, once one has failed
_LEAVE = 10.0  # seconds in which a killed process leaves
_BLOCK = 1 << 16  # bytes
_LAST_LINES = 40  # of a log that say why a process ended


@dataclass
class Trial:
    """A process of a job, and what it has told so far."""

    process: Process
    pipe: socket.socket
    log: Path
    reports: list[dict[str, Any]] = field(default_factory=list)
    code: int | None = None  # its exit code, once it has ended by itself; negative: by a signal
    hung: bool = False  # it did not end by itself
    killed: bool = False
    rest: bytes = b""  # the beginning of a line

    @property
    def stage(self) -> str:
        """The stage that it has reached; '': none."""
        return str(self.reports[-1]["stage"]) if self.reports else ""

    @property
    def done(self) -> bool:
        return self.stage == "done"

    @property
    def failed(self) -> bool:
        """Whether it has ended, and not at its end."""
        return self.code is not None and not self.done

    @property
    def is_held(self) -> bool:
        """Whether it lives on although it was killed: in a call of a driver."""
        return self.killed and self.process.poll() is None

    def value(self, stage: str, name: str) -> Any:
        """A value that it told at a stage; None: it did not come so far."""
        values = (one[name] for one in self.reports if one["stage"] == stage and name in one)
        return next(values, None)

    def last_lines(self) -> list[str]:
        """The end of what it has printed."""
        try:
            return self.log.read_text(errors="replace").splitlines()[-_LAST_LINES:]
        except OSError:
            return []

    def last_error(self) -> str:
        """The last line of its log that names an error, or how it ended."""
        for line in reversed(self.last_lines()):
            if "Error" in line or "NCCL WARN" in line:
                return line.strip()
        return f"it ended with {how_ended(self.code or 0)}"


class Trials:
    """Starts the processes of jobs, and ends them all with the block.

    They are forked from a process that imports torch in the background, where there can be one.
    """

    def __init__(self, home: Path, environment: Mapping[str, str], modules: Sequence[str]) -> None:
        """home: a directory for logs and for files in which ranks meet.

        environment: of the processes. modules: imported once, before processes are forked
        """
        self._home, self._environment, self._modules = home, environment, modules
        self._started: list[Trial] = []
        self._server = fork_server((*modules, __name__))

    def __enter__(self) -> "Trials":
        return self

    def __exit__(self, *_: object) -> None:
        self.end(self._started)
        if self._server:
            self._server.close()

    def place(self, name: str) -> Path:
        """A new file in which ranks meet."""
        return self._home / f"{name}-{len(self._started)}"

    def start(
        self, job: str, value: object, variables: Mapping[str, str], *, fork: bool = True
    ) -> Trial:
        """Start a process.

        job: module:function, which takes `value` as JSON and tells on its standard input
        variables: beside the environment
        fork: False: it imports what it needs itself
        """
        ours, theirs = socket.socketpair()
        log = self._home / f"trial-{len(self._started)}.log"
        environment = {**self._environment, **variables}
        call = Call(__name__, (job, json.dumps(value)), "run_job", environment, new_session=True)
        with theirs, open(log, "wb") as output:
            process = start_process(
                call,
                server=self._server if fork else None,
                stdin=theirs.fileno(),
                stdout=output.fileno(),
                stderr=output.fileno(),
            )
        ours.setblocking(False)
        trial = Trial(process, ours, log)
        self._started.append(trial)
        return trial

    def wait(self, groups: Sequence[Sequence[Trial]], limit: float) -> None:
        """Wait for all processes to end, and kill what has not ended within `limit` seconds.

        groups: ranks that need each other: where one fails, the others end soon after
        """
        until = {id(trial): time.monotonic() + limit for group in groups for trial in group}
        waiting = [trial for group in groups for trial in group]
        while waiting:
            _read(waiting, max(0.0, min(until[id(trial)] for trial in waiting) - time.monotonic()))
            for group in groups:
                if any(trial.failed for trial in group):
                    soon = time.monotonic() + _GRACE
                    until |= {id(trial): min(until[id(trial)], soon) for trial in group}
            now = time.monotonic()
            late = [
                trial
                for trial in waiting
                if trial.code is None and (trial.hung or now >= until[id(trial)])
            ]
            for trial in late:
                trial.hung = True
            self.end(late)
            waiting = [trial for trial in waiting if trial.code is None and not trial.hung]

    def end(self, trials: Sequence[Trial]) -> None:
        """Kill the process groups of those that live.

        A process that a driver holds ends later, or never: it is not waited for any longer.
        """
        living = [trial for trial in trials if trial.code is None and not trial.killed]
        for trial in living:
            signal_group(trial.process.pid)
            trial.killed = True
        wait_for([trial.process for trial in living], _LEAVE)
        for trial in trials:
            trial.pipe.close()


def _read(waiting: Sequence[Trial], patience: float) -> None:
    """Take what processes tell, until one tells something or `patience` seconds have passed."""
    with selectors.DefaultSelector() as selector:
        for trial in waiting:
            selector.register(trial.pipe, selectors.EVENT_READ, trial)
        for key, _ in selector.select(patience):
            _take(key.data)


def _take(trial: Trial) -> None:
    """Take the lines that one process has told; at their end, its exit code."""
    try:
        block = trial.pipe.recv(_BLOCK)
    except ConnectionResetError:  # it was killed with something unread
        block = b""
    if not block:
        trial.hung = not wait_for([trial.process], _GRACE)
        trial.code = trial.process.returncode
        return
    *lines, trial.rest = (trial.rest + block).split(b"\n")
    trial.reports += [json.loads(line) for line in lines]


def run_job(job: str, value: str) -> None:
    """Run a job in this process."""
    module, _, name = job.partition(":")
    getattr(import_module(module), name)(value)
    sys.stdout.flush()
    os._exit(0)  # libraries may hang when an interpreter ends
