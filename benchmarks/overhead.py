"""What a trainer adds to a step: ours, Accelerate, Lightning Fabric, Lightning Trainer and HF
Trainer beside a raw PyTorch loop that clips and logs alike.

A tiny model, one CPU thread, one process. All get the same batches (rows of a permutation, gathered
and made tensors); ours from its own feed, which adds order, prefetch and ids. Every side writes a
line with loss and learning rate each step (raw, ours, Accelerate, Fabric and HF Trainer with the
gradient's norm, too). Every other turn goes backwards; what counts is the median over turns of the
difference to the raw loop of the same turn. Run: python -m benchmarks.overhead [--turns 5] [--steps
3000] [--only samecurve,raw]. Others are left out, with a word, where they are not installed (the
extra `bench`).
"""

import argparse
import json
import logging
import statistics
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.common import Gaps, alternate, config_of, installed, paired, trained, write
from benchmarks.tiny_task import Rows, Tiny
from benchmarks.trainer_side import Settings, train_by_trainer
from samecurve.core.planning.planner import plan
from samecurve.probe import probe
from samecurve.tasks import open_task
from samecurve.torch_engine.engine import TorchEngine
from samecurve.torch_engine.process_group import Comm

BATCH, CLIP, LR, WARM, BLOCK = 8, 1.0, 1e-3, 200, 100
NEEDS = {
    "accelerate": "accelerate",
    "fabric": "lightning",
    "lightning": "lightning",
    "hf trainer": "transformers",
}


class Log:
    """A JSON line each step, flushed now and then, as ours writes its journal; and the clock."""

    def __init__(self, path: Path) -> None:
        self._file = open(path, "w", buffering=1 << 16)  # noqa: SIM115
        self.gaps = Gaps(BLOCK)

    def line(self, step: int, **values: float) -> None:
        self._file.write(json.dumps({"step": step, **values}) + "\n")
        self.gaps.mark()


def batches(steps: int) -> Iterator[dict[str, torch.Tensor]]:
    """As a careful script makes them: an epoch's permutation, rows gathered at once."""
    rows, drawn, done = Rows(), np.random.default_rng(1), 0
    while True:
        order = drawn.permutation(len(rows))
        for first in range(0, len(order), BATCH):
            if done == steps:
                return
            done += 1
            yield {
                name: torch.from_numpy(array)
                for name, array in rows[order[first : first + BATCH]].items()
            }


def parts() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Tiny().model()
    return model, torch.optim.AdamW(model.parameters(), lr=LR, fused=True)


def raw(steps: int, home: Path) -> float:
    model, optimizer = parts()
    log = Log(home / "log")
    for step, batch in enumerate(batches(steps)):
        loss = F.cross_entropy(model(batch["x"]), batch["y"])
        loss.backward()  # type: ignore[no-untyped-call]
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
        log.line(step, loss=loss.item(), grad_norm=norm.item(), lr=LR)
    return log.gaps.seconds(WARM)


def ours(steps: int, home: Path) -> float:
    config = config_of(
        {
            "task": f"{Path(__file__).parent / 'tiny_task.py'}:Tiny",
            "batch": {"samples": BATCH},
            "optimizer": {"lr": LR, "clip": CLIP},
            "train": {"steps": steps},
            "devices": {"use": "cpu", "strategy": "single", "threads": 1},
        }
    )
    task: Any = open_task(config, str(home / "cache"))
    made = plan(config, probe(), task.facts())
    gaps = Gaps(BLOCK)
    trained(
        TorchEngine(task, made, config.optimizer, Comm(), [torch.device("cpu")]),
        task,
        made,
        home / "run",
        gaps.mark,
    )
    return gaps.seconds(WARM)


def accelerate(steps: int, home: Path) -> float:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model, optimizer = accelerator.prepare(*parts())
    log = Log(home / "log")
    for step, batch in enumerate(batches(steps)):
        loss = F.cross_entropy(model(batch["x"]), batch["y"])
        accelerator.backward(loss)
        norm = accelerator.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
        log.line(step, loss=loss.item(), grad_norm=float(norm), lr=LR)
    return log.gaps.seconds(WARM)


