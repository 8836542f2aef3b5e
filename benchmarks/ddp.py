"""Tokens per second of a 10.7M-parameter GPT on two CPU ranks of one thread each: ours, a plain DDP
loop, Accelerate, Fabric and HF Trainer, in turn.

All in the same two processes, over the same group (gloo), on the same model, batches, clipping and
optimizer; each reads its loss and norm every step. Run: python -m benchmarks.ddp [--turns 5]
[--steps 24]. Those that are not installed are left out, with a word (the extra `bench`).
"""

import argparse
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.common import installed
from benchmarks.gpt_task import LENGTH, Gpt, Rows, loss_of
from benchmarks.page import publish
from benchmarks.trainer_side import Settings, train_by_trainer
from benchmarks.two_ranks import (
    CLIP,
    EACH,
    LR,
    WORLD,
    Clock,
    Side,
    race,
    ratios,
    time_loop,
    time_ours,
)

PORT = 29_400  # where the other trainers' ranks meet
NEEDS = {
    "accelerate": ("accelerate",),
    "fabric": ("lightning",),
    "hf trainer": ("transformers", "accelerate"),
}


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


def mean_loss(model: Any) -> Callable[[dict[str, torch.Tensor]], torch.Tensor]:
    return lambda batch: loss_of(model, batch["tokens"], batch["labels"], "mean")


def plain(rank: int, steps: int, _home: Path, **how: Any) -> float:
    inner, optimizer = parts()
    model = DistributedDataParallel(inner, gradient_as_bucket_view=True, **how)
    return time_loop(
        batches(rank, steps),
        optimizer,
        loss_of=mean_loss(model),
        backward=torch.autograd.backward,
        clip=lambda: torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP),
    )


def static(rank: int, steps: int, home: Path) -> float:
    """The plain loop with static_graph, which promises that every step has the same graph.

    Samecurve can't promise that, since it looks for parameters that a step did not use.
    """
    return plain(rank, steps, home, static_graph=True)


def small(rank: int, steps: int, home: Path) -> float:
    """The plain loop with buckets of 5 MiB instead of torch's 25 MiB."""
    return plain(rank, steps, home, bucket_cap_mb=5)


def ours(rank: int, steps: int, home: Path) -> float:
    task = f"{Path(__file__).parent / 'gpt_task.py'}:Gpt"
    return time_ours(rank, home, steps, task=task).seconds()


def probed(rank: int, steps: int, home: Path) -> float:
    """The mean over all steps, with those that are probed: two of 24."""
    task = f"{Path(__file__).parent / 'gpt_task.py'}:Gpt"
    return time_ours(rank, home, steps, task=task).mean()


def accelerate(rank: int, steps: int, _home: Path) -> float:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    assert accelerator.num_processes == WORLD
    model, optimizer = accelerator.prepare(*parts())
    return time_loop(
        batches(rank, steps),
        optimizer,
        loss_of=mean_loss(model),
        backward=accelerator.backward,
        clip=lambda: accelerator.clip_grad_norm_(model.parameters(), CLIP),
    )


def fabric(rank: int, steps: int, _home: Path) -> float:
    from lightning.fabric import Fabric

    trainer = Fabric(accelerator="cpu", devices=WORLD, strategy="ddp")
    trainer.launch()
    assert trainer.world_size == WORLD
    model, optimizer = trainer.setup(*parts())
    return time_loop(
        batches(rank, steps),
        optimizer,
        loss_of=mean_loss(model),
        backward=trainer.backward,
        clip=lambda: trainer.clip_gradients(model, optimizer, max_norm=CLIP),
    )


class WithLoss(nn.Module):
    """The model with the interface that HF Trainer expects."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, _ = parts()

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": loss_of(self.inner, tokens, labels, "mean")}


def hf_trainer(rank: int, steps: int, home: Path) -> float:
    clock = Clock()
    train_by_trainer(
        WithLoss(),
        lambda: batches(rank, steps),
        lambda _step, _logs: clock.mark(),
        Settings(home=home, steps=steps, samples=EACH, lr=LR, clip=CLIP, world=WORLD),
        Rows(),
    )
    return clock.seconds()


SIDES: dict[str, Side] = {
    "plain ddp": plain,
    "samecurve": ours,
    "with probes": probed,
    "static_graph": static,
    "5 MiB buckets": small,
    "accelerate": accelerate,
    "fabric": fabric,
    "hf trainer": hf_trainer,
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--only", default="")
    parser.add_argument("--dry", action="store_true", help="write no result file")
    given = parser.parse_args()
    chosen = [name for name in SIDES if not given.only or name in given.only.split(",")]
    absent = [
        name for name in chosen if len(installed(NEEDS.get(name, ()))) < len(NEEDS.get(name, ()))
    ]
    for name in absent:
        print(f"left out  {name}: not installed")
    names = [name for name in chosen if name not in absent]
    seconds = race("benchmarks.ddp", names, port=PORT, turns=given.turns, steps=given.steps)
    tokens = WORLD * EACH * LENGTH
    result = {
        "seconds": seconds,
        "tokens_per_step": tokens,
        "of_plain": ratios(seconds, "plain ddp"),
        "world": WORLD,
        "steps": given.steps,
    }
    publish("ddp", result, is_kept=not given.dry)


if __name__ == "__main__":
    main()
