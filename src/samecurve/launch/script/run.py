"""`samecurve run`: any script that torchrun starts, on all devices of this machine.

torch is not imported here, so ranks start at once.
"""

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from samecurve.errors import RunError, SamecurveError, UserError
from samecurve.launch.hang_watch import HangLimit, HangWatch
from samecurve.launch.script.misuse import LONG, Notices
from samecurve.launch.script.output import Outputs, Shown
from samecurve.launch.script.placement import (
    Layout,
    find_gpus,
    hold_port,
    lay_out,
    rank_environments,
    refuse_nested,
    settings,
)
from samecurve.launch.script.requirements import Source, find_module, find_script, read_source
from samecurve.launch.signals import Signals
from samecurve.launch.supervisor import (
    STOP_SECONDS,
    GroupEnd,
    OrphanGuard,
    RankCommand,
    RankGroup,
    RankReport,
)
from samecurve.probe import nvidia
from samecurve.probe.cpu import oom_kills, oom_kills_since
from samecurve.run.logs import clear_hang_files
from samecurve.run.naming import free_name
from samecurve.units import show_seconds

_ASK_SIGNAL = signal.SIGRTMIN + 7  # no library's
_START = 600  # seconds at most for a script's first collectives, where the floor is less
BOOTSTRAP = Path(__file__).with_name("bootstrap.py")


@dataclass(frozen=True)
class Request:
    """What was asked for."""

    target: str  # a script's path, or with `module` a module's name
    arguments: tuple[str, ...] = ()
    module: bool = False
    gpus: str | None = None
    nproc: int | None = None
    output: Shown = "all"
    log_dir: Path | None = None
    max_restarts: int = 0
    hang_floor: int = 600  # seconds; 0: nobody looks for hangs


def run(request: Request) -> int:
    """Returns 0, or 128 + the signal that stopped it.

    SamecurveError: why it failed, with the exit code of the first rank that did.
    """
    refuse_nested(os.environ)
    path = find_module(request.target) if request.module else find_script(request.target)
    source = read_source(path)
    layout = lay_out(find_gpus(os.environ), gpus=request.gpus, nproc=request.nproc, jax=source.jax)
    logs = _make_logs(request)
    added, kept = settings(layout, os.environ)
    local_rank_option = _local_rank_option(request, source)
    _announce(layout, logs, added=added, kept=kept, local_rank_option=local_rank_option)
    script = _Script(request, layout, logs, {**os.environ, **added}, local_rank_option)
    began = time.monotonic()
    with OrphanGuard() as guard:
        for number in range(request.max_restarts + 1):
            attempt = _Attempt(script, number)
            failure = attempt.run(guard)
            if attempt.stopped_by:
                _say("stop", f"by {signal.Signals(attempt.stopped_by).name}; logs {logs}")
                return 128 + attempt.stopped_by
            if failure is None:
                took = show_seconds(time.monotonic() - began)
                _say("done", f"{_ranks(layout.processes)} in {took}; logs {logs}")
                return 0
            _raise_if_final(failure, number, request.max_restarts)
            _say(
                "again",
                f"{_cause_line(failure)}; all ranks start anew: restart {number + 1} of"
                f" {request.max_restarts}",
            )
            _set_logs_aside(logs, layout.processes, number)
    raise AssertionError("the last attempt returns or raises")


def _raise_if_final(failure: SamecurveError, number: int, max_restarts: int) -> None:
    """Raise it where all restarts are used, or none would help."""
    if number == max_restarts:
        raise failure
    if isinstance(failure, RunError) and not failure.again:
        failure.remedy += "; not started again: the same would happen"
        raise failure


def _local_rank_option(request: Request, source: Source) -> str | None:
    """Its spelling, if ranks are to be given it: the parser has it, and the user gave none."""
    option = source.local_rank
    names = {argument.partition("=")[0] for argument in request.arguments}
    return None if option in names else option


def _announce(
    layout: Layout,
    logs: Path,
    *,
    added: Mapping[str, str],
    kept: list[str],
    local_rank_option: str | None,
) -> None:
    """What is about to be started, and with which environment."""
    _say("run", f"{layout.why}; logs {logs}")
    shown = " ".join(f"{name}={shlex.quote(value)}" for name, value in added.items())
    _say("env", f"{shown}; as you set it: {' '.join(kept)}" if kept else shown)
    if "MASTER_PORT" in os.environ:
        port = os.environ["MASTER_PORT"]
        _say("note", f"MASTER_PORT={port} is not used: each run takes a free port")
    if local_rank_option:
        _say(
            "note",
            f"the script's parser has {local_rank_option}, so each rank is given"
            f" {local_rank_option}=N, as torch.distributed.launch does",
        )


