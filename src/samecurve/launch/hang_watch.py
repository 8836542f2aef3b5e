"""Watches the ranks of this host while they train: finds one that has gone silent, asks all where
they are, and ends them.

What it saw lies in logs/hang-*.txt afterwards.
"""

import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from samecurve.core.events import Beat
from samecurve.diagnose.hang import RankSnapshot, Silence, SilenceWatch, Verdict, judge
from samecurve.diagnose.stacks import locate
from samecurve.errors import RunError
from samecurve.observe.heartbeat import read_beat
from samecurve.worker.hang_responder import ASK, last_collective

READERS = "samecurve.worker.data_workers"  # the module that data workers run
OFTEN = 0.2  # seconds between looks
_ANSWER = 1.5  # seconds in which ranks say where they are
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


def _ask(pid: int, number: int) -> None:
    """This process is asked through this very thread, whose handler runs before it goes on, with
    the interpreter's lock: stacks that are read while another thread's change crash the program.
    """
    with suppress(OSError):
        if pid == os.getpid():
            signal.pthread_kill(threading.get_ident(), number)
        else:
            os.kill(pid, number)


class HangWatch:
    """logs: where ranks beat and answer.

    processes: of the ranks on this host, by rank, read anew. world: how many ranks there are in
    all. floor: seconds of silence that are never a hang; 0: nobody is watched. unknown: likewise,
    until the usual time of a phase is known. ask: the signal that they answer to. words: how to set
    the floor, and what beats count.
    """

    def __init__(
        self,
        logs: Path,
        processes: Callable[[], Mapping[int, int]],
        world: int,
        floor: float,
        unknown: float | None = None,
        ask: int = ASK,
        words: tuple[str, str] = ("--set devices.hang_floor=", "step"),
    ) -> None:
        (
            self._logs,
            self._processes,
            self._world,
            self._floor,
            self._unknown,
            self._ask,
            self._words,
        ) = (
            logs,
            processes,
            world,
            floor,
            unknown,
            ask,
            words,
        )
        self._watch = SilenceWatch(floor, unknown)

    def look(self) -> RunError | None:
        """Called every OFTEN seconds.

        What is said of a hang, if there is one; its ranks are killed then, except this process
        itself.
        """
        if not self._floor:
            return None
        states = {
            rank: state
            for rank, pid in self._processes().items()
            if (state := _state(pid)) not in {None, "Z"}
        }
        if "t" in states.values():  # somebody debugs it
            self._watch = SilenceWatch(self._floor, self._unknown)
            return None
        silence = self._watch.observe(time.monotonic(), self._beats(states), OFTEN)
        return self._found(silence) if silence else None

    @property
    def seen(self) -> bool:
        """Whether every rank has given a sign."""
        return len(self._beats(range(self._world))) == self._world

    def kill(self) -> None:
        """At once: a rank that hangs hears no SIGTERM, and those that wait for it in a collective
        neither.
        """
        for pid in self._processes().values():
            if pid != os.getpid():
                with suppress(OSError):
                    os.kill(pid, signal.SIGKILL)

    def _beats(self, ranks: Iterable[int]) -> dict[int, Beat]:
        return {rank: beat for rank in ranks if (beat := read_beat(self._logs / f"pulse-{rank}"))}

    def _found(self, silence: Silence) -> RunError | None:
        dumps = self._asked()
        if (
            _in(dumps, _COMPILERS) and self._watch.excuse()
        ):  # a shape that comes late, such as an epoch's short tail
            return None
        if _in(dumps, _DEBUGGERS):
            self._watch = SilenceWatch(self._floor, self._unknown)
            return None
        seen = self._seen(dumps)
        verdict = judge(seen, silence.seconds, silence.limit, self._world, *self._words)
        report = self._report(verdict, dumps)
        self.kill()
        return RunError(verdict.cause, verdict.remedy, again=verdict.again, log=str(report))

    def _asked(self) -> dict[int, str]:
        """The stacks of each rank that answers; those of its data workers go into a file of their
        own.
        """
        processes = self._processes()
        files = {rank: self._logs / f"stack-{rank}.txt" for rank in processes}
        before = {rank: _size(path) for rank, path in files.items()}
        (self._logs / "asked").touch()
        for rank, pid in processes.items():
            (self._logs / f"collectives-{rank}.json").unlink(missing_ok=True)
            if files[rank].exists():  # else nobody there would catch the signal
                _ask(pid, self._ask)
            if self._workers(rank).exists():
                _signal_readers(pid, self._ask)
        until = time.monotonic() + _ANSWER
        able = [
            rank for rank, pid in processes.items() if _state(pid) != "T"
        ]  # who is stopped answers nobody
        while time.monotonic() < until and not all(
            (self._logs / f"collectives-{rank}.json").exists() for rank in able
        ):
            time.sleep(0.05)
        return {
            rank: path.read_text(errors="replace")[before[rank] :]
            for rank, path in files.items()
            if path.exists()
        }

    def _workers(self, rank: int) -> Path:
        return self._logs / f"stack-{rank}-workers.txt"

    def _seen(self, dumps: dict[int, str]) -> dict[int, RankSnapshot]:
        seen = {}
        for rank, pid in self._processes().items():
            collective = None
            with suppress(OSError, ValueError, KeyError):  # it gave no answer
                collective = last_collective(
                    json.loads((self._logs / f"collectives-{rank}.json").read_text())
                )
            seen[rank] = RankSnapshot(
                read_beat(self._logs / f"pulse-{rank}"),
                _state(pid) or "",
                locate(dumps.get(rank, ""), _read(self._workers(rank))),
                collective,
            )
        return seen

    def _report(self, verdict: Verdict, dumps: dict[int, str]) -> Path:
        path = self._logs / f"hang-{time.strftime('%Y%m%d-%H%M%S')}.txt"
        parts = [
            verdict.cause,
            verdict.remedy,
            *(
                f"\nrank {rank}: its threads, the main one last\n{dump.strip() or 'no answer'}"
                for rank, dump in sorted(dumps.items())
            ),
        ]
        for rank in sorted(dumps):
            if told := _read(self._workers(rank)):
                parts.append(f"\nrank {rank}: its data workers\n{told}")
            with suppress(OSError):
                parts.append(
                    f"\nrank {rank}: its collectives, as torch recorded"
                    f" them\n{(self._logs / f'collectives-{rank}.json').read_text()[-4000:]}"
                )
        with suppress(OSError):  # a full disk
            path.write_text("\n".join(parts) + "\n")
        return path


def _in(dumps: Mapping[int, str], files: Iterable[str]) -> bool:
    """Whether some rank is in code of these files."""
    return any(name in dump for dump in dumps.values() for name in files)


@contextmanager
def overseen(hangs: HangWatch, found: Callable[[RunError], None]) -> Iterator[None]:
    """Looked at from a thread of this very process while the block runs.

    found: is told of a hang, and ends the process.
    """
    stop = threading.Event()

    def work() -> None:
        while not stop.wait(OFTEN):
            if error := hangs.look():
                found(error)
                return

    thread = threading.Thread(target=work, name="hangs", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def _signal_readers(pid: int, number: int) -> None:
    """Tell the data workers of a rank to write their stacks."""
    with suppress(psutil.Error):
        for child in psutil.Process(pid).children(recursive=True):
            with suppress(psutil.Error, OSError):
                if READERS in child.cmdline():
                    os.kill(child.pid, number)


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _state(pid: int) -> str | None:
    """Of a process, as the kernel names the odd ones; '' for one that runs or waits.

    None: there is no such process.
    """
    try:
        return _STATES.get(psutil.Process(pid).status(), "")
    except psutil.Error:
        return None
