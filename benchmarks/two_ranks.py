"""Trainers in the same two CPU processes, over the same group (gloo), one after another in turn."""

import importlib
import os
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import count, pairwise
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import alternate, config_of, paired, trained
from samecurve.core.planning.planner import plan
from samecurve.launch.pool import pool
from samecurve.probe import probe
from samecurve.tasks import open_task
from samecurve.torch_engine.engine import TorchEngine
from samecurve.torch_engine.process_group import Comm

WORLD, EACH, CLIP, LR, WARM = 2, 4, 1.0, 3e-4, 3
Seconds = dict[str, list[float]]  # a step's, by trainer, one a turn
Side = Callable[[int, int, Path], float]  # of rank, steps and a directory: seconds a step


class Clock:
    """Seconds of a step: the median, the first few left out. So steps that are probed do not count,
    one in fifty of a long run.

    late: a step is told of when the next one has been computed, and the last one at once after the
    one before.
    """

    def __init__(self, *, late: bool = False) -> None:
        self._ends: list[float] = []
        self._late = late

    def mark(self, event: Any = None) -> None:
        if event is None or event.kind == "step":
            self._ends.append(time.perf_counter())

    def seconds(self) -> float:
        return statistics.median(self._each())

    def mean(self) -> float:
        return statistics.mean(self._each())

    def _each(self) -> list[float]:
        ends = self._ends[:-1] if self._late else self._ends
        return [end - begin for begin, end in pairwise(ends[WARM - 1 :])]


def time_loop(
    batches: Iterable[Any],
    optimizer: Any,
    *,
    loss_of: Callable[[Any], torch.Tensor],
    backward: Callable[[torch.Tensor], None],
    clip: Callable[[], Any],
) -> float:
    """A loop as a script writes it, that reads its loss and norm every step."""
    clock = Clock()
    for batch in batches:
        loss = loss_of(batch)
        backward(loss)
        norm = clip()
        optimizer.step()
        optimizer.zero_grad()
        float(loss.item() + float(norm))
        clock.mark()
    return clock.seconds()


def time_ours(rank: int, home: Path, steps: int, **sections: Any) -> Clock:
    """sections: of the config, beside those that all sides share"""
    config = config_of(
        {
            **sections,
            "batch": {"samples": WORLD * EACH},
            "optimizer": {"lr": LR, "clip": CLIP},
            "train": {"steps": steps, "exact": False},
            "devices": {"use": f"cpu:{WORLD}", "strategy": "ddp", "threads": 1},
        }
    )
    task: Any = open_task(config, str(home / "cache"))
    its_plan = plan(config, probe(), task.facts())
    comm = Comm(torch.distributed.group.WORLD)
    engine = TorchEngine(task, its_plan, config.optimizer, comm, [torch.device("cpu")])
    clock = Clock(late=True)
    trained(engine, task, its_plan, home / f"run-{rank}", clock.mark, rank=rank)
    return clock


@dataclass(frozen=True)
class Turn:
    """One side's run."""

    module: str  # whose SIDES it is of
    side: str
    steps: int
    home: str
    port: int  # where the other trainers' ranks meet


def one(rank: int, _group: Any, turn: Turn) -> float:
    """In one of the two processes."""
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(WORLD),
        LOCAL_WORLD_SIZE=str(WORLD),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(turn.port),
        GROUP_RANK="0",
        ACCELERATE_USE_CPU="true",
        TORCHELASTIC_RUN_ID="benchmark",
        TORCHELASTIC_RESTART_COUNT="0",
        TORCHELASTIC_MAX_RESTARTS="0",
    )
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    torch.distributed.barrier()
    side: Side = importlib.import_module(turn.module).SIDES[turn.side]
    return side(rank, turn.steps, Path(turn.home))


def race(module: str, names: Sequence[str], *, port: int, turns: int, steps: int) -> Seconds:
    """module: whose SIDES they are"""
    with (
        tempfile.TemporaryDirectory() as scratch,
        pool(WORLD, Path(scratch) / "ranks.log") as ranks,
    ):
        numbers = count()

        def side(name: str) -> Callable[[], float]:
            def once() -> float:
                home = Path(scratch, str(next(numbers)))
                home.mkdir()
                turn = Turn(module, name, steps, str(home), port)
                return float(max(ranks.run(WORLD, one, turn)))

            return once

        try:
            return alternate({name: side(name) for name in names}, turns)
        except Exception:
            sys.stderr.write(Path(scratch, "ranks.log").read_text()[-2000:])
            raise


def ratios(seconds: Seconds, beside: str) -> dict[str, float]:
    """The rate of each side as a part of one side's rate: the median over turns."""
    return {
        name: paired(seconds[beside], times, lambda a, b: a / b) for name, times in seconds.items()
    }
