"""Processes that read samples, for sources that decode. Rows and their order stay the same.

One process opens the sources and forks the workers, which share its memory. Ids go to a worker
through a pipe; it lays rows into memory that it shares with the asking process (shared_rows.py).
Jobs go to the workers in turn and are answered in order, so a slow sample delays other samples but
never changes their order.
"""

import json
import os
import queue
import signal
import threading
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection

import numpy as np

from samecurve.core.determinism.data_order import Ids
from samecurve.core.protocols import RowReader
from samecurve.data.shared_rows import Rows, SharedReader, SharedWriter, open_shared
from samecurve.errors import RunError, SamecurveError, UserError
from samecurve.units import some

_DEPTH = 2  # jobs under way for each worker
_PATIENCE = 5.0  # seconds to wait for the exit status of a worker that ended
_SHOWN = 8  # ids that an error names
_FRAMES = 4  # innermost frames of a traceback that an error shows
_PIPE = 1 << 20  # bytes; the largest pipe that Linux gives an ordinary user
_SET_PIPE_SIZE = 1031  # F_SETPIPE_SZ


@dataclass
class _Job:
    worker: int
    ids: Ids
    rows: Rows | None = None


@dataclass(frozen=True)
class Line:
    """The ends of a worker's two pipes that the asking process holds, or that the worker holds.

    shared: file descriptor of the memory that both share
    """

    jobs: Connection
    rows: Connection
    shared: int

    def close(self) -> None:
        """Close the ends. What is mapped of the memory stays."""
        self.jobs.close()
        self.rows.close()
        os.close(self.shared)


def line() -> tuple[Line, Line]:
    """Open a worker's pipes and memory: the asking process's ends, and the worker's ends."""
    jobs, ask = _pipe()
    take, rows = _pipe()
    shared = open_shared()
    return Line(ask, take, shared), Line(jobs, rows, os.dup(shared))


def _pipe() -> tuple[Connection, Connection]:
    reading, writing = os.pipe()
    try:
        import fcntl

        fcntl.fcntl(writing, _SET_PIPE_SIZE, _PIPE)
    except OSError:  # the pipe keeps the system's default size
        pass
    return Connection(reading, writable=False), Connection(writing, readable=False)


class Workers:
    """The asking side of the workers. Several threads may call ask().

    ended: (most seconds to wait) -> worker and exit status of a worker that ended, or None.
    """

    def __init__(
        self, lines: Sequence[Line], ended: Callable[[float], tuple[int, int] | None]
    ) -> None:
        self._lines, self._ended = lines, ended
        self._memory = [SharedReader(each.shared) for each in lines]
        self._under_way: list[deque[_Job]] = [deque() for _ in lines]
        self._next = 0
        self._lock = threading.Lock()

    @property
    def depth(self) -> int:
        """The number of jobs that keeps all workers busy."""
        return _DEPTH * len(self._lines)

    def ask(self, source: int, ids: Ids, epoch: int) -> Callable[[], Rows]:
        """Begin to read the rows of an epoch; calling the result waits for the rows.

        RunError: a worker ended. An exception of the source is raised here as an error of the run.
        """
        with self._lock:
            job = _Job(self._next % len(self._lines), ids)
            self._next += 1
            self._under_way[job.worker].append(job)
            try:
                self._lines[job.worker].jobs.send((source, ids, epoch))
            except OSError:
                raise self._lost() from None
        return lambda: self._wait(job)

    def _wait(self, job: _Job) -> Rows:
        with self._lock:
            while job.rows is None:
                first = self._under_way[job.worker][0]
                try:
                    first.rows = _receive(self._lines[job.worker].rows, self._memory[job.worker])
                except (EOFError, OSError):
                    raise self._lost() from None
                self._under_way[job.worker].popleft()
        rows, job.rows = job.rows, {}  # the job keeps no rows: they are taken once
        return rows

    def _lost(self) -> RunError:
        ended = self._ended(_PATIENCE)
        if ended is None:
            return RunError(
                "the process that holds the data workers is gone",
                "the rank's log says why",
                "data.workers",
                again=True,
            )
        worker, status = ended
        how = f"left with exit code {status}"
        if status < 0:
            how = f"was ended by {signal.Signals(-status).name}"
        why = ""
        if status == -signal.SIGKILL:
            why = "; the kernel does so when memory runs out, and fewer --num-workers need less"
        reading = ""
        if self._under_way[worker]:
            reading = f" while it read {_samples(self._under_way[worker][0].ids)}"
        return RunError(
            f"data worker {worker} of {len(self._lines)} {how}{reading}{why}",
            "run the same command again: it goes on from the last save",
            "data.workers",
            again=True,
        )


def serve(sources: Sequence[RowReader | None], pipes: Line) -> None:
    """Serve as a worker, until the asking process closes its ends of the pipes."""
    jobs: queue.SimpleQueue[tuple[int, Ids, int] | None] = queue.SimpleQueue()

    def listen() -> None:
        """Take jobs in a thread: otherwise the asker could wait for a worker that waits for it."""
        try:
            while True:
                jobs.put(pipes.jobs.recv())
        except (EOFError, OSError):
            jobs.put(None)

    threading.Thread(target=listen, name="jobs", daemon=True).start()
    memory = SharedWriter(pipes.shared)
    while (job := jobs.get()) is not None:
        which, ids, epoch = job
        source = sources[which]
        assert source is not None
        try:
            rows = source.read(ids, epoch)
        except Exception as error:
            _send_error(pipes.rows, error, ids)
            continue
        if (head := memory.write(rows)) is None:
            _send(pipes.rows, rows)
        else:
            pipes.rows.send_bytes(json.dumps({"shared": head}).encode())


def _send(pipe: Connection, rows: Rows) -> None:
    """Send rows through the pipe, which copies them."""
    arrays = {name: np.ascontiguousarray(array) for name, array in rows.items()}
    head = [(name, array.dtype.str, array.shape) for name, array in arrays.items()]
    pipe.send_bytes(json.dumps({"rows": head}).encode())
    for array in arrays.values():
        if array.nbytes:
            pipe.send_bytes(array.reshape(-1).view(np.uint8).data)


def _send_error(pipe: Connection, error: Exception, ids: Ids) -> None:
    if isinstance(error, SamecurveError):
        parts = error.cause, error.remedy, error.where
    else:
        cause = f"reading {_samples(ids)}: {type(error).__name__}: {error}"
        parts = cause, traceback.format_exc(limit=-_FRAMES), ""
    head = {"error": parts, "user": isinstance(error, UserError)}
    pipe.send_bytes(json.dumps(head).encode())


def _receive(pipe: Connection, memory: SharedReader) -> Rows:
    head = json.loads(pipe.recv_bytes())
    if "shared" in head:
        return memory.read(head["shared"])
    if "error" in head:
        kind = UserError if head["user"] else RunError
        raise kind(*head["error"])
    rows = {}
    for name, dtype, shape in head["rows"]:
        array = np.empty(shape, np.dtype(dtype))
        if array.nbytes:
            pipe.recv_bytes_into(array.reshape(-1).view(np.uint8))
        rows[name] = array
    return rows


def _samples(ids: Ids) -> str:
    word = "sample" if len(ids) == 1 else "samples"
    return f"{word} {some(list(map(str, ids.tolist())), _SHOWN)}"
