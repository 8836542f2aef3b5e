"""Failures provoked for real, each rank a process.

`python provoke.py HOME NAME:RANKS...` leaves HOME/NAME/rank-N.log and HOME/NAME/exits.json, as a
launcher would. One process imports torch; each rank of each failure is a fork of it.
"""

import json
import os
import signal
import socket
import sys
import warnings
from pathlib import Path

import failures

BATCH = 12  # failures at once: most of them only wait


def fail(name: str, home: Path, rank: int, port: int) -> None:
    """This process, a fork, as that rank."""
    log = os.open(home / f"rank-{rank}.log", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.chdir(home)
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE="2",
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
    signal.alarm(60)
    try:
        getattr(failures, name)()
    except BaseException:
        sys.excepthook(*sys.exc_info())  # torch's own, once it has a process group
        sys.stderr.flush()
        os._exit(1)
    sys.stdout.flush()
    os._exit(0)


def begin(name: str, ranks: int, home: Path) -> dict[int, int]:
    """Process ids, by rank."""
    home.mkdir(parents=True)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    processes = {}
    for rank in range(ranks):
        processes[rank] = os.fork()
        if not processes[rank]:
            fail(name, home, rank, port)
    return processes


def main(home: Path, wanted: list[str]) -> None:
    warnings.simplefilter("ignore")
    import torch._dynamo  # DDP imports it, once for each process otherwise

    torch.set_num_threads(1)
    while wanted:
        batch, wanted = wanted[:BATCH], wanted[BATCH:]
        running = {}
        for name_and_ranks in batch:
            name, _, ranks = name_and_ranks.partition(":")
            running[name] = begin(name, int(ranks), home / name)
        for name, processes in running.items():
            exits = {
                rank: os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
                for rank, process in processes.items()
            }
            (home / name / "exits.json").write_text(json.dumps(exits))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
