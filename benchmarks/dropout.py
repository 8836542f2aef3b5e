"""A training step with keyed dropout beside torch's own and none, alternating in one process: a GPT
and a ConvNet, on one thread and two.

A step is forward, backward and AdamW (fused). "fixed" multiplies by masks made beforehand, which
any dropout must at the least; "called" calls F.dropout in place of modules, served from the same
keys. Prints each variant's median and, as medians over the alternations, keyed over each of the
others and called over keyed, with the cores that other programs kept busy meanwhile; writes
benchmarks/results/dropout-<cpu>.json. Run: python -m benchmarks.dropout
"""

import os
import statistics
import time
from collections.abc import Callable
from contextlib import nullcontext
from itertools import pairwise
from typing import Any

import numpy as np
import psutil
import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.page import publish
from samecurve.core.determinism.sample_keys import RowKeys
from samecurve.probe import cpu_name
from samecurve.torch_engine.randomness import MicroBatchContext, StagedKeys
from samecurve.torch_engine.randomness.dropout_layers import key_dropout
from samecurve.torch_engine.randomness.replaced_functions import KEYED_FUNCTIONS

ALTERNATIONS, THREADS = 15, (1, 2)
OTHERS = ("none", "fixed", "native")
VOCABULARY, LENGTH, HIDDEN = 1024, 128, 256


class Block(nn.Module):
    def __init__(self, p: float) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(HIDDEN), nn.LayerNorm(HIDDEN)])
        self.qkv, self.out = nn.Linear(HIDDEN, 3 * HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.mlp = nn.Sequential(
            nn.Linear(HIDDEN, 4 * HIDDEN), nn.GELU(), nn.Linear(4 * HIDDEN, HIDDEN), nn.Dropout(p)
        )
        self.drop = nn.Dropout(p)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            part.unflatten(-1, (4, -1)).transpose(1, 2)
            for part in self.qkv(self.norms[0](x)).chunk(3, -1)
        )
        x = x + self.drop(
            self.out(
                F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
            )
        )
        summed: torch.Tensor = x + self.mlp(self.norms[1](x))
        return summed


class GPT(nn.Module):
    """Hidden 256, 4 layers; dropout after the embedding, and in each block after attention and
    after the MLP.
    """

    def __init__(self, p: float) -> None:
        super().__init__()
        self.tokens, self.positions, self.drop = (
            nn.Embedding(VOCABULARY, HIDDEN),
            nn.Embedding(LENGTH, HIDDEN),
            nn.Dropout(p),
        )
        self.blocks = nn.Sequential(*[Block(p) for _ in range(4)])
        self.head = nn.Linear(HIDDEN, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(
            self.head(self.blocks(self.drop(self.tokens(tokens) + self.positions.weight))).flatten(
                0, 1
            ),
            tokens.flatten(),
        )


class ConvNet(nn.Module):
    """32x32 pictures; dropout after each of three stages."""

    def __init__(self, p: float) -> None:
        super().__init__()
        widths = (3, 64, 128, 256)
        stages = [
            nn.Sequential(
                nn.Conv2d(a, b, 3, padding=1, bias=False),
                nn.BatchNorm2d(b),
                nn.ReLU(),
                nn.Conv2d(b, b, 3, padding=1),
                nn.ReLU(),
                nn.MaxPool2d(2),
                nn.Dropout(p),
            )
            for a, b in pairwise(widths)
        ]
        self.net = nn.Sequential(*stages, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(256, 10))

    def forward(self, pictures: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(
            self.net(pictures), torch.arange(len(pictures), device=pictures.device) % 10
        )


class Fixed:
    """Dropout with masks that were drawn beforehand."""

    mask: torch.Tensor | None = None

    def __call__(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002 - torch's name
        if self.mask is None:
            self.mask = F.dropout(torch.ones_like(input), 0.1)
        return input * self.mask


class Called(nn.Module):
    """Dropout as a call of F.dropout, as in many users' models."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002 - torch's name
        return F.dropout(input, 0.1, self.training)


def with_calls(module: nn.Module) -> None:
    """Replace each dropout module by a call of F.dropout."""
    for name, child in module.named_children():
        if isinstance(child, nn.Dropout):
            setattr(module, name, Called())
        else:
            with_calls(child)


def stepper(
    make: Callable[[float], nn.Module], variant: str, batch: torch.Tensor
) -> Callable[[], None]:
    torch.manual_seed(0)
    model = make(0.0 if variant == "none" else 0.1)
    rows = MicroBatchContext(batch.device)
    keys = StagedKeys(RowKeys(seed=0, epoch=0, step=0, ids=np.arange(len(batch))))
    if variant == "keyed":
        key_dropout(model, rows, 0)
    if variant == "called":
        with_calls(model)
    if variant == "fixed":
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.forward = Fixed()  # type: ignore[method-assign]
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)

    def step() -> None:
        optimizer.zero_grad()
        serving = rows.within(keys) if variant in {"keyed", "called"} else nullcontext()
        with serving:
            torch.autograd.backward(model(batch))
        optimizer.step()

    return step


def compare(
    make: Callable[[float], nn.Module], batch: torch.Tensor, threads: int
) -> dict[str, Any]:
    torch.set_num_threads(threads)
    variants = (*OTHERS, "keyed", "called")
    steps = {variant: stepper(make, variant, batch) for variant in variants}
    found: dict[str, list[float]] = {variant: [] for variant in variants}
    before = busy()
    for alternation in range(-2, ALTERNATIONS):
        for variant, step in steps.items():
            began = time.perf_counter()
            step()
            if alternation >= 0:
                found[variant].append(time.perf_counter() - began)
    over = {
        other: statistics.median(a / b for a, b in zip(found["keyed"], found[other], strict=True))
        for other in OTHERS
    }
    called = zip(found["called"], found["keyed"], strict=True)
    own, others, wall = (now - then for now, then in zip(busy(), before, strict=True))
    return {
        "threads": threads,
        "seconds": found,
        "keyed_over": over,
        "called_over_keyed": statistics.median(a / b for a, b in called),
        "cores_used_by_others": round((others - own) / wall, 2),
    }


def busy() -> tuple[float, float, float]:
    """Seconds of work of this process and of all processes, and elapsed seconds.

    If other programs were busy, ratios on several threads say little.
    """
    times = psutil.cpu_times()
    return sum(os.times()[:2]), sum(times) - times.idle - times.iowait, time.perf_counter()


def main() -> None:
    KEYED_FUNCTIONS.acquire()  # until the end
    torch.manual_seed(0)
    cases: dict[str, tuple[Callable[[float], nn.Module], torch.Tensor]] = {
        "gpt": (GPT, torch.randint(VOCABULARY, (16, LENGTH))),
        "convnet": (ConvNet, torch.randn(64, 3, 32, 32)),
    }
    rows = [
        {"model": name, **compare(make, batch, threads)}
        for name, (make, batch) in cases.items()
        for threads in THREADS
    ]
    publish("dropout", {"rows": rows}, machine=cpu_name())


if __name__ == "__main__":
    main()
