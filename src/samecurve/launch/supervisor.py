"""The supervisor of a group of ranks: it starts, watches, stops and kills their processes.

`train` and `run` differ only in a rank's command and environment, and in how a rank reports its
end. (torch's elastic agent would import torch, 2 to 5 s, and wait 30 s between SIGTERM and
SIGKILL.)

Each rank leads a session and process group of its own, so that killing the group also kills the
rank's children, such as data workers. Nothing outlives the launcher: the system ends a rank with it
(processes/__init__.py, launch/script/bootstrap.py), and processes/orphan_guard.py kills what the
rank has started. A rank has failed when its exit code is not 0, or when it reports that it will
fail: a rank that hangs in its exit is not waited for.
"""

import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from subprocess import DEVNULL, PIPE
from typing import Protocol, Unpack

import psutil

from samecurve.launch.script.output import Outputs
from samecurve.processes import Files, Process, signal_group
from samecurve.processes.orphan_guard import OrphanGuard

_TICK = 0.05  # seconds between two looks
# seconds, and the signal sent then. After the first failure the ranks have time for their last
# words, and then all groups end. After a stop they have time to leave in order.
_AFTER_FAILURE = ((1.0, signal.SIGTERM), (5.0, signal.SIGKILL))
STOP_SECONDS = 10.0
_AFTER_STOP = ((STOP_SECONDS, signal.SIGKILL),)
_LEFTOVERS = 1.0  # seconds in which the children of ranks end by themselves


class RankStart(Protocol):
    """Starts one rank as the leader of a session, so that Ctrl-C reaches the launcher alone."""

    def __call__(self, **files: Unpack[Files]) -> Process: ...


@dataclass(frozen=True)
class RankReport:
    """The report that a rank writes about its end, before it ends."""

    exit_code: int
    time: float


@dataclass(frozen=True)
class GroupEnd:
    """How the ranks of one start ended."""

    # rank -> exit code, negative for a signal; in the order in which the ranks failed
    failed: Mapping[int, int]
    finished_before: Sequence[int] = ()  # ranks that had ended with 0 by themselves


