"""A loss over the whole batch under jax: the curve of a plain loop on any number of devices."""

from pathlib import Path
from typing import Any

import flax_batches
import numpy as np
import pytest

from batch_runs import Curve, batch_config, check_equal, trained, with_layout
from samecurve.core.config.sections import Config
from worlds import Pool

HERE = Path(__file__).parent


def config_of(strategy: str, world: int, **sections: Any) -> Config:
    config = batch_config(f"{HERE}/flax_batches.py:Contrastive", engine="jax", **sections)
    return with_layout(config, strategy, world)


@pytest.fixture(scope="module")
def plain(pool: Pool) -> Curve:
    values = config_of("single", 1).model_dump()
    losses, evaluated, weights = pool.run(1, flax_batches.plain_loop, values)[0]
    return Curve(losses, evaluated, weights, [])


@pytest.mark.parametrize(
    ("strategy", "world", "accumulate"),
    [
        ("fsdp", 2, 3),
        pytest.param("single", 1, 3, marks=pytest.mark.long),
        pytest.param("dp", 2, 1, marks=pytest.mark.long),
        pytest.param("dp", 3, 3, marks=pytest.mark.long),
        pytest.param("fsdp", 3, 1, marks=pytest.mark.long),
        pytest.param("dp", 8, 1, marks=pytest.mark.long),
    ],
)
def test_every_layout_is_the_plain_loop_over_the_whole_batch(
    *, strategy: str, world: int, accumulate: int, plain: Curve, pool: Pool, tmp_path: Path
) -> None:
    config = config_of(strategy, world, batch={"accumulate": accumulate})
    check_equal(trained(pool, tmp_path, config), plain)


@pytest.mark.long
def test_exact_is_one_hash(plain: Curve, pool: Pool, tmp_path: Path) -> None:
    one, *others = (
        trained(
            pool,
            tmp_path / str(world),
            config_of(
                strategy,
                world,
                batch={"per_device": 4},
                train={"exact": True, "hash_every": 2},
            ),
        )
        for strategy, world in (("single", 1), ("dp", 2), ("dp", 3))
    )
    np.testing.assert_allclose(one.losses, plain.losses, rtol=1e-12)
    np.testing.assert_allclose(one.evaluated, plain.evaluated, rtol=1e-12)
    assert len(one.hashes) == 3
    for other in others:
        assert (other.hashes, other.losses, other.evaluated) == (
            one.hashes,
            one.losses,
            one.evaluated,
        )
