"""A small UNet on drawn shapes, trained by a plain loop with torch's DistributedDataParallel that
seeds noise as today's trainers of image generators do. It is the other side of
benchmarks/noise_seeding.py, which starts it on each number of ranks.

- step and rank: each step's noise and times come from a generator seeded by
  `step * ranks + rank`, as OneTrainer does.
- rank: they come from one generator, seeded once by `seed + rank`, as accelerate's
  set_seed(seed, device_specific=True) does.

All else is the same on any number of ranks: the first weights, the pictures of every step (buckets
are shuffled alike and cut to whole batches over all ranks; a rank takes every second, third, ...
picture), the global batch and the learning rate. So noise is all that differs.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from PIL import Image
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.common import config_of
from samecurve_products.pictures.diffusion.data.shapes import draw_shape
from samecurve_products.pictures.diffusion.torch_task import TorchDiffusion

BATCH, STEPS, EVERY, SEED = 32, 120, 10, 0  # EVERY: steps between two measurements
LR, BETAS, CLIP = 5e-4, (0.9, 0.95), 1.0
COUNT = 700  # pictures, in three buckets; none of them is a whole number of batches
SIDE, LONG, SHORT = 32, 40, 24  # pixels: square, and the sides of what is not
EVAL_TIMES = 4
WAYS = ("step and rank", "rank")
_FIRST = "first.safetensors"


@dataclass(frozen=True)
class Curve:
    """train: the loss of each step, over all ranks. held_out: by the step after which it was
    measured. dropped: pictures that no step of an epoch has
    """

    train: list[float]
    held_out: dict[int, float]
    dropped: int


def write_pictures(folder: Path) -> None:
    """Draw shapes on square, wide and tall grounds, with a caption beside each."""
    folder.mkdir(parents=True)
    for number in range(COUNT):
        size = ((SIDE, SIDE), (LONG, SHORT), (SHORT, LONG))[(0, 0, 1, 2)[number // 12 % 4]]
        shape, caption = draw_shape(number, min(size))
        picture = Image.new("RGB", size, shape.getpixel((0, 0)))
        picture.paste(shape, ((size[0] - shape.width) // 2, (size[1] - shape.height) // 2))
        picture.save(folder / f"{number:03d}.png")
        (folder / f"{number:03d}.txt").write_text(caption)


def config(folder: Path) -> dict[str, Any]:
    """The config of the run: models/shapes-unet.yaml with half the width, and without what only
    blurs the comparison (a warm-up, dropped captions).
    """
    return {
        "task": "diffusion",
        "model": {
            "architecture": "unet",
            "widths": [24, 48],
            "time_steps": {"distribution": "logit_normal"},
        },
        "data": {
            "source": str(folder),
            "resolution": SIDE,
            "bucket_step": 8,
            "validation": 0.1,
            "prompts": [],
        },
        "batch": {"samples": BATCH},
        "optimizer": {"lr": LR, "betas": list(BETAS), "weight_decay": 0.0, "clip": CLIP},
        "schedule": {"decay": "constant"},
        "train": {"steps": STEPS, "seed": SEED, "precision": "f32", "exact": False},
        "devices": {"threads": 1},
    }


def open_task(folder: Path, cache: Path) -> TorchDiffusion:
    """The pictures and the model of the config."""
    read = config_of(config(folder))
    model: Any = read.model
    data: Any = read.data
    return TorchDiffusion(model, data, cache)


@torch.no_grad()
def held_out_loss(task: TorchDiffusion, model: nn.Module) -> float:
    """The mean loss of the held-out pictures, with the same noise and times at every call."""
    rows: Any = task.eval_data()
    model.eval()
    generator = torch.Generator().manual_seed(SEED)
    losses: list[Tensor] = []
    for ids in _of_buckets(rows.bucket_sizes):
        pictures, words = _staged(rows[ids])
        for place in range(EVAL_TIMES):
            noise = torch.randn(pictures.shape, generator=generator)
            time = torch.full((len(pictures),), (place + 0.5) / EVAL_TIMES)
            losses.append(_row_losses(model, pictures, words, noise, time) / EVAL_TIMES)
    model.train()
    return float(torch.cat(losses).double().sum() / len(rows))


def train(way: str, home: Path) -> Curve:
    """Train by the plain loop, as one rank."""
    torch.set_num_threads(1)
    world, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    if world > 1:
        dist.init_process_group("gloo")
    task = open_task(home / "set", home / "cache")
    rows: Any = task.train_data()
    bare = first_model(task, home)
    model = DistributedDataParallel(bare) if world > 1 else bare
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, betas=BETAS, weight_decay=0.0)
    of_rank = torch.Generator().manual_seed(SEED + rank)
    losses: list[Tensor] = []
    held_out = {0: held_out_loss(task, bare)}
    for step, (epoch, ids) in enumerate(_batches(rows.bucket_sizes)):
        if step == STEPS:
            break
        of_step = torch.Generator().manual_seed(step * world + rank)
        generator = of_step if way == "step and rank" else of_rank
        pictures, words = _staged(rows.__getitem__(ids[rank::world], epoch))
        noise = torch.randn(pictures.shape, generator=generator)
        time = torch.sigmoid(torch.randn(len(pictures), generator=generator))
        loss = _row_losses(model, pictures, words, noise, time).mean()
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        losses.append(loss.detach())
        if (step + 1) % EVERY == 0:
            held_out[step + 1] = held_out_loss(task, bare)
    means = torch.stack(losses)
    if world > 1:
        dist.all_reduce(means)
        dist.destroy_process_group()
    dropped = sum(size % BATCH for size in rows.bucket_sizes)
    return Curve((means / world).tolist(), held_out, dropped)


def first_model(task: TorchDiffusion, home: Path) -> nn.Module:
    """The model with the first weights that all runs begin with."""
    from safetensors.torch import load_model, save_model

    torch.manual_seed(SEED)
    model = task.model()
    if not (home / _FIRST).exists():
        save_model(model, str(home / _FIRST))
    load_model(model, str(home / _FIRST))
    return model


def first_weights(home: Path) -> Path:
    return home / _FIRST


def _batches(bucket_sizes: tuple[int, ...]) -> Iterator[tuple[int, np.ndarray[Any, Any]]]:
    """(epoch, samples) of each step, without end: whole batches of each bucket."""
    epoch = 0
    while True:
        random = np.random.default_rng((SEED, epoch))
        batches = []
        for ids in _of_buckets(bucket_sizes):
            shuffled = random.permutation(ids)
            whole = len(ids) // BATCH
            batches += np.split(shuffled[: whole * BATCH], whole)
        for number in random.permutation(len(batches)):
            yield epoch, batches[number]
        epoch += 1


def _of_buckets(bucket_sizes: tuple[int, ...]) -> list[np.ndarray[Any, Any]]:
    """The samples of each bucket."""
    ends = np.cumsum(bucket_sizes).tolist()
    begins = [0, *ends[:-1]]
    return [np.arange(begin, end) for begin, end in zip(begins, ends, strict=True)]


def _staged(arrays: Any) -> tuple[Tensor, Tensor]:
    """Pictures from -1 to 1, and the words of their captions."""
    return torch.from_numpy(arrays["pixels"]) / 127.5 - 1, torch.from_numpy(arrays["words"])


def _row_losses(
    model: nn.Module, pictures: Tensor, words: Tensor, noise: Tensor, time: Tensor
) -> Tensor:
    """The loss of flow matching, of each picture."""
    t = time.view(-1, 1, 1, 1)
    answer = model((1 - t) * pictures + t * noise, time, words)
    rows: Tensor = (answer - (noise - pictures)).square().flatten(1).mean(1)
    return rows


SIDES = {way: partial(train, way) for way in WAYS}
