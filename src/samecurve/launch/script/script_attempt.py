"""A start of a script's ranks, from the first process to the last, and why it failed."""

import json
import os
import signal
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from samecurve.errors import RunError, SamecurveError
from samecurve.launch import Signals
from samecurve.launch.script.announcements import Departures, WatchAnnouncement
from samecurve.launch.script.misuse import Notices
from samecurve.launch.script.output import Outputs, Shown, say
from samecurve.launch.script.placement import Placement, hold_port, rank_environments
from samecurve.launch.supervisor import (
    STOP_SECONDS,
    GroupEnd,
    RankGroup,
    RankReport,
    RankStart,
)
from samecurve.probe import nvidia, oom_kills, oom_kills_since
from samecurve.processes import python_bootstrap, start_program
from samecurve.processes.orphan_guard import OrphanGuard
from samecurve.units import counted, show_seconds
from samecurve.watch import HangLimit, clear_hang_files
from samecurve.watch.hang_watch import HangWatch

if TYPE_CHECKING:
    from samecurve.diagnose.notes import FailureNote

_ASK_SIGNAL = signal.SIGRTMIN + 7  # no library's
_START = 600  # seconds at most for a script's first collectives, where the floor is less
BOOTSTRAP = Path(__file__).with_name("bootstrap.py")


@dataclass(frozen=True)
class Request:
    """The options of `samecurve run`."""

    target: str  # a script's path, or with `module` a module's name
    arguments: tuple[str, ...] = ()
    module: bool = False
    gpus: str | None = None
    nproc: int | None = None
    output: Shown = "all"
    log_dir: Path | None = None
    max_restarts: int = 0
    hang_floor: int = 600  # seconds; 0: hangs are not looked for


@dataclass(frozen=True)
class Script:
    """The script's ranks, in every attempt."""

    request: Request
    placement: Placement
    logs: Path
    environment: Mapping[str, str]  # of all ranks
    local_rank_option: str | None

    def report_path(self, rank: int) -> Path:
        """The file in which launch/script/bootstrap.py writes how the rank ended."""
        return self.logs / f"rank-{rank}.json"

    def report(self, rank: int) -> dict[str, Any]:
        """Read the rank's report; {}: there is none yet."""
        try:
            report = json.loads(self.report_path(rank).read_text())
        except (OSError, ValueError):
            return {}
        if not isinstance(report, dict):
            return {}
        return report

    def read_report(self, rank: int) -> RankReport | None:
        """The rank's report in the supervisor's form."""
        report = self.report(rank)
        if not report:
            return None
        return RankReport(report["code"], report["time"])

    def rank_start(self, environment: Mapping[str, str]) -> RankStart:
        """What starts a rank. environment: the variables of this rank alone."""
        rank = environment["LOCAL_RANK"]
        ask_signal = int(_ASK_SIGNAL) if self.request.hang_floor else 0
        arguments = python_bootstrap(
            str(BOOTSTRAP),
            str(self.report_path(int(rank)).absolute()),
            str(os.getpid()),
            str(ask_signal),
            "module" if self.request.module else "script",
            self.request.target,
        )
        if self.local_rank_option:
            arguments.append(f"{self.local_rank_option}={rank}")
        arguments += self.request.arguments
        environment = {**self.environment, **environment}
        return partial(start_program, arguments, environment=environment, new_session=True)


