"""Ordinary fsdp and hsdp whose steps gather weights, and sum gradients, once: test_models.py has
them in f64 for each kind of model.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tiny import Outcome, TinyRun, tiny_values, train_tiny
from worlds import Pool


@pytest.fixture
def trained(pool: Pool, corpus: Path, cache: Path, tmp_path: Path) -> Any:
    """train(world, strategy, gather, sections of the config) -> what the first rank has seen."""

    def train(world: int, strategy: str, gather: str, **sections: Any) -> Outcome:
        values = tiny_values(
            corpus,
            batch={"samples": 10, "per_device": 2},
            devices={"strategy": strategy, "gather": gather},
            **sections,
        )
        name = f"{strategy}-{gather}-{len(list(tmp_path.iterdir()))}"
        outcome: Outcome = pool.run(world, train_tiny, TinyRun(tmp_path / name, values, cache))[0]
        assert outcome.plan.layout.gathers_once == (gather == "step")
        return outcome

    return train


def test_gradients_in_two_bytes_are_added_in_f32(trained: Any) -> None:
    """Of each round alone gradients are in bf16; sums of a step differ in their order alone."""
    train = {"precision": "bf16", "steps": 3}
    once, by_round = (trained(2, "fsdp", gather, train=train) for gather in ("step", "round"))
    np.testing.assert_allclose(once.norms, by_round.norms, rtol=1e-6)
    np.testing.assert_allclose(once.losses, by_round.losses, rtol=1e-6)