class RankGroup:
    """The ranks of one start on this machine."""

    def __init__(
        self,
        commands: Sequence[RankStart],
        *,
        orphans: OrphanGuard,
        read_report: Callable[[int], RankReport | None],
        outputs: Outputs | None = None,
    ) -> None:
        """commands: by rank.

        read_report: reads what a rank has reported; None: nothing yet.
        outputs: takes what the ranks print, and the first rank reads what is typed; None: the ranks
            write their own logs.
        """
        self._commands, self._orphans, self._read_report = commands, orphans, read_report
        self._outputs = outputs
        self.stopped_by: int | None = None  # the signal that stop() passed on
        self._processes: list[Process] = []  # by rank
        self._ended: dict[int, int] = {}  # rank -> exit code
        self._reports: dict[int, RankReport] = {}
        self._failures: dict[int, RankReport] = {}  # by rank, without ranks that we have ended
        self._finished_before: list[int] = []
        self._due: list[tuple[float, int]] = []  # signals to send: the time and the number
        self._sent: set[int] = set()

    def start(self) -> None:
        """Start the ranks, in the main thread: a child dies with the thread that started it."""
        for rank, command in enumerate(self._commands):
            is_typed_to = self._outputs is not None and not self._processes
            pipe = PIPE if self._outputs else None
            process = command(stdin=None if is_typed_to else DEVNULL, stdout=pipe, stderr=pipe)
            self._orphans.add(process.pid)
            self._processes.append(process)
            if self._outputs:
                assert process.stdout is not None
                assert process.stderr is not None
                self._outputs.add(rank, {1: process.stdout, 2: process.stderr})
            if self.stopped_by:  # stop() was called meanwhile, and missed this rank
                os.kill(process.pid, self.stopped_by)
                break

    def watch(self, ticks: Sequence[Callable[[Mapping[int, int]], None]] = ()) -> None:
        """Watch the ranks until all have ended.

        ticks: called again and again, with rank -> process id of the ranks at work.
        """
        while len(self._ended) < len(self._processes):
            if self._outputs:
                self._outputs.pump(_TICK)
            else:
                time.sleep(_TICK)
            self._look()
            while self._due and time.monotonic() > self._due[0][0]:
                self.send(self._due.pop(0)[1])
            at_work = {
                rank: process.pid
                for rank, process in enumerate(self._processes)
                if rank not in self._ended and rank not in self._reports
            }
            for tick in ticks:
                tick(at_work)
        if self._outputs:
            self._outputs.drain(0.5)

    @property
    def has_failed(self) -> bool:
        """Whether a rank has failed by itself. All ranks are being ended then."""
        return bool(self._failures)

    @property
    def exit_codes(self) -> Mapping[int, int]:
        """The exit codes of the ranks that have ended, negative for a signal."""
        return self._ended

    @property
    def left_well(self) -> list[int]:
        """The ranks that have ended with 0, or have reported that they will."""
        reported = {rank: report.exit_code for rank, report in self._reports.items()}
        codes = {**reported, **self._ended}
        return sorted(rank for rank, code in codes.items() if code == 0)

    @property
    def end(self) -> GroupEnd:
        order = sorted(self._failures, key=lambda rank: self._failures[rank].time)
        codes = {rank: self._failures[rank].exit_code for rank in order}
        return GroupEnd(codes, self._finished_before)

    def send(self, number: int) -> None:
        """Send a signal to all live ranks.

        SIGKILL goes to whole process groups. Another signal goes to the ranks alone, which end
        their children themselves.
        """
        self._sent.add(number)
        for rank, process in enumerate(self._processes):
            if rank in self._ended:
                continue
            if number == signal.SIGKILL:
                signal_group(process.pid)
            else:
                with suppress(OSError):
                    os.kill(process.pid, number)

    def stop(self, number: int) -> bool:
        """Pass a signal on. A rank that has not left after STOP_SECONDS is killed.

        False: a rank has failed, and all ranks are ending already.
        """
        if self._failures:
            return False
        self.stopped_by = number
        self.send(number)
        self._schedule(_AFTER_STOP)
        return True

    def kill(self) -> None:
        """Kill all process groups at once, including those of ranks that have ended."""
        for process in self._processes:
            signal_group(process.pid)

    def clear(self) -> list[int]:
        """Kill everything that is left. Returns the ranks whose children had stayed behind."""
        ended_well = not self._failures and not self.stopped_by
        patient = ended_well and len(self._ended) == len(self._processes)
        until = time.monotonic() + (_LEFTOVERS if patient else 0)
        left = self._groups_alive()
        while left and time.monotonic() < until:
            time.sleep(_TICK)
            left = self._groups_alive()
        for rank, process in enumerate(self._processes):
            if rank in left or rank not in self._ended:
                signal_group(process.pid)
            process.wait()
            self._orphans.remove(process.pid)
        return left

    def _groups_alive(self) -> list[int]:
        return [rank for rank, process in enumerate(self._processes) if _is_alive(process.pid)]

    def _look(self) -> None:
        """Look which ranks have ended, and which of them have failed or report a failure.

        All ranks are polled before one is judged, since a failure's explanation needs to know which
        ranks had ended with 0 before it.
        """
        alive = [rank for rank in range(len(self._processes)) if rank not in self._ended]
        codes = {rank: self._processes[rank].poll() for rank in alive}
        self._ended |= {rank: code for rank, code in codes.items() if code is not None}
        for rank, code in codes.items():
            if rank not in self._reports and (report := self._read_report(rank)):
                self._reports[rank] = report
            failure = self._failure(rank, code)
            if failure and rank not in self._failures and self.stopped_by is None:
                self._fail(rank, failure)
        # a rank that leaves closes its connections first, so those that lose it may end before it
        if self._failures and not {number for _, number in _AFTER_FAILURE} & self._sent:
            self._finished_before = self.left_well

    def _failure(self, rank: int, code: int | None) -> RankReport | None:
        """The failure of a rank by itself, if any. code: its exit code; None: it still lives."""
        report = self._reports.get(rank)
        if report and report.exit_code:
            return report
        if not code or {-code, code - 128} & self._sent:  # a signal of ours has ended it
            return None
        return RankReport(code, report.time if report else time.time())

    def _fail(self, rank: int, failure: RankReport) -> None:
        if not self._failures:
            self._schedule(_AFTER_FAILURE)
        self._failures[rank] = failure

    def _schedule(self, ladder: Sequence[tuple[float, int]]) -> None:
        self._due = [(time.monotonic() + seconds, number) for seconds, number in ladder]


def _is_alive(group: int) -> bool:
    """Whether the process group has a member that is not a zombie."""
    try:
        os.killpg(group, 0)
    except OSError:
        return False
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            if os.getpgid(process.pid) == group and process.status() != psutil.STATUS_ZOMBIE:
                return True
    return False
