"""Warm ranks: real processes that import torch once and then run one job after another, in worlds
of any size up to theirs.

A cold start takes seconds for each layout; here only the first does. A job that fails in one rank
may leave others waiting in a collective, so its ranks are ended and the next job starts fresh ones.
"""

import importlib
import multiprocessing
import os
import signal
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from samecurve.errors import RunError, SamecurveError, UserError
from samecurve.launch.gpu_settings import gpu_settings, without_user_settings
from samecurve.probe.gpus import find_gpus
from samecurve.worker.cublas import REPEATING_WORKSPACE

PATIENCE = 240.0  # seconds for one job


class JobFailedError(RunError):
    """A job failed in a rank.

    trace: its traceback.
    ended: the rank is gone (the kernel ends one when memory runs out).
    refusal: what it was, where it was a UserError.
    """

    def __init__(
        self,
        cause: str,
        remedy: str,
        trace: str,
        *,
        ended: bool = False,
        refusal: UserError | None = None,
    ) -> None:
        super().__init__(cause, remedy)
        self.trace, self.ended, self.refusal = trace, ended, refusal


class Pool:
    """Warm ranks, started with the first job."""

    def __init__(self, size: int, log: Path | None = None, patience: float = PATIENCE) -> None:
        """size: how many.

        log: a file for what they and their libraries print; None: the terminal.
        patience: seconds for one job.
        """
        self.size, self._log, self._patience = size, log, patience
        self._pipes: list[Connection] = []
        self._processes: list[Any] = []
        self._groups: set[tuple[int, str]] = set()

    def run(
        self, world: int, function: Callable[..., Any], *arguments: Any, backend: str = "gloo"
    ) -> list[Any]:
        """function(rank, group, *arguments) on the first `world` ranks; their results by rank.

        JobFailedError: one of them raised, ended, or took too long.
        """
        if not self._pipes:
            self._start()
        if (world, backend) not in self._groups:
            self._groups.add((world, backend))
            for pipe in self._pipes:
                pipe.send((None, None, world, backend, ()))
        for pipe in self._pipes[:world]:
            pipe.send((function.__module__, function.__name__, world, backend, arguments))
        try:
            return self._answers(world)
        except BaseException:
            self.close()
            raise

    def _answers(self, world: int) -> list[Any]:
        answers: dict[int, Any] = {}
        while len(answers) < world:
            waiting: dict[Any, int] = {
                self._pipes[rank]: rank for rank in range(world) if rank not in answers
            }
            ready = wait(list(waiting), self._patience)
            if not ready:
                raise JobFailedError(
                    f"ranks {', '.join(map(str, waiting.values()))} of {world} gave no answer in"
                    f" {self._patience:g} s",
                    "their log may say why",
                    "",
                )
            for pipe in ready:
                rank = waiting[pipe]
                try:
                    answers[rank], error = self._pipes[rank].recv()
                except EOFError:
                    raise JobFailedError(
                        f"rank {rank} of {world} ended", "its log may say why", "", ended=True
                    ) from None
                if error:
                    cause, remedy, trace, refusal = error
                    user_error = UserError(*refusal) if refusal else None
                    raise JobFailedError(cause, remedy, trace, refusal=user_error)
        return [answers[rank] for rank in range(world)]

    def _start(self) -> None:
        # public as torch.distributed.TCPStore, where type checkers don't see it
        from torch._C._distributed_c10d import TCPStore

        context = multiprocessing.get_context("spawn")
        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        for rank in range(self.size):
            pipe, rank_pipe = context.Pipe()
            member = _Member(rank, self.size, self._store.port, os.getpid(), self._log)
            process = context.Process(target=_serve, args=(member, rank_pipe), daemon=True)
            process.start()
            rank_pipe.close()
            self._pipes.append(pipe)
            self._processes.append(process)

    def close(self) -> None:
        for process in self._processes:
            process.kill()
            process.join()
        for pipe in self._pipes:
            pipe.close()
        self._processes, self._pipes, self._groups = [], [], set()


@dataclass(frozen=True)
class _Member:
    """A rank of the pool, as its process is told."""

    rank: int
    size: int
    port: int  # of the store where ranks meet
    parent: int
    log: Path | None


def _serve(member: _Member, pipe: Connection) -> None:
    from samecurve.run.logs import log_to
    from samecurve.system import die_with

    die_with(member.parent)
    _set_environment()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the one who asked owns signals
    if member.log:
        log_to(member.log)
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    os.environ.update(
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(member.port),
        TORCHELASTIC_USE_AGENT_STORE="True",
    )
    dist.init_process_group("gloo", rank=member.rank, world_size=member.size)
    groups: dict[tuple[int, str], Any] = {}
    while True:
        module, name, world, backend, arguments = pipe.recv()
        if module is None:  # all ranks make a group together, members or not
            groups[world, backend] = dist.new_group(list(range(world)), backend=backend)
            continue
        try:
            function = getattr(importlib.import_module(module), name)
            pipe.send((function(member.rank, groups[world, backend], *arguments), None))
        except BaseException as error:
            cause, remedy, refusal = f"{type(error).__name__}: {error}", "", None
            if isinstance(error, SamecurveError):
                cause, remedy = error.cause, error.remedy
            if isinstance(error, UserError):
                refusal = error.cause, error.remedy, error.where
            cause = f"rank {member.rank} of {world}: {cause}"
            pipe.send((None, (cause, remedy, traceback.format_exc(), refusal)))


def _set_environment() -> None:
    """Before CUDA starts, which reads it once: any later job may be one of train.exact."""
    wanted = gpu_settings(find_gpus(os.environ).vendor) | REPEATING_WORKSPACE
    os.environ.update(without_user_settings(wanted, os.environ))


@contextmanager
def pool(size: int, log: Path | None = None, patience: float = PATIENCE) -> Iterator[Pool]:
    ranks = Pool(size, log, patience)
    try:
        yield ranks
    finally:
        ranks.close()
