"""One warm pool of four ranks for the whole test session: real processes, real Gloo; sub-groups serve worlds 1 to 4."""

import importlib
import multiprocessing
import os
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

SIZE = 4
PATIENCE = 240.0  # seconds for one job


class Pool:
    def __init__(self) -> None:
        from torch._C._distributed_c10d import TCPStore

        context = multiprocessing.get_context("spawn")
        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._pipes: list[Connection] = []
        self._processes = []
        for rank in range(SIZE):
            mine, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, self._store.port, theirs), daemon=True)
            process.start()
            self._pipes.append(mine)
            self._processes.append(process)

    def run(self, world: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """function(rank, group, *arguments) on the first `world` ranks; their results by rank. What one raises is raised here."""
        for pipe in self._pipes[:world]:
            pipe.send((function.__module__, function.__name__, world, arguments))
        answers = []
        for rank, pipe in enumerate(self._pipes[:world]):
            if not pipe.poll(PATIENCE):
                raise TimeoutError(f"rank {rank} of {world} has not answered in {PATIENCE} s")
            answers.append(pipe.recv())
        for rank, (result, error) in enumerate(answers):
            if error:
                raise AssertionError(f"rank {rank} of {world}:\n{error}")
            answers[rank] = result
        return answers

    def close(self) -> None:
        for process in self._processes:
            process.kill()
            process.join()


def _serve(rank: int, port: int, pipe: Connection) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), TORCHELASTIC_USE_AGENT_STORE="True")
    dist.init_process_group("gloo", rank=rank, world_size=SIZE)
    groups = {world: dist.new_group(list(range(world))) for world in range(1, SIZE + 1)}
    while True:
        module, name, world, arguments = pipe.recv()
        try:
            function = getattr(importlib.import_module(module), name)
            pipe.send((function(rank, groups[world], *arguments), None))
        except BaseException:
            pipe.send((None, traceback.format_exc()))


@contextmanager
def pool() -> Iterator[Pool]:
    made = Pool()
    try:
        yield made
    finally:
        made.close()
