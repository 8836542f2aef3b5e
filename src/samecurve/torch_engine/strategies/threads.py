"""The threads of a dp strategy: one process, several devices, a thread for each.

Nothing hangs: a job that fails wakes the others, and it is an error if a job ends while another
still waits for it.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextvars import copy_context
from threading import Barrier, BrokenBarrierError
from typing import TypeVar

import torch

T = TypeVar("T")
_Boards = tuple[list[torch.Tensor | None], list[torch.Tensor | None]]


class ThreadPeer:
    """A thread's place in a team. It adds up values over all threads of the team."""

    def __init__(self, rank: int, barrier: Barrier, boards: _Boards) -> None:
        self.rank, self.world_size = rank, barrier.parties
        self._barrier, self._boards, self._turn = barrier, boards, 0

    def all_reduced(self, values: torch.Tensor) -> torch.Tensor:
        """The sum over all peers, in the order of their threads (so the same bits for all), on the
        device of `values`.

        It may be called from any thread (backward on a GPU runs in a thread of autograd), but every
        peer must call it equally often and in the same order. Each peer needs a GPU of its own:
        autograd has one thread for each GPU, so two peers on one GPU would wait for each other in
        backward. A peer works on the default stream, which orders the copies between GPUs.
        """
        parts = self._exchange(values.detach().clone())
        total = torch.zeros_like(values)
        for rank, part in enumerate(parts):
            if part is None:
                raise RuntimeError(
                    f"thread {rank} has ended while thread {self.rank} waits for it in"
                    " all_reduced(): all must call it equally often"
                )
            total += part.to(total.device)
        return total

    def begin(self) -> None:
        self._turn = 0

    def end(self) -> None:
        """Meet the other threads a last time.

        A thread that still waits in all_reduced() learns that this one has ended.
        """
        self._exchange(None)

    def _exchange(self, part: torch.Tensor | None) -> list[torch.Tensor | None]:
        """The parts of all threads.

        Two boards are used in turn. Before a thread writes on a board again, it has met the others
        at the barrier of the turn between; by then they had read that board.
        """
        board = self._boards[self._turn]
        self._turn = 1 - self._turn
        board[self.rank] = part
        self._barrier.wait()
        return list(board)


class ThreadTeam:
    """A team of `count` threads, made once: thread k does job k of every run.

    Inside an operation each thread uses as many threads as the thread that makes the team. This has
    to be set: torch reports that number for a new thread, but OpenMP gives the thread all cores.

    peers: one for each thread, by which its job adds up values
    """

    def __init__(self, count: int) -> None:
        self._barrier = Barrier(count)
        boards: _Boards = ([None] * count, [None] * count)
        self.peers = [ThreadPeer(index, self._barrier, boards) for index in range(count)]
        self._threads = [
            ThreadPoolExecutor(
                1, f"samecurve-dp-{index}", torch.set_num_threads, (torch.get_num_threads(),)
            )
            for index in range(count)
        ]  # joined at exit too, where nobody closes

    def run(self, jobs: Sequence[Callable[[], T]]) -> list[T]:
        """Do all jobs at once. Returns their results when all have ended.

        The error of the first job that failed is raised then.

        torch's modes belong to a thread: autocast or no_grad around this call do not reach the
        jobs. Context variables do, in which torch's compiler keeps its settings.
        """
        if len(jobs) != len(self.peers):
            raise ValueError(f"{len(jobs)} jobs for {len(self.peers)} threads")
        self._barrier.reset()
        errors: list[BaseException] = []
        started = [
            thread.submit(copy_context().run, self._work, peer, job, errors)
            for thread, peer, job in zip(self._threads, self.peers, jobs, strict=True)
        ]
        try:
            wait(started)
        except BaseException:  # Ctrl-C: no job is left behind
            self._barrier.abort()
            wait(started)
            raise
        if errors:
            raise next(
                (error for error in errors if not isinstance(error, BrokenBarrierError)), errors[0]
            )
        return [job.result() for job in started]

    def _work(self, peer: ThreadPeer, job: Callable[[], T], errors: list[BaseException]) -> T:
        peer.begin()
        try:
            result = job()
            peer.end()
        except BaseException as error:
            errors.append(error)
            self._barrier.abort()
            raise
        return result

    def close(self) -> None:
        for thread in self._threads:
            thread.shutdown()