class ScriptAttempt:
    """A start of all ranks."""

    def __init__(self, script: Script, number: int) -> None:
        self._script, self._number = script, number  # from 0
        self._request, self._processes = script.request, script.placement.processes
        self._hang: RunError | None = None
        self._oom_kills = oom_kills()
        self.stopped_by: int | None = None

    def run(self, orphans: OrphanGuard) -> SamecurveError | None:
        """Run the ranks. Returns why they failed; None: they did not fail, or were stopped."""
        clear_hang_files(self._script.logs)
        for rank in range(self._processes):
            self._script.report_path(rank).unlink(missing_ok=True)
        outputs = Outputs(self._script.logs, self._request.output, self._processes)
        with hold_port() as port:
            group = self._group(orphans, outputs, port)
            notices = Notices(
                self._processes,
                port=port,
                gpus=len(self._script.placement.devices),
                holders=partial(nvidia.processes_on_devices, self._script.environment),
                say=partial(say, "warn"),
            )
            with Signals(lambda: _stop(group, signals), lambda: _kill(group)) as signals:
                try:
                    group.start()
                    if not self._number:
                        since = show_seconds(time.time() - psutil.Process().create_time())
                        ranks = counted(self._processes, "rank")
                        where = f"they meet at 127.0.0.1:{port}"
                        say("start", f"{ranks} {since} after this command; {where}")
                    group.watch([notices.tick, self._hang_tick(group)])
                    self._log_last_words(outputs)
                finally:
                    left = group.clear()
                    outputs.close()
        self.stopped_by = group.stopped_by
        for rank, why in outputs.lost.items():
            say("warn", f"{outputs.log(rank)} ends early: {why}")
        if self._hang or group.has_failed:
            return self._hang or self._explain(group.end)
        if not self.stopped_by:
            _warn_of_leftovers(left)
            notices.ended([self._script.report(rank) for rank in range(self._processes)])
        return None

    def _group(self, orphans: OrphanGuard, outputs: Outputs, port: int) -> RankGroup:
        environments = rank_environments(
            self._processes,
            port,
            restart=self._number,
            max_restarts=self._request.max_restarts,
        )
        return RankGroup(
            [self._script.rank_start(environment) for environment in environments],
            orphans=orphans,
            read_report=self._script.read_report,
            outputs=outputs,
        )

    def _hang_tick(self, group: RankGroup) -> Callable[[Mapping[int, int]], None]:
        """A function that looks for hangs, called again and again with the ranks at work."""
        watched: dict[int, int] = {}  # rank -> process id
        floor = self._request.hang_floor
        limit = HangLimit(
            floor,
            unknown=max(floor, min(10 * floor, _START)),
            option="--hang-floor ",
            unit="collective",
        )
        hangs = HangWatch(
            self._script.logs,
            lambda: watched,
            world_size=self._processes,
            limit=limit,
            ask_signal=_ASK_SIGNAL,
            left=lambda: group.left_well,
        )
        silent = self._number > 0 or self._processes == 1 or not floor
        announcement = None if silent else WatchAnnouncement(limit, partial(say, "watch"))
        departures = Departures(hangs.describe_ranks, partial(say, "watch"))

        def tick(at_work: Mapping[int, int]) -> None:
            if self._hang or not at_work or group.has_failed or not hangs.due:
                return
            watched.clear()
            watched.update(at_work)
            if announcement:
                announcement.tick(all_seen=hangs.all_seen)
            if floor:
                departures.tick(group.left_well)
            self._hang = hangs.look()
            if self._hang:
                group.kill()

        return tick

    def _log_last_words(self, outputs: Outputs) -> None:
        """Write into the logs what Python would have printed of exceptions.

        bootstrap.py has kept it back in the report.
        """
        for rank in range(self._processes):
            text = str(self._script.report(rank).get("stderr", ""))
            outputs.keep(rank, text.encode(errors="backslashreplace"))

    def _explain(self, end: GroupEnd) -> SamecurveError:
        """Explain the failure. Its exit code is that of the rank that failed first."""
        from samecurve.diagnose.crash import explain

        notes = [self._note(rank) for rank in end.failed]
        error = explain(
            [note for note in notes if note],
            end.failed,
            self._script.logs,
            oom_kills=oom_kills_since(self._oom_kills),
            world_size=self._processes,
            left_early=end.finished_before,
            exit_places={
                rank: str(place)
                for rank in end.failed
                if (place := self._script.report(rank).get("exit_place"))
            },
            resumes=False,
        )
        first = next(iter(end.failed.values()))
        code = first if error.rank is None else end.failed.get(error.rank, first)
        # the script's own exit code, of the rank that failed first
        error.exit_code = code if code >= 0 else 128 - code
        return error

    def _note(self, rank: int) -> "FailureNote | None":
        """The cause that a failed rank has reported; None: it has reported none."""
        from samecurve.diagnose.notes import FailureNote

        report = self._script.report(rank)
        cause, trace = report.get("cause"), report.get("trace", "")
        if not cause:
            return None
        if not trace:
            cause = f"rank {rank}: {cause}"
        return FailureNote(
            rank=rank,
            time=report["time"],
            cause=cause,
            trace=trace,
            exit_code=report["code"],
        )


def _stop(group: RankGroup, signals: Signals) -> None:
    number = signals.received or signal.SIGINT
    if group.stop(number):
        text = (
            f"\n{signal.Signals(number).name} passed on to all ranks, which have {STOP_SECONDS:g} s"
            " to leave; once more to kill them\n"
        )
        with suppress(OSError):  # nobody reads the output any more
            os.write(2, text.encode())


def _kill(group: RankGroup) -> None:
    group.kill()
    with suppress(OSError):
        os.write(2, b"\nkilled, all ranks\n")


def _warn_of_leftovers(ranks: list[int]) -> None:
    if ranks:
        say(
            "warn",
            f"rank {', '.join(map(str, ranks))} left processes behind, which were ended: a script"
            " should wait for those it starts",
        )
