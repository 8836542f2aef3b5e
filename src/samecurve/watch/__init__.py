"""The ranks as the hang watch sees them: their processes, and what they answer.

A rank writes its file process-N.json in the run's logs as it starts. The hang watch and the sensors
read the files of this host. The watch asks a rank by a signal for the stacks of its threads, and
for the collectives that it entered.

The signal's own handler writes the stack of the main thread, and needs neither the interpreter nor
its lock. It does not look at other threads: their frames may be freed while they are read, which
ends the process (SIGSEGV). The stacks of all threads, and the record of collectives, are written by
a thread that the same signal wakes and that holds the interpreter's lock, so the rank answers while
its main thread waits inside a library.

A process of its own watches ranks without a launcher beside them, since a thread of the rank can't
look while the rank holds the interpreter's lock. It tells the rank's process of a hang, and kills
the process if it does not answer. It ends when its standard input does.
"""

import faulthandler
import json
import os
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from subprocess import PIPE
from typing import TextIO

import psutil

from samecurve.core.system import read_file_bytes, write_json
from samecurve.errors import RunError
from samecurve.processes import OUTLIVES, Call, Process, start_process

# seconds by which two processes may differ on when a third began: the kernel's time of boot is
# rounded, and corrected
_CLOCK = 2.0
_MOST_JSON = 1 << 16  # bytes of one file


@dataclass(frozen=True)
class HangLimit:
    """How long a rank may be silent, and how the user sets that."""

    floor: float  # seconds of silence that are never a hang; 0: nobody watches
    unknown: float | None = None  # limit of unknown activities; None: ten times the floor
    option: str = "--set devices.hang_floor="  # sets the floor
    unit: str = "step"  # what heartbeats count


def announce(logs: Path, rank: int) -> None:
    """Write down that this process is the rank."""
    values = {
        "pid": os.getpid(),
        "host": socket.gethostname(),
        "since": psutil.Process().create_time(),
    }
    # a full disk; then nobody watches the rank, and training says what is wrong
    with suppress(OSError):
        write_json(logs / f"process-{rank}.json", values)


def live_ranks(logs: Path, foreign: set[str] | None = None) -> dict[int, int]:
    """The live processes of the ranks that were started on this host: rank -> process id.

    foreign: the names of other hosts' files, which are not read again, since there may be thousands

    A process id that the system has given to another process since is left out: ranks may be killed
    by their process ids.
    """
    processes = {}
    for path in logs.glob("process-*.json"):
        if foreign and path.name in foreign:
            continue
        # another program's file, or the process has ended
        with suppress(OSError, ValueError, KeyError, TypeError, psutil.Error):
            values = json.loads(read_file_bytes(path, _MOST_JSON))
            pid = int(values["pid"])
            if values["host"] != socket.gethostname():
                if foreign is not None:
                    foreign.add(path.name)
                continue
            if abs(psutil.Process(pid).create_time() - values["since"]) < _CLOCK:
                processes[int(path.stem.removeprefix("process-"))] = pid
    return processes


def clear_hang_files(logs: Path) -> None:
    """Remove the files by which an earlier start's ranks were watched."""
    for kind in ("heartbeat-*", "meeting-*", "met-*", "stack-*.txt", "collectives-*", "asked"):
        for path in logs.glob(kind):
            path.unlink()


@contextmanager
def meeting(logs: Path, rank: int) -> Iterator[None]:
    """Show in the logs that this rank waits for the others, and after the block that it has met
    them.
    """
    waits = logs / f"meeting-{rank}"
    waits.touch()
    yield
    waits.rename(logs / f"met-{rank}")


def have_met(logs: Path) -> bool:
    """Whether some rank of this start has met the others."""
    return any(logs.glob("met-*"))


def num_waiting(logs: Path) -> int:
    """How many ranks wait for the others: each has imported its libraries."""
    return len(list(logs.glob("meeting-*")))


ASK_SIGNAL = signal.SIGUSR2


@contextmanager
def answering(logs: Path, rank: int) -> Iterator[None]:
    """Answer the hang watch while the block runs. Called in the main thread."""
    woken, wake = os.pipe()
    os.set_blocking(wake, False)
    with open(logs / f"stack-{rank}.txt", "w") as stacks:
        arguments = (woken, stacks, logs / f"collectives-{rank}.json")
        thread = threading.Thread(target=_answer, args=arguments, name="answers", daemon=True)
        old_handler = signal.signal(ASK_SIGNAL, lambda *_: None)
        old_wake = signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
        faulthandler.register(ASK_SIGNAL, file=stacks, all_threads=False, chain=True)
        thread.start()
        try:
            yield
        finally:
            faulthandler.unregister(ASK_SIGNAL)
            signal.set_wakeup_fd(old_wake)
            signal.signal(ASK_SIGNAL, old_handler)
            os.close(wake)
            thread.join()
            os.close(woken)


def _answer(woken: int, stacks: TextIO, path: Path) -> None:
    while number := os.read(woken, 1):
        if number[0] == ASK_SIGNAL:
            # the collectives last: the watch waits for their file
            faulthandler.dump_traceback(file=stacks, all_threads=True)
            from samecurve.watch.flight_recorder import record  # few ranks are ever asked

            with suppress(OSError):  # a full disk: the stacks say something too
                record(str(path))


@dataclass(frozen=True)
class Watched:
    """The process that is watched, and its run."""

    journal: str
    logs: str
    process: int  # id of the process that started the watch process
    world_size: int
    limit: HangLimit


@contextmanager
def watched_from_outside(
    journal: Path, logs: Path, *, world_size: int, limit: HangLimit
) -> Iterator[None]:
    """While the block runs, another process watches the ranks of this host.

    journal, logs: of the run. A hang is written there, and this process ends.
    """
    if not limit.floor:
        yield
        return
    watched = Watched(str(journal.absolute()), str(logs.absolute()), os.getpid(), world_size, limit)
    # in the terminal's process group: Ctrl-Z stops both
    call = Call("samecurve.watch.watch_process", (json.dumps(asdict(watched)),), ended_by=OUTLIVES)
    process = start_process(call, stdin=PIPE, stdout=PIPE)
    thread = threading.Thread(
        target=_end_on_hang, args=(process, watched), name="hangs", daemon=True
    )
    thread.start()
    try:
        yield
    finally:
        assert process.stdin is not None
        with suppress(OSError):
            process.stdin.close()
        process.wait()
        thread.join()


def _end_on_hang(process: Process, watched: Watched) -> None:
    """Wait for the watch process to tell of a hang; then end this process."""
    assert process.stdin is not None
    assert process.stdout is not None
    with process.stdout as output:
        line = output.readline()
    if line:
        process.stdin.close()  # the answer
        error = RunError(**json.loads(line))
        say(watched, error)
        os._exit(error.exit_code)


def say(watched: Watched, error: RunError) -> None:
    """Write the error into the run's journal and on the screen."""
    from samecurve.observe.failed_event import record_failure

    record_failure(Path(watched.journal), Path(watched.logs), error)
    with suppress(OSError):
        os.write(2, f"error: {error}\n".encode())
