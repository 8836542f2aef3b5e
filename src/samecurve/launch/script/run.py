"""`samecurve run`: any script that torchrun starts, on all devices of this machine.

torch is not imported here, so ranks start at once.
"""

import os
import shlex
import signal
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import psutil

from samecurve.errors import RunError, SamecurveError, UserError
from samecurve.launch.hang_watch import OFTEN, HangWatch
from samecurve.launch.script import requirements as source
from samecurve.launch.script.misuse import LONG, Notices
from samecurve.launch.script.output import Outputs, Shown
from samecurve.launch.script.placement import (
    Layout,
    find,
    lay_out,
    refuse_nested,
    reserve,
    seats,
    settings,
)
from samecurve.launch.signals import Signals
from samecurve.launch.supervisor import STOPPED, OrphanGuard, RankGroup, guarded
from samecurve.probe import nvidia
from samecurve.probe.cpu import oom_kills, oom_kills_since
from samecurve.run.directory import clear_hang_files
from samecurve.run.naming import free_name
from samecurve.units import show_seconds

_ASK = signal.SIGRTMIN + 7  # no library's
_START = 600  # seconds at most for a script's first collectives, where the floor is less


@dataclass(frozen=True)
class Request:
    """What was asked for. target: a script's path, or with `module` a module's name."""

    target: str
    arguments: tuple[str, ...] = ()
    module: bool = False
    gpus: str | None = None
    nproc: int | None = None
    output: Shown = "all"
    log_dir: Path | None = None
    max_restarts: int = 0
    hang_floor: int = 600


def run(request: Request) -> int:
    """Returns 0, or 128 + the signal that stopped it.

    SamecurveError: why it failed, with the exit code of the first rank that did.
    """
    refuse_nested(os.environ)
    path = _module(request.target) if request.module else _script(request.target)
    wishes = source.read(path)
    layout = lay_out(find(os.environ), request.gpus, request.nproc, wishes.jax)
    logs = _logs(request)
    environment, spelling = _announced(request, layout, wishes, logs)
    began = time.monotonic()
    with guarded() as guard:
        for attempt in range(request.max_restarts + 1):
            go = _Attempt(request, layout, logs, environment, spelling, attempt)
            failure = go.run(guard)
            if go.stopped:
                _say("stop", f"by {signal.Signals(go.stopped).name}; logs {logs}")
                return 128 + go.stopped
            if failure is None:
                _say(
                    "done",
                    f"{_ranks(layout.processes)} in {show_seconds(time.monotonic() - began)}; logs"
                    f" {logs}",
                )
                return 0
            if attempt == request.max_restarts or (
                isinstance(failure, RunError) and not failure.again
            ):
                failure.remedy += (
                    "; not started again: the same would happen"
                    if attempt < request.max_restarts
                    else ""
                )
                raise failure
            _say(
                "again",
                f"{_line(failure)}; all ranks start anew: restart {attempt + 1} of"
                f" {request.max_restarts}",
            )
            _set_aside(logs, layout.processes, attempt)
    raise AssertionError("the last attempt returns or raises")


def _announced(
    request: Request, layout: Layout, wishes: source.Source, logs: Path
) -> tuple[dict[str, str], str | None]:
    """The environment of all ranks, and the spelling of --local-rank if they are to be given it.

    Says both.
    """
    added, kept = settings(layout, os.environ)
    _say("run", f"{layout.why}; logs {logs}")
    _say(
        "env",
        f"{' '.join(f'{name}={shlex.quote(value)}' for name, value in added.items())}{f'; as you set it: {chr(32).join(kept)}' if kept else ''}",
    )
    if "MASTER_PORT" in os.environ:
        _say(
            "note",
            f"MASTER_PORT={os.environ['MASTER_PORT']} is not used: each run takes a free port",
        )
    spelling = (
        wishes.local_rank
        if wishes.local_rank
        and not any(
            argument.partition("=")[0] == wishes.local_rank for argument in request.arguments
        )
        else None
    )
    if spelling:
        _say(
            "note",
            f"the script's parser has {spelling}, so each rank is given {spelling}=N, as"
            " torch.distributed.launch does",
        )
    return {**os.environ, **added}, spelling


