"""Batches a second of the feed beside torch's DataLoader, in one process, in turn: light decoding
(a slice) and heavy (inflate and normalise), with 0 and more workers.

Both read the same samples in the same order and end with the same torch tensors; a batch counts
when it is there. The DataLoader is given the feed's ids as its batches, and persistent workers.
Prints a table; writes benchmarks/results/data-<machine>.json. Run: python -m benchmarks.data
[--workers 0,2] [--rounds 3]
"""

import argparse
import os
import time
import warnings
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from benchmarks.page import publish
from samecurve import Mean
from samecurve.core.config.document import Document
from samecurve.core.config.loading import load_document
from samecurve.core.config.sections import Config
from samecurve.core.planning.machine import Machine
from samecurve.core.planning.plan import Plan
from samecurve.core.planning.planner import plan
from samecurve.data.feed import Feed
from samecurve.probe import cpu_name
from samecurve.tasks import Tasks, open_task
from samecurve.worker.data_workers import DataWorkers

BATCH, SIDE, SAMPLES = 32, 128, 4096
SHAPE = (3, SIDE, SIDE)
STEPS = {"light": 200, "heavy": 40}  # batches of one measurement
WARM = 8


class Pictures(Dataset[dict[str, Any]]):
    """Random pictures in memory: ready (light), or deflated (heavy).

    A deflated picture is inflated and normalised, which takes about 3 ms.
    """

    def __init__(self, *, heavy: bool) -> None:
        raw = np.random.default_rng(0).integers(0, 16, (64, *SHAPE), dtype=np.uint8)
        self._packed = [zlib.compress(picture.tobytes(), 6) for picture in raw] if heavy else []
        self._ready = raw

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict[str, Any]:
        if not self._packed:
            return {"x": self._ready[index % 64], "y": index}
        picture = (
            np.frombuffer(zlib.decompress(self._packed[index % 64]), np.uint8)
            .reshape(SHAPE)
            .astype(np.float32)
        )
        return {
            "x": (
                (picture - picture.mean((1, 2), keepdims=True))
                / (picture.std((1, 2), keepdims=True) + 1e-6)
            ),
            "y": index,
        }


class Watched:
    """A minimal task with the pictures."""

    def __init__(self, data: dict[str, Any]) -> None:
        self._heavy = bool(data["heavy"])

    def model(self) -> nn.Module:
        return nn.Linear(1, 1)

    def loss(self, model: nn.Module, batch: Any) -> Mean:
        return Mean(model(batch["x"].float().mean((1, 2, 3))[:, None]).sum(), len(batch["x"]))

    def train_data(self) -> Pictures:
        return Pictures(heavy=self._heavy)


def feed_batches(config: Config, made: Plan, source: Any, workers: int) -> Iterator[float]:
    """Read batches; give the time at which each batch was ready."""
    readers = DataWorkers(config, workers, Path(os.devnull)) if workers else None
    asked = readers.workers if readers else None
    feed = Feed(made, [0], source, None, _as_tensors, workers=asked)
    try:
        for _ in feed:
            yield time.perf_counter()
    finally:
        if readers:
            readers.kill()
        feed.close()


def _as_tensors(rounds: Any, _of: int) -> Any:
    return [
        {name: torch.from_numpy(array) for name, array in microbatch.arrays.items()}
        for (microbatch,) in rounds
        if microbatch
    ]


def loader_batches(made: Plan, source: Dataset[Any], workers: int) -> Iterator[float]:
    ids = [found.tolist() for found in made.order.ids(range(made.steps))]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of more workers than cores
        loader = DataLoader(
            source, batch_sampler=ids, num_workers=workers, persistent_workers=workers > 0
        )
    for _ in loader:
        yield time.perf_counter()


def rate(times: Iterator[float]) -> float:
    """Batches a second, without the first few."""
    seen = list(times)
    return (len(seen) - 1 - WARM) / (seen[-1] - seen[WARM])


def measure(kind: str, workers: int, rounds: int) -> dict[str, list[float]]:
    task = f"{Path(__file__)}:Watched"
    values = {
        "task": task,
        "model": {},
        "data": {"heavy": int(kind == "heavy")},
        "batch": {"samples": BATCH},
        "train": {"steps": WARM + STEPS[kind]},
        "devices": {"use": "cpu"},
    }
    config = load_document(Document(values), Tasks()).config
    opened: Any = open_task(config, "")
    made = plan(config, Machine(devices=(), links=(), host_bytes=8 << 30, cores=2), opened.facts())
    sides: dict[str, Callable[[], Iterator[float]]] = {
        "feed": lambda: feed_batches(config, made, opened.train_data(), workers),
        "DataLoader": lambda: loader_batches(made, Pictures(heavy=kind == "heavy"), workers),
    }
    rates: dict[str, list[float]] = {name: [] for name in sides}
    for number in range(rounds):  # in turn, so that other work on the machine meets both
        for name in list(sides)[:: 1 if number % 2 else -1]:
            rates[name].append(rate(sides[name]()))
    return rates


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workers", default="0,2")
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    torch.set_num_threads(1)
    found: dict[str, Any] = {}
    for kind in STEPS:
        for workers in map(int, given.workers.split(",")):
            found[f"{kind}, {workers} workers"] = measure(kind, workers, given.rounds)
    result = {"batch": BATCH, "shape": SHAPE, "batches_per_second": found}
    publish("data", result, machine=cpu_name())


if __name__ == "__main__":
    main()
