"""Tokens per second of a 10.7M-parameter GPT on two CPU ranks of one thread each: ours, a plain DDP
loop, Accelerate, Fabric and HF Trainer, in turn.

All in the same two processes, over the same group (gloo), on the same model, batches, clipping and
optimizer; each reads its loss and norm every step. Run: python -m benchmarks.ddp [--turns 5]
[--steps 12]. Those that are not installed are left out, with a word (the extra `bench`).
"""

import argparse
import os
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.common import alternate, config_of, installed, paired, trained, write
from benchmarks.gpt_task import LENGTH, Gpt, Rows, loss_of
from samecurve.core.planning.planner import plan
from samecurve.launch.pool import pool
from samecurve.probe import probe
from samecurve.tasks import open_task
from samecurve.torch_engine.engine import TorchEngine
from samecurve.torch_engine.process_group import Comm

WORLD, EACH, CLIP, LR, WARM = 2, 4, 1.0, 3e-4, 3
PORT = 29_400  # where the other trainers' ranks meet
NEEDS = {
    "accelerate": ("accelerate",),
    "fabric": ("lightning",),
    "hf trainer": ("transformers", "accelerate"),
}


class Clock:
    """Seconds a step, the first few left out.

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
        ends = self._ends[:-1] if self._late else self._ends
        return (ends[-1] - ends[WARM - 1]) / (len(ends) - WARM)


def batches(rank: int, steps: int) -> Iterator[dict[str, torch.Tensor]]:
    rows = Rows()
    order = np.random.default_rng(1).permutation(len(rows))
    for step in range(steps):
        first = (step * WORLD + rank) * EACH
        yield {
            name: torch.from_numpy(np.ascontiguousarray(array))
            for name, array in rows[order[first : first + EACH]].items()
        }


def parts() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Gpt().model()
    return model, torch.optim.AdamW(model.parameters(), lr=LR, fused=True)


def plain(rank: int, steps: int, _home: Path, **how: Any) -> float:
    inner, optimizer = parts()
    model, clock = DistributedDataParallel(inner, gradient_as_bucket_view=True, **how), Clock()
    for batch in batches(rank, steps):
        loss = loss_of(model, batch["tokens"], batch["labels"], "mean")
        loss.backward()  # type: ignore[no-untyped-call]
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
        float(loss.item() + norm.item())
        clock.mark()
    return clock.seconds()


def static(rank: int, steps: int, home: Path) -> float:
    """What it would gain to promise that every step has the same graph; ours does not, since it
    looks for parameters that a step left out.
    """
    return plain(rank, steps, home, static_graph=True)


def small(rank: int, steps: int, home: Path) -> float:
    """Buckets of 5 MiB instead of torch's 25."""
    return plain(rank, steps, home, bucket_cap_mb=5)


def ours(rank: int, steps: int, home: Path) -> float:
    config = config_of(
        {
            "task": f"{Path(__file__).parent / 'gpt_task.py'}:Gpt",
            "batch": {"samples": WORLD * EACH},
            "optimizer": {"lr": LR, "clip": CLIP},
            "train": {"steps": steps},
            "devices": {"use": f"cpu:{WORLD}", "strategy": "ddp", "threads": 1},
        }
    )
    task: Any = open_task(config, str(home / "cache"))
    made = plan(config, probe(), task.facts())
    clock = Clock(late=True)
    trained(
        TorchEngine(
            task,
            made,
            config.optimizer,
            Comm(torch.distributed.group.WORLD),
            [torch.device("cpu")],
        ),
        task,
        made,
        home / f"run-{rank}",
        clock.mark,
        rank=rank,
    )
    return clock.seconds()


def accelerate(rank: int, steps: int, _home: Path) -> float:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    assert accelerator.num_processes == WORLD
    model, optimizer = accelerator.prepare(*parts())
    clock = Clock()
    for batch in batches(rank, steps):
        loss = loss_of(model, batch["tokens"], batch["labels"], "mean")
        accelerator.backward(loss)
        norm = accelerator.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
        float(loss.item() + float(norm))
        clock.mark()
    return clock.seconds()


def fabric(rank: int, steps: int, _home: Path) -> float:
    from lightning.fabric import Fabric

    made = Fabric(accelerator="cpu", devices=WORLD, strategy="ddp")
    made.launch()
    assert made.world_size == WORLD
    model, optimizer = made.setup(*parts())
    clock = Clock()
    for batch in batches(rank, steps):
        loss = loss_of(model, batch["tokens"], batch["labels"], "mean")
        made.backward(loss)
        norm = made.clip_gradients(model, optimizer, max_norm=CLIP)
        optimizer.step()
        optimizer.zero_grad()
        float(loss.item() + float(norm))
        clock.mark()
    return clock.seconds()


