"""Warm ranks: processes that run one job after another, in worlds of any size up to their number.

They are forked from a process that has imported torch, so only the first job pays for a cold
start. A job that fails in one rank may leave other ranks waiting in a collective. Then all ranks
are ended, and the next job starts fresh ones. If all ranks of the job end by themselves, they serve
on, in a new group.
"""

import gc
import importlib
import json
import os
import signal
import socket
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any

from samecurve.errors import RunError, SamecurveError, UserError
from samecurve.launch.gpu_settings import gpu_settings, without_user_settings
from samecurve.probe import find_gpus
from samecurve.processes import Call, fork_server, start_process
from samecurve.worker.cublas import REPEATING_WORKSPACE

if TYPE_CHECKING:
    from samecurve.processes import Process

PATIENCE = 240.0  # seconds for one job
_SOON = 2.0  # seconds to wait for further failures after the first one


class JobFailedError(RunError):
    """A job failed in a rank.

    trace: the traceback.
    ended: the rank is gone (the kernel ends a process when memory runs out).
    refusal: the error, where it was a UserError.
    apart: the rank could not make a group, so it can work with the others no more.
    """

    def __init__(
        self,
        cause: str,
        remedy: str,
        trace: str,
        *,
        ended: bool = False,
        refusal: UserError | None = None,
        apart: bool = False,
    ) -> None:
        super().__init__(cause, remedy)
        self.trace, self.ended, self.refusal, self.apart = trace, ended, refusal, apart


class Pool:
    """Warm ranks, started with the first job."""

    def __init__(
        self,
        size: int,
        log: Path | None = None,
        patience: float = PATIENCE,
        *,
        libraries: Sequence[str] = (),
    ) -> None:
        """size: the number of ranks.

        log: a file for what the ranks and their libraries print; None: the terminal.
        patience: seconds for one job.
        libraries: modules that the jobs need. They are imported before the ranks are forked.
        """
        self.size, self._log, self._patience = size, log, patience
        self._modules = ("torch", "samecurve.torch_engine.engine", *libraries, __name__)
        self._pipes: list[Connection] = []
        self._processes: list[Process] = []
        self._groups: set[tuple[int, str]] = set()

    def run(
        self, world: int, function: Callable[..., Any], *arguments: Any, backend: str = "gloo"
    ) -> list[Any]:
        """Call function(rank, group, *arguments) on the first `world` ranks.

        Returns the results by rank. JobFailedError: a rank raised, ended, or took too long.
        """
        if not self._pipes:
            self._start()
        if (world, backend) not in self._groups:
            self._groups.add((world, backend))
            self._send(self.size, (None, None, world, backend, ()))
        job = (_module_of(function), function.__name__, world, backend, arguments)
        self._send(world, job)
        try:
            answers = self._answers(world)
        except BaseException:
            self.close()
            raise
        failures = [one for one in answers.values() if isinstance(one, JobFailedError)]
        if not failures:
            return [answers[rank] for rank in range(world)]
        if len(answers) < world or any(failure.apart for failure in failures):
            self.close()
        self._groups.discard((world, backend))  # ranks may have made different calls in it
        raise failures[0]

    def _send(self, count: int, message: tuple[Any, ...]) -> None:
        """Send a message to the first ranks. One that is gone is found where it is to answer."""
        for pipe in self._pipes[:count]:
            with suppress(BrokenPipeError, ConnectionResetError):
                pipe.send(message)

    def _answers(self, world: int) -> dict[int, Any]:
        """Wait for the ranks' answers. Returns them by rank, in the order in which they came.

        A failure in a rank is returned as a JobFailedError. After a failure, only the ranks that
        end within a moment are waited for.

        JobFailedError: a rank is gone, or took too long.
        """
        answers: dict[int, Any] = {}
        has_failed = False
        while len(answers) < world:
            waiting: dict[Any, int] = {
                self._pipes[rank]: rank for rank in range(world) if rank not in answers
            }
            ready = wait(list(waiting), _SOON if has_failed else self._patience)
            if not ready and has_failed:
                break
            if not ready:
                raise JobFailedError(
                    f"ranks {', '.join(map(str, waiting.values()))} of {world} gave no answer in"
                    f" {self._patience:g} s",
                    "their log may say why",
                    "",
                )
            for pipe in ready:
                rank = waiting[pipe]
                answers[rank] = _receive(self._pipes[rank], rank, world)
                has_failed |= isinstance(answers[rank], JobFailedError)
        return answers

    def _start(self) -> None:
        # public as torch.distributed.TCPStore, where type checkers don't see it
        from torch._C._distributed_c10d import TCPStore

        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        server = fork_server(self._modules)
        try:
            for rank in range(self.size):
                ours, theirs = socket.socketpair()
                member = _Member(
                    rank=rank,
                    size=self.size,
                    port=self._store.port,
                    log=str(self._log) if self._log else None,
                    directory=os.getcwd(),
                    module_path=tuple(sys.path),
                )
                call = Call(__name__, (json.dumps(asdict(member)),), "serve")
                with theirs:
                    started = start_process(call, server=server, stdin=theirs.fileno())
                    self._processes.append(started)
                self._pipes.append(Connection(ours.detach()))
        finally:
            if server:
                server.close()

    def close(self) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.wait()
        for pipe in self._pipes:
            pipe.close()
        self._processes, self._pipes, self._groups = [], [], set()