@dataclass(frozen=True)
class _Script:
    """What all attempts have in common."""

    request: Request
    layout: Layout
    logs: Path
    environment: Mapping[str, str]  # of all ranks
    local_rank_option: str | None

    def report_path(self, rank: int) -> Path:
        """Where launch/script/bootstrap.py writes how the rank ends."""
        return self.logs / f"rank-{rank}.json"

    def report(self, rank: int) -> dict[str, Any]:
        """{}: there is none (yet)."""
        try:
            report = json.loads(self.report_path(rank).read_text())
        except (OSError, ValueError):
            return {}
        return report if isinstance(report, dict) else {}

    def read_report(self, rank: int) -> RankReport | None:
        """As the supervisor wants it."""
        report = self.report(rank)
        return RankReport(report["code"], report["time"]) if report else None

    def command(self, environment: Mapping[str, str]) -> RankCommand:
        """environment: of this rank alone."""
        rank = environment["LOCAL_RANK"]
        option = self.local_rank_option
        arguments = [
            sys.executable,
            str(BOOTSTRAP),
            str(self.report_path(int(rank)).absolute()),
            str(os.getpid()),
            str(int(_ASK_SIGNAL) if self.request.hang_floor else 0),
            "module" if self.request.module else "script",
            self.request.target,
            *([f"{option}={rank}"] if option else []),
            *self.request.arguments,
        ]
        return RankCommand(arguments, {**self.environment, **environment})


class _Attempt:
    """All ranks, once."""

    def __init__(self, script: _Script, number: int) -> None:
        self._script, self._number = script, number  # from 0
        self._request, self._processes = script.request, script.layout.processes
        self._hang: RunError | None = None
        self._oom_kills = oom_kills()
        self.stopped_by: int | None = None

    def run(self, guard: OrphanGuard) -> SamecurveError | None:
        """Why it failed; None: it did not, or was stopped."""
        clear_hang_files(self._script.logs)
        for rank in range(self._processes):
            self._script.report_path(rank).unlink(missing_ok=True)
        outputs = Outputs(self._script.logs, self._request.output, self._processes)
        with hold_port() as port:
            group = self._group(guard, outputs, port)
            notices = Notices(
                self._processes,
                port=port,
                gpus=len(self._script.layout.devices),
                holders=partial(nvidia.processes_on_devices, self._script.environment),
                say=partial(_say, "warn"),
            )
            with Signals(lambda: _stop(group, signals), lambda: _kill(group)) as signals:
                try:
                    group.start()
                    if not self._number:
                        _announce_start(self._processes, port)
                    group.watch([notices.tick, self._hang_tick(group)])
                    self._log_last_words(outputs)
                finally:
                    left = group.clear()
                    outputs.close()
        self.stopped_by = group.stopped_by
        for rank, why in outputs.lost.items():
            _say("warn", f"{outputs.log(rank)} ends early: {why}")
        if self._hang or group.has_failed:
            return self._hang or self._explain(group.end)
        if not self.stopped_by:
            _warn_of_leftovers(left)
            notices.ended([self._script.report(rank) for rank in range(self._processes)])
        return None

    def _group(self, guard: OrphanGuard, outputs: Outputs, port: int) -> RankGroup:
        environments = rank_environments(
            self._processes,
            port,
            restart=self._number,
            max_restarts=self._request.max_restarts,
        )
        return RankGroup(
            [self._script.command(environment) for environment in environments],
            guard=guard,
            read_report=self._script.read_report,
            outputs=outputs,
            stdin=None if self._processes == 1 else subprocess.DEVNULL,
        )

    def _hang_tick(self, group: RankGroup) -> Callable[[Mapping[int, int]], None]:
        """Looks for hangs, called again and again with the ranks at work. Says once what it can
        see.
        """
        watched: dict[int, int] = {}  # rank -> process id
        floor = self._request.hang_floor
        hangs = HangWatch(
            self._script.logs,
            lambda: watched,
            world_size=self._processes,
            limit=HangLimit(
                floor,
                unknown=max(floor, min(10 * floor, _START)),
                option="--hang-floor ",
                unit="collective",
            ),
            ask_signal=_ASK_SIGNAL,
        )
        began = time.monotonic()
        announced = self._number > 0 or self._processes == 1 or not floor

        def tick(at_work: Mapping[int, int]) -> None:
            nonlocal announced
            if self._hang or not at_work or group.has_failed or not hangs.due:
                return
            watched.clear()
            watched.update(at_work)
            if not announced and (hangs.all_seen or time.monotonic() - began > LONG):
                announced = True
                _announce_watch(floor if hangs.all_seen else None)
            self._hang = hangs.look()
            if self._hang:
                group.kill()

        return tick

    def _log_last_words(self, outputs: Outputs) -> None:
        """What Python would have printed of an exception, kept back by bootstrap.py."""
        for rank in range(self._processes):
            text = str(self._script.report(rank).get("said", ""))
            outputs.keep(rank, text.encode(errors="backslashreplace"))

    def _explain(self, end: GroupEnd) -> SamecurveError:
        from samecurve.diagnose.crash import explain
        from samecurve.diagnose.notes import FailureNote

        notes = []
        for rank in end.failed:
            report = self._script.report(rank)
            cause, trace = report.get("cause"), report.get("trace", "")
            if cause:
                notes.append(
                    FailureNote(
                        rank=rank,
                        time=report["time"],
                        cause=cause if trace else f"rank {rank}: {cause}",
                        remedy="",
                        where="",
                        trace=trace,
                        exit_code=report["code"],
                    )
                )
        error = explain(
            notes,
            end.failed,
            self._script.logs,
            oom_kills=oom_kills_since(self._oom_kills),
            world_size=self._processes,
            left_early=end.finished_before,
            resumes=False,
        )
        first = next(iter(end.failed.values()))
        code = first if error.rank is None else end.failed.get(error.rank, first)
        # the script's own, not ours: of the rank that began it
        error.exit_code = 128 - code if code < 0 else code
        return error