def hf_trainer(rank: int, steps: int, home: Path) -> float:
    from transformers.trainer import Trainer
    from transformers.trainer_callback import PrinterCallback, TrainerCallback
    from transformers.training_args import TrainingArguments

    clock = Clock()

    class Ends(TrainerCallback):
        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
            del args, state, control
            if "grad_norm" in logs:
                clock.mark()

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, _ = parts()

        def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"loss": loss_of(self.inner, tokens, labels, "mean")}

    class Loader(list[Any]):
        batch_size = EACH

        def __iter__(self) -> Iterator[Any]:
            return batches(rank, steps)

        def __len__(self) -> int:
            return steps

    class Ours(Trainer):
        def get_train_dataloader(self) -> Any:
            return Loader()

    arguments = TrainingArguments(
        str(home),
        max_steps=steps,
        logging_steps=1,
        report_to=[],
        disable_tqdm=True,
        max_grad_norm=CLIP,
        learning_rate=LR,
        lr_scheduler_type="constant",
        save_strategy="no",
        use_cpu=True,
        optim="adamw_torch_fused",
        per_device_train_batch_size=EACH,
        ddp_backend="gloo",
    )
    assert arguments.world_size == WORLD
    made = Ours(model=Model(), args=arguments, train_dataset=Rows(), callbacks=[Ends()])
    made.remove_callback(PrinterCallback)
    made.train()
    return clock.seconds()


SIDES: dict[str, Callable[[int, int, Path], float]] = {
    "plain ddp": plain,
    "samecurve": ours,
    "static_graph": static,
    "5 MiB buckets": small,
    "accelerate": accelerate,
    "fabric": fabric,
    "hf trainer": hf_trainer,
}


def one(rank: int, _group: Any, name: str, steps: int, home: str) -> float:
    """One side's run, in one of the two processes."""
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(WORLD),
        LOCAL_WORLD_SIZE=str(WORLD),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(PORT),
        GROUP_RANK="0",
        ACCELERATE_USE_CPU="true",
        TORCHELASTIC_RUN_ID="benchmark",
        TORCHELASTIC_RESTART_COUNT="0",
        TORCHELASTIC_MAX_RESTARTS="0",
    )
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    torch.distributed.barrier()
    return SIDES[name](rank, steps, Path(home))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--only", default="")
    parser.add_argument("--dry", action="store_true", help="write no result file")
    given = parser.parse_args()
    chosen = [name for name in SIDES if not given.only or name in given.only.split(",")]
    absent = [
        name for name in chosen if len(installed(NEEDS.get(name, ()))) < len(NEEDS.get(name, ()))
    ]
    for name in absent:
        print(f"left out  {name}: not installed")
    with (
        tempfile.TemporaryDirectory() as scratch,
        pool(WORLD, Path(scratch) / "ranks.log") as ranks,
    ):
        number = iter(range(10_000))

        def side(name: str) -> Callable[[], float]:
            def once() -> float:
                home = Path(scratch, str(next(number)))
                home.mkdir()
                return float(max(ranks.run(WORLD, one, name, given.steps, str(home))))

            return once

        try:
            found = alternate(
                {name: side(name) for name in chosen if name not in absent}, given.turns
            )
        except Exception:
            sys.stderr.write(Path(scratch, "ranks.log").read_text()[-2000:])
            raise
    tokens = WORLD * EACH * LENGTH
    ratio = {
        name: paired(found["plain ddp"], times, lambda a, b: a / b) for name, times in found.items()
    }
    print(f"{'trainer':<14}{'tokens/s':>10}{'of plain ddp':>14}   each turn's")
    for name, times in found.items():
        print(
            f"{name:<14}{tokens / statistics.median(times):10.0f}{ratio[name]:14.3f}  "
            f" {', '.join(f'{b / a:.3f}' for a, b in zip(times, found['plain ddp'], strict=True))}"
        )
    if not given.dry:
        print(
            write(
                "ddp",
                {
                    "seconds": found,
                    "tokens_per_step": tokens,
                    "of_plain": ratio,
                    "world": WORLD,
                    "steps": given.steps,
                },
            )
        )


if __name__ == "__main__":
    main()