def _module_of(function: Callable[..., Any]) -> str:
    """The module in which a rank finds the function. `python -m` calls its own module __main__."""
    spec = sys.modules[function.__module__].__spec__
    return spec.name if spec else function.__module__


def _receive(pipe: Connection, rank: int, world: int) -> Any:
    """The result of a rank's job; if the job failed, a JobFailedError.

    JobFailedError: the rank itself has ended.
    """
    try:
        value, error = pipe.recv()
    except (EOFError, ConnectionResetError):  # it may have left a message unread
        raise JobFailedError(
            f"rank {rank} of {world} ended", "its log may say why", "", ended=True
        ) from None
    if not error:
        return value
    cause, remedy, trace, refusal, apart = error
    user_error = UserError(*refusal) if refusal else None
    return JobFailedError(cause, remedy, trace, refusal=user_error, apart=apart)


@dataclass(frozen=True, kw_only=True)
class _Member:
    """A rank of the pool: what its process needs to know."""

    rank: int
    size: int
    port: int  # of the store where ranks meet
    log: str | None
    directory: str
    module_path: tuple[str, ...]  # sys.path, to find the jobs' modules


def serve(value: str) -> None:
    """Run the jobs that come on standard input, until the pool ends this process."""
    from samecurve.run.directory.attempt import log_to

    member = _Member(**json.loads(value))
    pipe = Connection(os.dup(0))
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    os.chdir(member.directory)
    sys.path[:] = member.module_path
    # CUDA reads these variables once, when it starts, and any later job may need the same bits
    wanted = gpu_settings(find_gpus(os.environ).vendor) | REPEATING_WORKSPACE
    os.environ.update(without_user_settings(wanted, os.environ))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the pool's process owns signals
    if member.log:
        log_to(Path(member.log))
    groups = _Groups(member)
    while True:
        try:
            module, name, world, backend, arguments = pipe.recv()
        except EOFError:  # the pool's process has gone
            return
        if module is None:  # all ranks make a group together, members or not
            groups.make(world, backend)
            continue
        if groups.fault:
            cause, remedy = _explain(groups.fault)
            cause = f"rank {member.rank} of {world} could make no group with the others: {cause}"
            trace = "".join(traceback.format_exception(groups.fault))
            pipe.send((None, (cause, remedy, trace, None, True)))
            continue
        try:
            function = getattr(importlib.import_module(module), name)
            pipe.send((function(member.rank, groups.made[world, backend], *arguments), None))
        except BaseException as error:
            cause, remedy, refusal = f"{type(error).__name__}: {error}", "", None
            if isinstance(error, SamecurveError):
                cause, remedy = error.cause, error.remedy
            if isinstance(error, UserError):
                refusal = error.cause, error.remedy, error.where
            cause = f"rank {member.rank} of {world}: {cause}"
            pipe.send((None, (cause, remedy, traceback.format_exc(), refusal, False)))


class _Groups:
    """The groups of a rank.

    A fault is kept, and told when a job comes: the rank makes no group any more, since the ranks
    name their groups by counting them.
    """

    def __init__(self, member: _Member) -> None:
        """Meet the other ranks."""
        self._rank = member.rank
        self.made: dict[tuple[int, str], Any] = {}
        self.fault: BaseException | None = None
        try:
            import torch
            import torch.distributed as dist

            torch.set_num_threads(1)
            os.environ.update(
                MASTER_ADDR="127.0.0.1",
                MASTER_PORT=str(member.port),
                TORCHELASTIC_USE_AGENT_STORE="True",
            )
            dist.init_process_group("gloo", rank=member.rank, world_size=member.size)
        except BaseException as error:
            self.fault = error

    def make(self, world: int, backend: str) -> None:
        """Make the group of the first ranks, together with all ranks."""
        if self.fault:
            return
        import torch.distributed as dist

        replaced = self.made.pop((world, backend), None)
        try:
            if replaced is not None:
                # What a failed job has left in circles holds the group, and its connections, open:
                # another rank would wait here for ever for what it has begun in the group.
                gc.collect()
            self.made[world, backend] = dist.new_group(list(range(world)), backend=backend)
            if replaced is not None and self._rank < world:
                dist.destroy_process_group(replaced)  # a Gloo group has threads, which wake often
        except BaseException as error:
            self.fault = error


def _explain(error: BaseException) -> tuple[str, str]:
    """The cause and the remedy of an exception of torch's."""
    from samecurve.diagnose.known_failures import diagnose
    from samecurve.diagnose.tracebacks import clip

    cause = f"{type(error).__name__}: {error}"
    known = diagnose(cause)
    remedy = known.remedy if known else "`samecurve check` tries whether ranks can meet here"
    return clip(cause.splitlines()[0]), remedy


@contextmanager
def pool(
    size: int,
    log: Path | None = None,
    patience: float = PATIENCE,
    *,
    libraries: Sequence[str] = (),
) -> Iterator[Pool]:
    """A Pool for the length of the block."""
    ranks = Pool(size, log, patience, libraries=libraries)
    try:
        yield ranks
    finally:
        ranks.close()