@dataclass
class _Attempt:
    """All ranks, once."""

    request: Request
    layout: Layout
    logs: Path
    environment: Mapping[str, str]
    spelling: str | None
    number: int
    stopped: int | None = None
    hung: RunError | None = None
    starved: int | None = field(default_factory=oom_kills)

    def run(self, guard: OrphanGuard) -> SamecurveError | None:
        """Why it failed; None: it did not, or was stopped."""
        clear_hang_files(self.logs)
        outputs = Outputs(self.logs, self.request.output, self.layout.processes)
        with reserve() as held:
            port = int(held.getsockname()[1])
            environments = [
                {**self.environment, **seat}
                for seat in seats(
                    self.layout.processes, port, self.number, self.request.max_restarts
                )
            ]
            world = RankGroup(
                [self._command(seat["LOCAL_RANK"]) for seat in environments],
                environments,
                outputs,
                guard,
                _ASK if self.request.hang_floor else 0,
            )
            watch = self._watch(world)
            notices = Notices(
                self.layout.processes,
                port,
                len(self.layout.devices),
                partial(nvidia.processes_on_devices, self.environment),
                partial(_say, "warn"),
            )
            with Signals(lambda: _stop(world, signals), lambda: _kill(world)) as signals:
                try:
                    world.start()
                    if not self.number:
                        _say(
                            "start",
                            f"{_ranks(self.layout.processes)}"
                            f" {show_seconds(time.time() - psutil.Process().create_time())} after"
                            f" this command; they meet at 127.0.0.1:{port}",
                        )
                    world.watch([notices.tick, watch])
                finally:
                    left = world.clear()
                    outputs.close()
        self.stopped = world.stopped
        self._remark(world, outputs, left)
        if self.hung or world.failures:
            return self.hung or self._explained(world)
        if not self.stopped:
            notices.ended([world.said(rank) for rank in range(self.layout.processes)])
        return None

    def _watch(self, world: RankGroup) -> Callable[[Mapping[int, int]], None]:
        """Looks for hangs, told again and again which ranks live. Says once what it can see."""
        alive: dict[int, int] = {}
        floor = self.request.hang_floor
        hangs = HangWatch(
            self.logs,
            lambda: alive,
            self.layout.processes,
            floor,
            max(floor, min(10 * floor, _START)),
            _ASK,
            ("--hang-floor ", "collective"),
        )
        began, told, due = (
            time.monotonic(),
            self.number > 0 or self.layout.processes == 1 or not self.request.hang_floor,
            0.0,
        )

        def look(pids: Mapping[int, int]) -> None:
            nonlocal told, due
            if time.monotonic() < due or self.hung or not pids:
                return
            due = time.monotonic() + OFTEN
            alive.clear()
            alive.update(
                {rank: pid for rank, pid in pids.items() if not world.word(rank).exists()}
            )  # what has left word is ending
            if not told and (hangs.seen or time.monotonic() - began > LONG):
                told = True
                _say(
                    "watch",
                    (
                        "crashes, and hangs by the ranks' collectives: one that enters none for"
                        f" {self.request.hang_floor} s (--hang-floor) and ten times as long as"
                        " usual is named and ended"
                        if hangs.seen
                        else (
                            "crashes only: no collective of this script has been seen, so a hang"
                            " would not be"
                        )
                    ),
                )
            self.hung = hangs.look()
            if self.hung:
                world.kill()

        return look

    def _command(self, local: str) -> list[str]:
        return [
            "module" if self.request.module else "script",
            self.request.target,
            *([f"{self.spelling}={local}"] if self.spelling else []),
            *self.request.arguments,
        ]

    def _remark(self, world: RankGroup, outputs: Outputs, left: list[int]) -> None:
        for rank, why in outputs.lost.items():
            _say("warn", f"{outputs.log(rank)} ends early: {why}")
        if left and not self.stopped and not world.failures:
            _say(
                "warn",
                f"rank {', '.join(map(str, left))} left processes behind, which were ended: a"
                " script should wait for those it starts",
            )

    def _explained(self, world: RankGroup) -> SamecurveError:
        from samecurve.diagnose.crash import explain
        from samecurve.diagnose.notes import FailureNote

        order = sorted(world.failures, key=lambda rank: world.failures[rank][0])
        words = {rank: world.said(rank) for rank in order}
        notes = [
            FailureNote(
                rank,
                word["time"],
                word["cause"] if word["trace"] else f"rank {rank}: {word['cause']}",
                "",
                "",
                word["trace"],
                word["code"],
            )
            for rank, word in words.items()
            if word.get("cause")
        ]
        error = explain(
            notes,
            {rank: world.failures[rank][1] for rank in order},
            self.logs,
            oom_kills=oom_kills_since(self.starved),
            world_size=self.layout.processes,
            left_early=world.left(),
            resumes=False,
        )
        code = world.failures.get(
            order[0] if error.rank is None else error.rank, world.failures[order[0]]
        )[1]
        error.exit_code = (
            128 - code if code < 0 else code
        )  # the script's own, not ours: of the rank that began it
        return error


