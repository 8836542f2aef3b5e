"""What tests of the huggingface task's objectives share: a run of a directory that the library
wrote, on warm ranks, and the plain loop's optimizer.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from starts import start, train
from worlds import Pool

STEPS = 20


def squares(count: int) -> list[str]:
    """Texts of unlike length."""
    return [f"the square of {i} is {i * i}" + "." * (i % 7) for i in range(count)]


def write_lines(path: Path, rows: Sequence[Mapping[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def values(
    model: Mapping[str, Any], data: Mapping[str, Any], batch: int, /, **sections: Any
) -> dict[str, Any]:
    """Of 20 steps in f64 at a constant rate; sections replace some."""
    return {
        "task": "huggingface",
        "model": dict(model),
        "data": dict(data),
        "batch": {"samples": batch},
        "optimizer": {"lr": 3e-3, "clip": 0.5},
        "schedule": {"decay": "constant"},
        "train": {"steps": STEPS, "precision": "f64"},
        "devices": {"use": "cpu"},
        **sections,
    }


def train_sharded(home: Path, content: Mapping[str, Any], pool: Pool, cache: Path) -> Path:
    """home/run: two ranks under fsdp, in two accumulation steps. Returns home; c.yaml is the
    config.
    """
    (home / "c.yaml").write_text(json.dumps(content))
    sharded = {
        **content,
        "batch": {**content["batch"], "accumulate": 2},
        "devices": {"use": "cpu:2", "strategy": "fsdp", "preflight": 0},
    }
    train(pool, start(home / "run", sharded, cache))
    return home


def plain_adamw(model: nn.Module) -> torch.optim.Optimizer:
    """As the config's: weight decay on matrices only."""
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    rest = [p for p in model.parameters() if p.ndim < 2]
    groups: list[dict[str, Any]] = [
        {"params": matrices, "weight_decay": 0.1},
        {"params": rest, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=3e-3, betas=(0.9, 0.95))


def plain_step(model: nn.Module, optimizer: torch.optim.Optimizer, loss: torch.Tensor) -> float:
    """Backward, clipped, updated. Returns the loss."""
    optimizer.zero_grad()
    torch.autograd.backward(loss)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
    return float(loss.detach())
