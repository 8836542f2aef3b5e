"""The ranks of `samecurve run`: started, watched, ended.

Not by torch's elastic agent, which imports torch (2 to 5 s), and waits 30 s between SIGTERM and
SIGKILL.

Each rank leads a session and process group of its own, so that a group's end is that of its
children too, data workers among them. Nothing outlives the launcher: a rank dies with it by the
system's word (launch/script/bootstrap.py), what the rank has started by that of the guard
(launch/orphan_guard.py). A rank has failed when it ends with another exit code than 0, or leaves
word that it will: one that hangs in its exit is not waited for.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from samecurve.launch.script.output import Outputs

_TICK = 0.05
FAILED = (
    (1.0, signal.SIGTERM),
    (5.0, signal.SIGKILL),
)  # seconds after the first failure: time to say what they have to, then the end of all groups
STOPPED = ((10.0, signal.SIGKILL),)  # seconds after the signal that was passed on
_REST = 1.0  # seconds for what ranks have started to end by itself


class OrphanGuard:
    """The process that kills the groups it was told of when this one is gone."""

    def __init__(self) -> None:
        path = Path(__file__).with_name("orphan_guard.py")
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", str(path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def tell(self, sign: str, group: int) -> None:
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # somebody ended it; ranks still die with the launcher
            os.write(self._process.stdin.fileno(), f"{sign}{group}\n".encode())

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


@dataclass
class RankGroup:
    """One go of all ranks. commands: what the shim runs, and environments: for each rank."""

    commands: Sequence[Sequence[str]]
    environments: Sequence[Mapping[str, str]]
    outputs: Outputs
    guard: OrphanGuard
    ask: int = 0  # the signal by which ranks are asked where they hang; 0: they are not watched
    failures: dict[int, tuple[float, int]] = field(
        default_factory=dict
    )  # rank -> when, exit code; those that failed by themselves
    stopped: int | None = None  # the signal that stopped it
    _processes: dict[int, subprocess.Popen[bytes]] = field(default_factory=dict)
    _ended: dict[int, int] = field(default_factory=dict)
    _due: list[tuple[float, int]] = field(default_factory=list)  # signals to come: when, which
    _sent: set[int] = field(default_factory=set)
    _early: set[int] = field(default_factory=set)

    def start(self) -> None:
        """In the main thread: a death signal follows the thread that started the child."""
        for rank, (command, environment) in enumerate(
            zip(self.commands, self.environments, strict=True)
        ):
            self.word(rank).unlink(missing_ok=True)
            process = subprocess.Popen(
                [
                    sys.executable,
                    str(Path(__file__).with_name("script") / "bootstrap.py"),
                    str(self.word(rank).absolute()),
                    str(os.getpid()),
                    str(int(self.ask)),
                    *command,
                ],
                env=dict(environment),
                stdin=None if len(self.environments) == 1 else subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,
            )
            self.guard.tell("+", process.pid)
            assert process.stdout is not None
            assert process.stderr is not None
            self.outputs.add(rank, not self._processes, {1: process.stdout, 2: process.stderr})
            self._processes[rank] = process
            if self.stopped:  # meanwhile: this one may not have been told
                os.kill(process.pid, self.stopped)
                break

    def watch(self, ticks: Sequence[Callable[[Mapping[int, int]], None]]) -> None:
        """Until all have ended.

        ticks: called all the time, with the process ids of those that live.
        """
        while len(self._ended) < len(self._processes):
            self.outputs.pump(_TICK)
            self._look()
            self._press()
            for tick in ticks:
                tick(
                    {
                        rank: process.pid
                        for rank, process in self._processes.items()
                        if rank not in self._ended
                    }
                )
        self.outputs.drain(0.5)
        for rank in self._processes:
            self.outputs.keep(
                rank, str(self.said(rank).get("said", "")).encode(errors="backslashreplace")
            )

    def word(self, rank: int) -> Path:
        return self.outputs.logs / f"rank-{rank}.json"

    def said(self, rank: int) -> dict[str, Any]:
        """A rank's last word; {} if it left none."""
        try:
            found = json.loads(self.word(rank).read_text())
        except (OSError, ValueError):
            return {}
        return found if isinstance(found, dict) else {}

    def stop(self, number: int) -> bool:
        """Pass it on, once; what doesn't leave is killed.

        False: a rank has failed, and all are ending already.
        """
        if self.failures:
            return False
        self.stopped = number
        self._send(number)
        self._set(STOPPED)
        return True

    def left(self) -> list[int]:
        """Ranks that had ended with 0 when the first one failed."""
        return sorted(self._early)

    def kill(self) -> None:
        """All groups, at once."""
        for process in self._processes.values():
            with suppress(OSError):
                os.killpg(process.pid, signal.SIGKILL)

    def _look(self) -> None:
        for rank, process in self._processes.items():
            if rank in self._ended:
                continue
            code = process.poll()
            word = self.said(rank) if code or self.word(rank).exists() else {}
            failed = word.get("code") or code or 0
            if code is not None:
                self._ended[rank] = code
            if (
                failed
                and rank not in self.failures
                and not (code and {-code, code - 128} & self._sent and not word.get("code"))
                and self.stopped is None
            ):
                if not self.failures:
                    self._early = {
                        other
                        for other in self._processes
                        if self._ended.get(other) == 0 or self.said(other).get("code") == 0
                    }
                    self._set(FAILED)
                self.failures[rank] = word.get("time", time.time()), failed

    def _set(self, due: Sequence[tuple[float, int]]) -> None:
        self._due = [(time.monotonic() + seconds, number) for seconds, number in due]

    def _press(self) -> None:
        while self._due and time.monotonic() > self._due[0][0]:
            self._send(self._due.pop(0)[1])

    def _send(self, number: int) -> None:
        """SIGKILL to whole groups; what can be caught to the ranks alone, which end their children
        as they see fit.
        """
        self._sent.add(number)
        for rank, process in self._processes.items():
            if rank not in self._ended:
                with suppress(OSError):
                    (os.killpg if number == signal.SIGKILL else os.kill)(process.pid, number)

    def clear(self) -> list[int]:
        """Ranks whose children stayed behind, which are killed now."""
        until = time.monotonic() + (
            0 if self.failures or self.stopped or len(self._ended) < len(self._processes) else _REST
        )
        while (
            left := [rank for rank, process in self._processes.items() if _alive(process.pid)]
        ) and time.monotonic() < until:
            time.sleep(_TICK)
        for rank, process in self._processes.items():
            if rank in left or rank not in self._ended:
                with suppress(OSError):
                    os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            self.guard.tell("-", process.pid)
        return left


def _alive(group: int) -> bool:
    """Whether the process group has a member that is no zombie."""
    try:
        os.killpg(group, 0)
    except OSError:
        return False
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            if os.getpgid(process.pid) == group and process.status() != psutil.STATUS_ZOMBIE:
                return True
    return False


@contextmanager
def guarded() -> Iterator[OrphanGuard]:
    guard = OrphanGuard()
    try:
        yield guard
    finally:
        guard.close()