def _stop(world: RankGroup, signals: Signals) -> None:
    number = signals.received or signal.SIGINT
    if world.stop(number):
        os.write(
            2,
            f"\n{signal.Signals(number).name} passed on to all ranks, which have {STOPPED[0][0]:g}"
            " s to leave; once more to kill them\n".encode(),
        )


def _line(error: SamecurveError) -> str:
    """Its cause without the traceback."""
    lines = error.cause.splitlines()
    return next((line for line in lines if line.startswith("rank ")), lines[0])


def _kill(world: RankGroup) -> None:
    world.kill()
    os.write(2, b"\nkilled, all ranks\n")


def _ranks(count: int) -> str:
    return f"{count} rank{'s' if count > 1 else ''}"


def _module(target: str) -> Path | None:
    top = target.partition(".")[0]
    if not top.isidentifier() or (
        find_spec(top) is None and not (Path(f"{top}.py").exists() or Path(top).is_dir())
    ):
        raise UserError(
            f"-m {target}: no module named {top}",
            "a module that this Python finds, or one in this directory",
            "-m",
        )
    return source.of_module(target)


def _script(target: str) -> Path:
    path = Path(target)
    if path.is_dir():
        raise UserError(
            f"{target} is a directory",
            f"a script in it, such as {target.rstrip('/')}/train.py; or -m for a package",
            "SCRIPT",
        )
    if not path.is_file():
        flag = (
            f"; options of samecurve run stand before the script: samecurve run {target} ... SCRIPT"
            if target.startswith("-")
            else ""
        )
        raise UserError(
            f"{target} does not exist",
            f"a Python script's path{flag}; -m MODULE for a module",
            "SCRIPT",
        )
    if not os.access(path, os.R_OK):
        raise UserError(f"{target} can't be read", "mend its permissions", "SCRIPT")
    return path


def _logs(request: Request) -> Path:
    """Made here."""
    logs = (
        request.log_dir
        or free_name(
            request.target.rpartition(".")[2] if request.module else Path(request.target).stem,
            "--log-dir",
        )
        / "logs"
    )
    try:
        logs.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            f"{logs} can't be made: {error.strerror}",
            "--log-dir DIR where you may write",
            "--log-dir",
        ) from None
    return logs


def _set_aside(logs: Path, processes: int, attempt: int) -> None:
    """The logs of an attempt that failed: rank-1.attempt-0.log."""
    for rank in range(processes):
        path = logs / f"rank-{rank}.log"
        path.replace(path.with_name(f"rank-{rank}.attempt-{attempt}.log"))


def _say(what: str, text: str) -> None:
    """On stderr: stdout is the script's."""
    sys.stdout.flush()
    print(f"{what:<6} {text}", file=sys.stderr, flush=True)
