"""The hang watch: looks at the ranks of this host while they train, finds a rank that has gone
silent, asks all ranks where they are, and ends them.

What the watch saw is left in logs/hang-*.txt.
"""

import json
import os
import signal
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from samecurve.core.events import Beat
from samecurve.errors import RunError
from samecurve.observe import read_beat
from samecurve.watch import ASK_SIGNAL, HangLimit
from samecurve.watch.flight_recorder import has_ended
from samecurve.watch.silence import Silence, SilenceWatch
from samecurve.watch.stacks import locate
from samecurve.watch.verdict import Collective, RankSnapshot, Verdict, describe_all, judge

DATA_WORKERS = "samecurve.worker.data_workers"  # the module that data workers run
OFTEN = 0.2  # seconds between two looks
_ANSWER = 1.5  # seconds in which ranks answer
_DEBUGGERS = ("pdb.py", "bdb.py", "pydevd.py", "debugpy")
_COMPILERS = (
    "_dynamo/convert_frame.py",
    "_dynamo/symbolic_convert.py",
    "_inductor/compile_fx.py",
    "_inductor/scheduler.py",
    "_inductor/async_compile.py",
    "_inductor/cpp_builder.py",
)
_STATES = {
    psutil.STATUS_STOPPED: "T",
    psutil.STATUS_TRACING_STOP: "t",
    psutil.STATUS_DISK_SLEEP: "D",
    psutil.STATUS_ZOMBIE: "Z",
}


class HangWatch:
    """Finds ranks of this host that hang."""

    def __init__(
        self,
        logs: Path,
        processes: Callable[[], Mapping[int, int]],
        *,
        world_size: int,
        limit: HangLimit,
        ask_signal: int = ASK_SIGNAL,
        left: Callable[[], Sequence[int]] = tuple,
        spared: int | None = None,
    ) -> None:
        """logs: where ranks leave heartbeats and answers.

        processes: reads which ranks live on this host: rank -> process id.
        world_size: the number of all ranks.
        ask_signal: the signal that ranks answer.
        left: reads which ranks of this host have ended with 0.
        spared: the process id of a rank that ends itself; None: there is no such rank.
        """
        self._left = left
        self._logs, self._processes, self._world_size = logs, processes, world_size
        self._limit, self._ask_signal, self._spared = limit, ask_signal, spared
        self._next_look = 0.0
        self._watch = SilenceWatch(limit)

    @property
    def due(self) -> bool:
        """Whether it is time for another look()."""
        return time.monotonic() >= self._next_look

    def look(self) -> RunError | None:
        """Look for a hang. May be called at any time; a look takes place every OFTEN seconds.

        Returns the explanation of a hang, if there is one. Its ranks are killed then, except for
        the one that is spared.
        """
        if not self._limit.floor or not self.due:
            return None
        self._next_look = time.monotonic() + OFTEN
        states = {rank: state_of(pid) for rank, pid in self._processes().items()}
        alive = [rank for rank, state in states.items() if state not in {None, "Z"}]
        if "t" in states.values():  # somebody debugs it
            self._watch = SilenceWatch(self._limit)
            return None
        silence = self._watch.observe(time.monotonic(), self._beats(alive), OFTEN)
        return self._explain(silence) if silence else None

    @property
    def all_seen(self) -> bool:
        """Whether every rank has a heartbeat."""
        return len(self._beats(range(self._world_size))) == self._world_size

    def describe_ranks(self) -> str:
        """Ask the ranks where they are. Returns the answer in words."""
        return describe_all(self._snapshots(self._ask_all()), self._limit.unit)

    def kill(self) -> None:
        """Kill the ranks at once: neither a rank that hangs nor the ranks that wait for it in a
        collective hear a SIGTERM.
        """
        for pid in self._processes().values():
            if pid != self._spared:
                with suppress(OSError):
                    os.kill(pid, signal.SIGKILL)

    def _beats(self, ranks: Iterable[int]) -> dict[int, Beat]:
        return {
            rank: beat for rank in ranks if (beat := read_beat(self._logs / f"heartbeat-{rank}"))
        }

    def _explain(self, silence: Silence) -> RunError | None:
        """End the hanging ranks and say why. None: the silence has a reason that ends by itself."""
        dumps = self._ask_all()
        # compiling: a shape comes late, such as an epoch's short tail
        if _any_in(dumps, _COMPILERS) and self._watch.excuse():
            return None
        if _any_in(dumps, _DEBUGGERS):
            self._watch = SilenceWatch(self._limit)
            return None
        verdict = judge(
            self._snapshots(dumps),
            silence,
            self._limit,
            world_size=self._world_size,
            left=self._left(),
        )
        report = self._report(verdict, dumps)
        self.kill()
        return RunError(verdict.cause, verdict.remedy, again=verdict.again, log=str(report))

    def _ask_all(self) -> dict[int, str]:
        """Ask every rank for its stacks. Returns them by rank, for the ranks that answer.

        The stacks of data workers go into a file of their own.
        """
        processes = self._processes()
        files = {rank: self._logs / f"stack-{rank}.txt" for rank in processes}
        sizes = {rank: _size(path) for rank, path in files.items()}
        (self._logs / "asked").touch()
        for rank, pid in processes.items():
            self._collectives(rank).unlink(missing_ok=True)
            if files[rank].exists():  # else nobody there would catch the signal
                _ask(pid, self._ask_signal)
            if self._workers(rank).exists():
                _ask_data_workers(pid, self._ask_signal)
        until = time.monotonic() + _ANSWER
        # a stopped process does not answer
        waiting = [rank for rank, pid in processes.items() if state_of(pid) != "T"]
        while waiting and time.monotonic() < until:
            time.sleep(0.05)
            waiting = [rank for rank in waiting if not self._collectives(rank).exists()]
        return {
            rank: path.read_text(errors="replace")[sizes[rank] :]
            for rank, path in files.items()
            if path.exists()
        }

    def _collectives(self, rank: int) -> Path:
        return self._logs / f"collectives-{rank}.json"

    def _workers(self, rank: int) -> Path:
        return self._logs / f"stack-{rank}-workers.txt"

    def _snapshots(self, dumps: dict[int, str]) -> dict[int, RankSnapshot]:
        snapshots = {}
        for rank, pid in self._processes().items():
            collective = None
            with suppress(OSError, ValueError, KeyError):  # the rank did not answer
                collective = current_collective(json.loads(self._collectives(rank).read_text()))
            snapshots[rank] = RankSnapshot(
                read_beat(self._logs / f"heartbeat-{rank}"),
                state_of(pid) or "",
                locate(dumps.get(rank, ""), _read(self._workers(rank))),
                collective,
            )
        return snapshots

    def _report(self, verdict: Verdict, dumps: dict[int, str]) -> Path:
        path = self._logs / f"hang-{time.strftime('%Y%m%d-%H%M%S')}.txt"
        parts = [verdict.cause, verdict.remedy]
        for rank, dump in sorted(dumps.items()):
            stacks = dump.strip() or "no answer"
            parts.append(f"\nrank {rank}: its threads, the main one last\n{stacks}")
        for rank in sorted(dumps):
            if stacks := _read(self._workers(rank)):
                parts.append(f"\nrank {rank}: its data workers\n{stacks}")
            if record := _read(self._collectives(rank)):
                parts.append(
                    f"\nrank {rank}: its collectives, as torch recorded them\n{record[-4000:]}"
                )
        with suppress(OSError):  # a full disk
            path.write_text("\n".join(parts) + "\n")
        return path


