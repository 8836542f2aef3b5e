"""Seconds of training lost to a save of about 300 MB: Samecurve, torch.save, DCP, async DCP.

The sides take turns in one process. The model is a stack of wide layers, 25M parameters in f32 with
AdamW's two moments, on one thread. The lost time is that of the save's own call, and the additional
time of the five steps after it compared with the median of the steps before. Samecurve also writes
a manifest and hashes, and publishes atomically; torch.save and DCP do not.

Run: python -m benchmarks.checkpoint [--turns 5]
"""

import argparse
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import nn

from benchmarks.common import alternate, config_of, trained
from benchmarks.page import publish
from samecurve import Mean
from samecurve.core.planning.planner import plan
from samecurve.core.protocols import Rank
from samecurve.probe import probe
from samecurve.run.directory import Run
from samecurve.run.directory.attempt import Attempt, Requests
from samecurve.tasks import open_task
from samecurve.torch_engine.engine import TorchEngine
from samecurve.torch_engine.process_group import Comm
from samecurve.worker.context import RankContext, checkpoint_store

if TYPE_CHECKING:
    from samecurve.core.events import Event

WIDTH, LAYERS, BATCH, AT, AFTER, LR = 2048, 6, 48, 8, 5, 1e-3
STEPS = AT + AFTER + 1


class Rows:
    def __init__(self) -> None:
        self.x = np.random.default_rng(0).standard_normal((512, WIDTH), dtype=np.float32)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, ids: NDArray[np.int64]) -> dict[str, NDArray[np.float32]]:
        return {"x": self.x[ids]}


class Wide:
    def model(self) -> nn.Module:
        return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))

    def loss(self, model: nn.Module, batch: dict[str, torch.Tensor]) -> Mean:
        return Mean(F.mse_loss(model(batch["x"]), batch["x"], reduction="sum"), len(batch["x"]))

    def train_data(self) -> Rows:
        return Rows()


def lost(ends: list[float]) -> float:
    """Seconds lost to the save after step AT. ends: the times at which the steps ended."""
    usual = statistics.median(b - a for a, b in pairwise(ends[1:AT]))
    return ends[AT + AFTER - 1] - ends[AT - 1] - AFTER * usual


def ours(home: Path) -> float:
    config = config_of(
        {
            "task": f"{Path(__file__)}:Wide",
            "batch": {"samples": BATCH},
            "optimizer": {"lr": LR, "clip": 1.0},
            "train": {"steps": STEPS, "save_every": AT},
            "devices": {"use": "cpu", "strategy": "single", "threads": 1},
        }
    )
    task: Any = open_task(config, str(home / "cache"))
    made, run = plan(config, probe(), task.facts()), Run(home / "run")
    run.checkpoints.mkdir(parents=True)
    saved: list[Event] = []
    attempt = Attempt("benchmark", str(run.home))
    context = RankContext(attempt, run, made, config, Rank(0, 0, 1))
    store = checkpoint_store(context, saved.append, None, Requests(None))
    ends: list[float] = []
    inner = TorchEngine(task, made, config.optimizer, Comm(), [torch.device("cpu")])
    step = inner.step

    def noting(*arguments: Any) -> Any:
        found = step(*arguments)
        ends.append(time.perf_counter())
        return found

    inner.step = noting
    trained(inner, task, made, run.home, store=store)
    assert saved[0].values["bytes"] > 280e6
    return lost(ends)


def loop(save: Callable[[nn.Module, torch.optim.Optimizer, Path], Any], home: Path) -> float:
    torch.manual_seed(0)
    model = Wide().model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, fused=True)
    rows, ends, saving = Rows(), [], None
    for number in range(STEPS):
        x = torch.from_numpy(rows[np.arange(number * 7, number * 7 + BATCH) % len(rows)]["x"])
        loss = F.mse_loss(model(x), x)
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        loss.item()
        ends.append(time.perf_counter())
        if number + 1 == AT:
            saving = save(model, optimizer, home)
    if saving is not None:
        saving.result()
    return lost(ends)


def torch_save(model: nn.Module, optimizer: torch.optim.Optimizer, home: Path) -> None:
    torch.save(
        {"model": model.state_dict(), "optimizer": optimizer.state_dict()}, home / "checkpoint.pt"
    )


def _state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    from torch.distributed.checkpoint.state_dict import get_state_dict

    weights, moments = get_state_dict(model, optimizer)
    return {"model": weights, "optimizer": moments}


def dcp(model: nn.Module, optimizer: torch.optim.Optimizer, home: Path) -> None:
    from torch.distributed.checkpoint.state_dict_saver import save

    save(_state(model, optimizer), checkpoint_id=home / "dcp")


def dcp_async(model: nn.Module, optimizer: torch.optim.Optimizer, home: Path) -> Any:
    from torch.distributed.checkpoint.state_dict_saver import async_save

    return async_save(_state(model, optimizer), checkpoint_id=home / "dcp")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--dry", action="store_true", help="write no result file")
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as scratch:

        def side(run: Callable[[Path], float]) -> Callable[[], float]:
            def once() -> float:
                with tempfile.TemporaryDirectory(dir=scratch) as home:
                    return run(Path(home))

            return once

        sides = {
            "samecurve": side(ours),
            "torch.save": side(lambda home: loop(torch_save, home)),
            "dcp": side(lambda home: loop(dcp, home)),
            "dcp async": side(lambda home: loop(dcp_async, home)),
        }
        alternate(sides, 1)  # imports, first pages of files
        found = alternate(sides, given.turns)
    publish(
        "checkpoint",
        {
            "seconds_lost": found,
            "bytes": 3 * 4 * sum(weight.numel() for weight in Wide().model().parameters()),
            "steps_after": AFTER,
        },
        is_kept=not given.dry,
    )


if __name__ == "__main__":
    main()
