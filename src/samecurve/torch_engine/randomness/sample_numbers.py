"""samecurve.rng(batch) under torch, and trials of a loss outside of an engine."""

from collections.abc import Iterator
from contextlib import contextmanager
from math import prod

import numpy as np
import torch

from samecurve.core.determinism.sample_keys import RowKeys
from samecurve.core.sample_numbers import serving
from samecurve.torch_engine.randomness.keyed_numbers import KeyedNumbers
from samecurve.torch_engine.randomness.microbatch_context import (
    MicroBatchContext,
    StagedKeys,
    context_in_work,
)
from samecurve.torch_engine.randomness.replaced_functions import KeyedFunctions

_NAME = "samecurve.rng"


class TorchSampleNumbers:
    """Random numbers for the rows of the microbatch that is being computed."""

    def __init__(self, context: MicroBatchContext) -> None:
        self._context = context

    def _next(self) -> tuple[KeyedNumbers, int]:
        self._context.sites.any_drawn = True
        return self._context.named_numbers, self._context.call_number(_NAME)

    def _shaped(self, values: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
        return values.view(len(values), *shape)

    def uniform(self, *shape: int, dtype: str = "float32") -> torch.Tensor:
        numbers, draw = self._next()
        return self._shaped(numbers.uniform(draw, [prod(shape)], getattr(torch, dtype)), shape)

    def normal(self, *shape: int, dtype: str = "float32") -> torch.Tensor:
        numbers, draw = self._next()
        return self._shaped(numbers.normal(draw, [prod(shape)], getattr(torch, dtype)), shape)

    def integers(self, low: int, high: int, *shape: int) -> torch.Tensor:
        numbers, draw = self._next()
        return self._shaped(numbers.integers(draw, [prod(shape)], low, high), shape)

    def bernoulli(self, p: float, *shape: int) -> torch.Tensor:
        return self.uniform(*shape) < p


def numbers_in_work() -> TorchSampleNumbers | None:
    context = context_in_work()
    return TorchSampleNumbers(context) if context and context.rows else None


@contextmanager
def keyed_trial(rows: int) -> Iterator[None]:
    """Let a loss or metrics draw on the CPU, outside of an engine, as in a run.

    rows: of the microbatch that is tried
    """
    functions = KeyedFunctions()
    keys = StagedKeys(RowKeys(seed=0, epoch=0, step=0, ids=np.arange(rows)))
    try:
        with serving(numbers_in_work), MicroBatchContext(torch.device("cpu")).within(keys):
            yield
    finally:
        functions.close()
