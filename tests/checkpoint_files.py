"""Small checkpoints, written by the program's own store, without a run."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from samecurve.checkpoint.store import Published, Publisher, Store
from samecurve.core.config import MetricGoal
from samecurve.core.planning.fixed import Fixed
from samecurve.core.protocols import ArrayShard, Rank, arrays_to_write

FIXED = Fixed(
    global_batch_size=8,
    micro_batch_size=8,
    seed=0,
    samples=64,
    fingerprint="rows",
    threads=1,
)
ARRAYS = {
    f"model/{name}": np.arange(size, dtype=np.float32)
    for name, size in (("a", 100), ("b", 7), ("c", 1), ("d", 60))
}


def pieces(world: int, rank: int) -> list[ArrayShard]:
    names = arrays_to_write({name: array.nbytes for name, array in ARRAYS.items()}, world, rank)
    return [ArrayShard(name, "F32", ARRAYS[name].shape, (0,), ARRAYS[name]) for name in names]


def store(
    home: Path, rank: int = 0, world: int = 1, keep: int = 3, saves: list[Published] | None = None
) -> Store:
    def meta(step: int) -> Mapping[str, Any]:
        return {
            "step": step,
            "epoch": 0,
            "consumed": step,
            "config": {},
            "fixed": FIXED.to_json(),
            "versions": {},
        }

    publisher = None
    if rank == 0:
        if saves is None:
            saves = []
        publisher = Publisher(
            keep=keep,
            best=MetricGoal(),
            meta=meta,
            before=lambda: None,
            published=saves.append,
        )
    return Store(home, Rank(rank, rank, world), attempt="t", publisher=publisher)


def save(home: Path, step: int, loss: float | None = None, keep: int = 3) -> None:
    one = store(home, keep=keep)
    one.save(
        step,
        pieces(1, 0),
        {"metrics": {} if loss is None else {"loss": loss}, "metrics_step": step},
    )
    one.close()
