"""Steps with a contrastive loss over the whole batch and a learned temperature, on one device.

Samecurve is compared with plain torch, and with published ways to accumulate such a loss.

Times are seconds of the processor, since other programs may use the same cores. The model has two
towers and runs on one thread. Plain torch takes the whole batch at once. Samecurve does the same in
one round, and in four rounds, where each sample goes forward twice. Plain torch in four rounds is
gradient caching written by hand. Sides take turns; the results are medians over turns.

Curves: float64, four rounds, SGD with momentum, on one device. The first result is the largest
relative difference of a loss from the whole batch at once, the second one the temperature's
gradient divided by that of the whole batch.

- "accumulated features" is the method of open_clip's train.py with --accum-freq. It computes the
  loss of the whole batch once for each microbatch, and only the microbatch's own features have
  gradients. Every one of these losses uses the temperature, so its gradient is added once for each
  microbatch.
- "cached gradients" is GradCache (arXiv:2101.06983), which sentence-transformers'
  CachedMultipleNegativesRankingLoss follows. Its temperature is not learned, so here the
  temperature is applied to the features, as in Samecurve.
- "each microbatch by itself" is plain accumulation. A contrastive loss on several devices without
  gathering does the same.

Run: python -m benchmarks.batch_loss [--turns 7]
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import alternate, config_of, paired, trained
from benchmarks.page import publish
from benchmarks.towers_task import Net, Pairs, Towers
from samecurve.core.events import Event
from samecurve.core.planning.planner import plan
from samecurve.probe import probe
from samecurve.tasks import open_task
from samecurve.torch_engine.engine import TorchEngine
from samecurve.torch_engine.process_group import Comm

BATCH, STEPS, WARM, ROUNDS, LR = 256, 25, 5, 4, 0.05
Rows = dict[str, torch.Tensor]
Backward = Callable[[Net, Rows], float]  # sets the gradients of the mean loss; returns that loss
TASK = Towers()


def engine_of(rounds: int, precision: str) -> tuple[TorchEngine, Any, Any]:
    values = {
        "task": "benchmarks/towers_task.py:Towers",
        "batch": {"samples": BATCH, "accumulate": rounds},
        "optimizer": {"name": "sgd", "lr": LR, "weight_decay": 0.0, "clip": 0.0},
        "schedule": {"warmup": 0},
        "devices": {"use": "cpu", "threads": 1},
        "train": {"steps": STEPS, "precision": precision, "save_every": 0},
    }
    config = config_of(values)
    task = open_task(config, "")
    made = plan(config, probe(), task.facts())
    return TorchEngine(task, made, config.optimizer, Comm(), [torch.device("cpu")]), task, made


def whole(model: Net, rows: Rows) -> float:
    mean = TASK.batch_loss(TASK.features(model, rows))
    loss = mean.sum / mean.weight
    torch.autograd.backward(loss)
    return float(loss.detach())


def cached(model: Net, rows: Rows) -> float:
    with torch.no_grad():
        parts = [TASK.features(model, part) for part in cut(rows)]
    table = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
    for feature in table.values():
        feature.requires_grad_()
    mean = TASK.batch_loss(table)
    loss = mean.sum / mean.weight
    torch.autograd.backward(loss)
    first = 0
    for part in cut(rows):
        features = TASK.features(model, part)
        last = first + len(part["one"])
        gradients = [table[name].grad for name in features]
        torch.autograd.backward(
            list(features.values()), [g[first:last] for g in gradients if g is not None]
        )
        first = last
    return float(loss.detach())


def accumulated(model: Net, rows: Rows) -> float:
    with torch.no_grad():
        parts = [TASK.features(model, part) for part in cut(rows)]
    for number, part in enumerate(cut(rows)):
        own = TASK.features(model, part)
        table = {
            name: torch.cat([own[name] if n == number else p[name] for n, p in enumerate(parts)])
            for name in ("one", "two")
        }
        scale = model.scale.exp().expand(len(table["one"]))
        mean = TASK.batch_loss({**table, "scale": scale})
        loss = mean.sum / mean.weight
        torch.autograd.backward(loss)
    return float(loss.detach())


def apart(model: Net, rows: Rows) -> float:
    total = 0.0
    for part in cut(rows):
        mean = TASK.batch_loss(TASK.features(model, part))
        torch.autograd.backward(mean.sum / BATCH)
        total += float(mean.sum.detach())
    return total / BATCH


def cut(rows: Rows) -> Iterator[Rows]:
    size = BATCH // ROUNDS
    for first in range(0, BATCH, size):
        yield {name: array[first : first + size] for name, array in rows.items()}


def loop(backward: Backward, precision: torch.dtype) -> tuple[list[float], float]:
    """Losses, and the median seconds of a step."""
    engine, _, made = engine_of(1, "f64" if precision == torch.float64 else "f32")
    model: Any = engine.init().model
    engine.close()
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=0.9)
    data, losses, ends = Pairs(), [], []
    for step in range(STEPS):
        ids = made.order.ids(range(step, step + 1))[0]
        rows = {name: torch.from_numpy(array) for name, array in data[ids].items()}
        optimizer.param_groups[0]["lr"] = made.lr_at(step)
        optimizer.zero_grad()
        losses.append(backward(model, rows))
        optimizer.step()
        ends.append(time.process_time())
    return losses, statistics.median(b - a for a, b in pairwise(ends[WARM:]))


def ours(rounds: int, precision: str) -> tuple[list[float], float]:
    """Losses, and the median seconds of a step."""
    engine, task, made = engine_of(rounds, precision)
    losses: list[float] = []
    ends: list[float] = []

    def note(event: Event) -> None:
        if event.kind == "step":
            losses.append(event.values["loss"])
            ends.append(time.process_time())

    with tempfile.TemporaryDirectory() as home:
        trained(engine, task, made, Path(home), note)
    return losses, statistics.median(b - a for a, b in pairwise(ends[WARM:]))


def temperature_gradient(backward: Backward) -> float:
    torch.manual_seed(0)
    model = Net().double()
    rows = {name: torch.from_numpy(array[:BATCH]) for name, array in Pairs().rows.items()}
    backward(model, rows)
    assert model.scale.grad is not None
    return float(model.scale.grad)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=7)
    turns = parser.parse_args().turns
    torch.set_num_threads(1)
    expected, _ = loop(whole, torch.float64)
    ways = {"cached gradients": cached, "accumulated features": accumulated}
    ways["each microbatch by itself"] = apart
    curves = {
        "ours": ours(ROUNDS, "f64")[0],
        **{n: loop(way, torch.float64)[0] for n, way in ways.items()},
    }
    differences = {
        name: max(abs(a - b) / abs(b) for a, b in zip(losses, expected, strict=True))
        for name, losses in curves.items()
    }
    expected_gradient = temperature_gradient(whole)
    temperature = {
        name: temperature_gradient(way) / expected_gradient for name, way in ways.items()
    }
    sides: dict[str, Callable[[], float]] = {
        "plain torch, whole": lambda: loop(whole, torch.float32)[1],
        "ours, 1 round": lambda: ours(1, "f32")[1],
        f"plain torch, cached in {ROUNDS}": lambda: loop(cached, torch.float32)[1],
        f"ours, {ROUNDS} rounds": lambda: ours(ROUNDS, "f32")[1],
    }
    seconds = alternate(sides, turns)
    first = next(iter(seconds.values()))
    ratios = {name: paired(times, first, lambda a, b: a / b) for name, times in seconds.items()}
    publish(
        "batch-loss",
        {
            "batch": BATCH,
            "rounds": ROUNDS,
            "steps": STEPS,
            "seconds": seconds,
            "over_whole": ratios,
            "loss_differences": differences,
            "temperature_gradient": temperature,
        },
    )


if __name__ == "__main__":
    main()
