"""The threads of a dp strategy: one process, several devices, a thread for each.

A job that fails wakes the others, and one that ends while another still waits for it is an error:
nobody hangs.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from threading import Barrier, BrokenBarrierError
from typing import TypeVar

import torch

T = TypeVar("T")
_Boards = tuple[list[torch.Tensor | None], list[torch.Tensor | None]]


class ThreadPeer:
    """The place of a thread among `count`: how what runs in it adds up values over all of them."""

    def __init__(self, rank: int, barrier: Barrier, boards: _Boards) -> None:
        self.rank, self.world_size = rank, barrier.parties
        self._barrier, self._boards, self._turn = barrier, boards, 0

    def all_reduced(self, values: torch.Tensor) -> torch.Tensor:
        """The sum over all peers, in the order of their threads (so the same bits for all), on the
        device of `values`.

        It may be called from any thread (backward on a GPU runs in autograd's own), but by every
        peer equally often, in the same order. On GPUs each peer has one of its own (autograd has
        one thread for each GPU: two peers on one would wait for each other in backward) and works
        on its default stream, which orders the copies between them.
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
        """Meet the others a last time, so that one which still waits in all_reduced() learns that
        this thread has ended.
        """
        self._exchange(None)

    def _exchange(self, part: torch.Tensor | None) -> list[torch.Tensor | None]:
        """Everyone's part.

        Two boards in turn: who writes on one has met the others since, at the barrier of the turn
        between, and they had read it then.
        """
        board = self._boards[self._turn]
        self._turn = 1 - self._turn
        board[self.rank] = part
        self._barrier.wait()
        return list(board)


class ThreadTeam:
    """`count` threads, made once: job k of every run is done by thread k.

    peers: for each thread, what its job adds up with

    Inside an operation each works with as many threads as the one that makes the team: torch says
    so of a new thread, but OpenMP gives it all cores until it is told.
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
        """All jobs at once; their results, once all have ended.

        What the first to fail raised is raised then.

        torch's modes belong to a thread: autocast or no_grad around this call do not reach the
        jobs.
        """
        if len(jobs) != len(self.peers):
            raise ValueError(f"{len(jobs)} jobs for {len(self.peers)} threads")
        self._barrier.reset()
        errors: list[BaseException] = []
        started = [
            thread.submit(self._work, peer, job, errors)
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