def current_collective(entries: Sequence[Mapping[str, Any]]) -> Collective | None:
    """The collective in a rank's flight record that has not ended, or else the last one.

    The host of a GPU runs ahead: what hangs is the first of many collectives that have not ended.
    """
    if not entries:
        return None
    entry = next((entry for entry in entries if not has_ended(entry)), entries[-1])
    return Collective(
        int(entry["record_id"]),
        str(entry["profiling_name"]).partition(":")[2] or str(entry["profiling_name"]),
        str(entry["input_sizes"]),
        has_ended(entry),
    )


def _any_in(dumps: Mapping[int, str], files: Iterable[str]) -> bool:
    """Whether the stacks of any rank name one of these files."""
    return any(name in dump for dump in dumps.values() for name in files)


def _ask(pid: int, number: int) -> None:
    with suppress(OSError):
        os.kill(pid, number)


def _ask_data_workers(pid: int, number: int) -> None:
    """Ask the data workers of a rank for their stacks."""
    with suppress(psutil.Error):
        for child in psutil.Process(pid).children(recursive=True):
            with suppress(psutil.Error, OSError):
                if DATA_WORKERS in child.cmdline():
                    os.kill(child.pid, number)


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def state_of(pid: int) -> str | None:
    """The kernel's letter for a process that is stopped (T), traced (t), in disk sleep (D) or a
    zombie (Z); '' for one that runs or waits. None: there is no such process.
    """
    try:
        return _STATES.get(psutil.Process(pid).status(), "")
    except psutil.Error:
        return None
