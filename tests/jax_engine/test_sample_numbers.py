"""samecurve.rng(batch): the same numbers under either engine, and on any devices."""

from typing import Any

import jax
import numpy as np
import pytest
import torch
from numpy.typing import NDArray

import samecurve
from samecurve.core.determinism.sample_keys import RowKeys
from samecurve.core.protocols import MicroBatch
from samecurve.core.sample_numbers import serving
from samecurve.errors import UserError
from samecurve.jax_engine.sample_numbers import keyed_arrays, with_numbers
from samecurve.torch_engine.randomness import (
    MicroBatchContext,
    StagedKeys,
    numbers_in_work,
)

KEYS = RowKeys(seed=5, epoch=2, step=7, ids=np.array([3, 10**12, 0]))


def drawn(batch: Any) -> list[Any]:
    numbers = samecurve.rng(batch)
    return [
        numbers.uniform(7),
        numbers.normal(3, 3),
        samecurve.rng(batch).integers(-3, 1000, 50),
        numbers.bernoulli(0.3, 40),
        numbers.normal(),
    ]


def by_torch() -> list[NDArray[Any]]:
    context = MicroBatchContext(torch.device("cpu"))
    with serving(numbers_in_work), context.within(StagedKeys(KEYS)):
        return [values.numpy() for values in drawn({})]


def test_both_engines_draw_the_same_numbers() -> None:
    """Integers to the bit, normal ones to what logarithm and cosine may differ in."""

    def of_one_row(row: Any) -> list[Any]:
        return with_numbers(drawn, {name: array[None] for name, array in row.items()})

    rows = keyed_arrays(MicroBatch({"x": np.zeros(3)}, keys=KEYS))
    for mine, theirs in zip(by_torch(), jax.jit(jax.vmap(of_one_row))(rows), strict=True):
        np.testing.assert_allclose(mine, np.asarray(theirs)[:, 0], rtol=3e-6, atol=3e-7)
    assert len({values.tobytes() for values in by_torch()}) == 5


def test_outside_of_a_microbatch_there_are_none() -> None:
    with pytest.raises(UserError, match="numbers of x, and no microbatch is in work"):
        samecurve.rng({"x": 0})