def _stop(group: RankGroup, signals: Signals) -> None:
    number = signals.received or signal.SIGINT
    if group.stop(number):
        text = (
            f"\n{signal.Signals(number).name} passed on to all ranks, which have {STOP_SECONDS:g} s"
            " to leave; once more to kill them\n"
        )
        os.write(2, text.encode())


def _kill(group: RankGroup) -> None:
    group.kill()
    os.write(2, b"\nkilled, all ranks\n")


def _cause_line(error: SamecurveError) -> str:
    """Its cause without the traceback."""
    lines = error.cause.splitlines()
    return next((line for line in lines if line.startswith("rank ")), lines[0])


def _announce_start(processes: int, port: int) -> None:
    since = show_seconds(time.time() - psutil.Process().create_time())
    ranks = _ranks(processes)
    _say("start", f"{ranks} {since} after this command; they meet at 127.0.0.1:{port}")


def _announce_watch(floor: int | None) -> None:
    """floor: of the hang watch; None: no collective has been seen."""
    if floor is None:
        _say(
            "watch",
            "crashes only: no collective of this script has been seen, so a hang would not be",
        )
    else:
        _say(
            "watch",
            f"crashes, and hangs by the ranks' collectives: one that enters none for {floor} s"
            " (--hang-floor) and ten times as long as usual is named and ended",
        )


def _warn_of_leftovers(ranks: list[int]) -> None:
    if ranks:
        _say(
            "warn",
            f"rank {', '.join(map(str, ranks))} left processes behind, which were ended: a script"
            " should wait for those it starts",
        )


def _ranks(count: int) -> str:
    return f"{count} rank{'s' if count > 1 else ''}"


def _make_logs(request: Request) -> Path:
    logs = request.log_dir
    if logs is None:
        script = Path(request.target).stem
        name = request.target.rpartition(".")[2] if request.module else script
        logs = free_name(name, "--log-dir") / "logs"
    try:
        logs.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            f"{logs} can't be made: {error.strerror}",
            "--log-dir DIR where you may write",
            "--log-dir",
        ) from None
    return logs


def _set_logs_aside(logs: Path, processes: int, attempt: int) -> None:
    """The logs of an attempt that failed: rank-1.attempt-0.log."""
    for rank in range(processes):
        path = logs / f"rank-{rank}.log"
        path.replace(path.with_name(f"rank-{rank}.attempt-{attempt}.log"))


def _say(what: str, text: str) -> None:
    """On stderr: stdout is the script's."""
    sys.stdout.flush()
    print(f"{what:<6} {text}", file=sys.stderr, flush=True)
