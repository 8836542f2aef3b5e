"""train.exact: one hash of parameters and optimizer state, whatever computed it; and a look at the ordinary mode, whose bits do differ."""

from pathlib import Path
from typing import Any

import pytest

from tiny import Outcome, tiny_values, train_tiny
from worlds import Pool

STEPS = 100


def run(pool: Pool, home: Path, corpus: Path, cache: Path, strategy: str, world: int, precision: str, resume: Path | None = None, stop_at: int | None = None, engine: str = "torch", **train: Any) -> Outcome:
    """Batch 10 is 5 slots of 2, an epoch's tail of 3 two slots, token counts differ by sample: no world divides any of it evenly."""
    train = {"steps": STEPS, "precision": precision, "exact": True, "hash_every": 10, **train}
    config = {**tiny_values(corpus, train=train, devices={"use": f"cpu:{world}", "strategy": strategy}), "engine": engine}
    outcome: Outcome = pool.run(1 if strategy == "dp" or engine == "jax" else world, train_tiny, home, config, cache, "", resume, stop_at)[0]
    return outcome


def test_jax_one_hash_on_1_2_4_8(pool: Pool, corpus: Path, cache: Path, tmp_path: Path) -> None:
    import time
    hashes = {}
    for world in (1, 2, 4, 8, 3):
        began = time.time()
        found = run(pool, tmp_path / f"{world}", corpus, cache, "dp", world, "f32", engine="jax", steps=30)
        print(world, time.time() - began, found.hashes, found.losses[-1])
        hashes[world] = (found.hashes, found.losses, found.norms, found.evaluated[-1]["loss"])
    assert all(h == hashes[1] for h in hashes.values())


@pytest.mark.parametrize("precision", ["f32", "bf16", "f64"])
def test_one_hash_on_any_number_of_devices(precision: str, pool: Pool, corpus: Path, cache: Path, tmp_path: Path) -> None:
    expected = run(pool, tmp_path / "one", corpus, cache, "single", 1, precision)
    assert len(expected.hashes) == STEPS // 10
    for strategy, world in (("ddp", 2), ("ddp", 3), ("ddp", 4), ("dp", 2), ("dp", 3)):
        found = run(pool, tmp_path / f"{strategy}-{world}", corpus, cache, strategy, world, precision)
        assert (found.plan.strategy, found.plan.world, found.plan.micro) == (strategy, world, 2)
        assert found.hashes == expected.hashes, (strategy, world)
        assert (found.losses, found.norms) == (expected.losses, expected.norms)
        assert found.evaluated[-1]["loss"] == expected.evaluated[-1]["loss"]