def fabric(steps: int, home: Path) -> float:
    from lightning.fabric import Fabric

    made = Fabric(accelerator="cpu", devices=1)
    made.launch()
    model, optimizer = made.setup(*parts())
    log = Log(home / "log")
    for step, batch in enumerate(batches(steps)):
        loss = F.cross_entropy(model(batch["x"]), batch["y"])
        made.backward(loss)
        norm = made.clip_gradients(model, optimizer, max_norm=CLIP)
        optimizer.step()
        optimizer.zero_grad()
        log.line(step, loss=loss.item(), grad_norm=float(norm), lr=LR)
    return log.gaps.seconds(WARM)


def lightning(steps: int, home: Path) -> float:
    import lightning as lit

    log = Log(home / "log")

    class Module(lit.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.made = parts()

        def training_step(self, batch: Any, _index: int) -> Any:
            return F.cross_entropy(self.inner(batch["x"]), batch["y"])

        def configure_optimizers(self) -> Any:
            return self.made

        def on_train_batch_end(self, outputs: Any, _batch: Any, index: int) -> None:
            log.line(index, loss=outputs["loss"].item(), lr=LR)

    class Loader:
        def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
            return batches(steps)

    off = dict.fromkeys(
        ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False
    )
    made = lit.Trainer(
        accelerator="cpu",
        devices=1,
        max_steps=steps,
        gradient_clip_val=CLIP,
        default_root_dir=home,
        **off,
    )
    made.fit(Module(), Loader())
    return log.gaps.seconds(WARM)


def hf_trainer(steps: int, home: Path) -> float:
    log = Log(home / "log")

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.inner = Tiny().model()

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"loss": F.cross_entropy(self.inner(x), y)}

    def write_line(step: int, logs: Mapping[str, Any]) -> None:
        log.line(step, loss=float(logs["loss"]), grad_norm=float(logs["grad_norm"]), lr=LR)

    train_by_trainer(
        Model(),
        lambda: batches(steps),
        write_line,
        Settings(home=home, steps=steps, samples=BATCH, lr=LR, clip=CLIP),
        Rows(),
    )
    return log.gaps.seconds(WARM)


SIDES: dict[str, Callable[[int, Path], float]] = {
    "raw": raw,
    "samecurve": ours,
    "fabric": fabric,
    "accelerate": accelerate,
    "lightning": lightning,
    "hf trainer": hf_trainer,
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--only", default="")
    parser.add_argument("--dry", action="store_true", help="write no result file")
    given = parser.parse_args()
    warnings.simplefilter("ignore")  # the other trainers', of loaders without workers
    for name in ("lightning", "lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    torch.set_num_threads(1)
    chosen = [name for name in SIDES if not given.only or name in given.only.split(",")]
    absent = [
        name
        for name in chosen
        if (name in NEEDS and not installed([NEEDS[name]]))
        or (name == "hf trainer" and not installed(["accelerate"]))
    ]
    for name in absent:
        print(f"left out  {name}: not installed")
    with tempfile.TemporaryDirectory() as scratch:
        number = iter(range(10_000))

        def side(name: str) -> Callable[[], float]:
            def once() -> float:
                home = Path(scratch, str(next(number)))
                home.mkdir()
                return SIDES[name](given.steps, home)

            return once

        found = alternate({name: side(name) for name in chosen if name not in absent}, given.turns)
    added = {
        name: paired(times, found["raw"], lambda a, b: a - b)
        for name, times in found.items()
        if name != "raw"
    }
    print(f"{'trainer':<12}{'us a step':>10}{'beyond raw':>12}   each turn's difference")
    for name, times in found.items():
        beyond = ""
        if name in added:
            turns = zip(times, found["raw"], strict=True)
            each = ", ".join(f"{(time - raw_time) * 1e6:.0f}" for time, raw_time in turns)
            beyond = f"{added[name] * 1e6:12.0f}   {each}"
        print(f"{name:<12}{statistics.median(times) * 1e6:10.0f}{beyond}")
    if not given.dry:
        print(
            write(
                "overhead",
                {"seconds": found, "added_seconds": added, "steps": given.steps, "batch": BATCH},
            )
        )


if __name__ == "__main__":
    main()
