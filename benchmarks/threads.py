"""What idle threads do between two operations: spin, sleep at once, or soon.

A small and a larger transformer on two threads, a step being forward, backward and AdamW, by
themselves and beside as many programs as the machine has cores, which compute all the time. Each
variant is a process of its own, in turns. Spin: libgomp's default; sleep: OMP_WAIT_POLICY=passive;
soon: as samecurve sets it (system.let_threads_wait); one thread: none of that. Writes
benchmarks/results/threads-<cpu>.json. Run: python -m benchmarks.threads
"""

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import NamedTuple

from benchmarks.common import alternate
from benchmarks.page import publish
from samecurve.cli.main import let_threads_wait


class Size(NamedTuple):
    hidden: int
    layers: int
    length: int
    steps: int


SIZES = {"small": Size(64, 2, 32, 80), "larger": Size(256, 4, 128, 10)}
THREADS, BATCH, VOCABULARY, WARM = 2, 8, 256, 3


def _ours() -> dict[str, str]:
    """What let_threads_wait adds to an environment without settings of its own."""
    before = dict(os.environ)
    let_threads_wait()
    added = {name: value for name, value in os.environ.items() if name not in before}
    for name in added:
        del os.environ[name]
    return added


VARIANTS: dict[str, tuple[int, dict[str, str]]] = {
    "one thread": (1, {}),
    "spin": (THREADS, {}),
    "sleep": (THREADS, {"OMP_WAIT_POLICY": "PASSIVE"}),
    "soon": (THREADS, _ours()),
}


def seconds_of_steps(size: Size, threads: int) -> float:
    """A step, the mean of those after the warm-up: rare long ones count, too."""
    import torch
    from torch import nn

    torch.set_num_threads(threads)
    torch.manual_seed(0)
    layers = [
        nn.TransformerEncoderLayer(size.hidden, 4, 4 * size.hidden, dropout=0, batch_first=True)
        for _ in range(size.layers)
    ]
    model = nn.Sequential(
        nn.Embedding(VOCABULARY, size.hidden), *layers, nn.Linear(size.hidden, VOCABULARY)
    )
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    tokens = torch.randint(0, VOCABULARY, (BATCH, size.length))
    times = []
    for _ in range(size.steps):
        began = time.perf_counter()
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
        torch.autograd.backward(loss)
        optimizer.step()
        times.append(time.perf_counter() - began)
    return statistics.mean(times[WARM:])


def _measured(size: str, variant: str) -> float:
    """In a process of its own, since libraries read their settings as they are loaded."""
    threads, settings = VARIANTS[variant]
    ended = subprocess.run(
        [sys.executable, "-m", __spec__.name, "--size", size, "--threads", str(threads)],
        check=True,
        capture_output=True,
        text=True,
        env={**os.environ, **settings},
    )
    return float(ended.stdout)


@contextmanager
def _busy_machine() -> Iterator[None]:
    with ExitStack() as programs:
        for _ in range(os.cpu_count() or 1):
            program = subprocess.Popen([sys.executable, "-c", "while True: pass"])
            programs.callback(program.wait)
            programs.callback(program.kill)
        yield


def measure(turns: int) -> dict[str, dict[str, list[float]]]:
    """Seconds a step of each variant, once a turn, by machine and size."""
    seconds = {}
    for size in SIZES:
        sides = {variant: partial(_measured, size, variant) for variant in VARIANTS}
        seconds[f"{size}, quiet"] = alternate(sides, turns)
        with _busy_machine():
            seconds[f"{size}, busy"] = alternate(sides, turns)
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--size", choices=list(SIZES), help=argparse.SUPPRESS)
    parser.add_argument("--threads", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.size:
        print(seconds_of_steps(SIZES[arguments.size], arguments.threads))
        return
    seconds = measure(arguments.turns)
    publish("threads", {"settings": VARIANTS, "seconds": seconds})


if __name__ == "__main__":
    main()
