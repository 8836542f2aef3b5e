"""A call of a random function in a microbatch: its rule, and its numbers in the right shape."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from samecurve.core.determinism.sample_keys import mix
from samecurve.torch_engine.randomness import MicroBatchContext
from samecurve.torch_engine.randomness.draw_sites import (
    NONE,
    STEP,
    Draw,
    Rule,
    calls_to_here,
    in_shape,
    row_shape,
    rows_of_sample,
)
from samecurve.torch_engine.randomness.keyed_numbers import FUNCTIONS, KeyedNumbers, salt

# Any: a function of torch takes its arguments in several forms.
Original = Callable[..., Any]
Part = slice | torch.Tensor  # the rows of one sample, in the samples' dimension


@dataclass(frozen=True)
class Drawing:
    """A draw whose numbers are computed from keys.

    number: which draw of the forward pass it is
    rule: the dimension of `shape` in which the samples lie, or STEP
    rows: of the microbatch; 1 where the draw belongs to the step
    """

    context: MicroBatchContext
    number: int
    shape: torch.Size
    rule: Rule
    rows: int

    @property
    def _numbers(self) -> KeyedNumbers:
        return self.context.step_numbers if self.rule == STEP else self.context.numbers

    @property
    def _row(self) -> list[int]:
        return row_shape(self.shape, self.rule, self.rows)

    def lanes(self) -> torch.Tensor:
        return self._arranged(self._numbers.lanes(self.number, self._row))

    def uniform(self, dtype: torch.dtype) -> torch.Tensor:
        return self._arranged(self._numbers.uniform(self.number, self._row, dtype))

    def normal(self, dtype: torch.dtype) -> torch.Tensor:
        """Numbers of mean 0 and variance 1; of a complex number, both parts together have it."""
        if not dtype.is_complex:
            return self._arranged(self._numbers.normal(self.number, self._row, dtype))
        *outer, last = self._row
        parts = self._numbers.normal(self.number, [*outer, 2 * last], dtype.to_real())
        pairs = parts.mul_(0.5**0.5).reshape(-1, *outer, last, 2)
        return self._arranged(torch.view_as_complex(pairs))

    def integers(self, low: int, high: int) -> torch.Tensor:
        return self._arranged(self._numbers.integers(self.number, self._row, low, high))

    def _arranged(self, values: torch.Tensor) -> torch.Tensor:
        """values: [rows, *shape of a row]."""
        return in_shape(values, self.shape, self.rule, self._views)

    @property
    def _views(self) -> int:
        return self.context.sites.views_of(self.shape, self.rule, self.rows)

    def by_generator(
        self, of_part: Callable[[Part, torch.Generator], torch.Tensor], device: torch.device
    ) -> torch.Tensor:
        """Let a function of torch draw row by row, with a generator seeded by the row's key.

        of_part: is given a row's part of the samples' dimension, and the generator
        """
        generator = torch.Generator(device)
        if self.rule == STEP:
            generator.manual_seed(self._seeds()[0])
            return of_part(slice(None), generator)
        count, parts = self.shape[self.rule], []
        for row, seed in enumerate(self._seeds()):
            generator.manual_seed(seed)
            parts.append(of_part(rows_of_sample(row, count, self.rows, self._views), generator))
        drawn = torch.cat(parts, self.rule)
        if self._views == 1:
            return drawn
        # the rows of a sample are neighbours in `drawn`
        of_samples = drawn.movedim(self.rule, 0).reshape(self.rows, -1)
        return in_shape(of_samples, drawn.shape, self.rule, self._views)

    def _seeds(self) -> list[int]:
        """A seed for each row, on the host."""
        staged = self.context.staged
        if staged is None:
            keys = self._numbers.keys.cpu().numpy()
        elif self.rule == STEP:
            keys = np.array([staged.rows.step_key])
        else:
            keys = staged.rows.values
        salted = keys.view(np.uint64) ^ np.uint64(salt(0, FUNCTIONS, self.number) % 2**64)
        seeds: list[int] = (mix(salted) >> np.uint64(1)).tolist()
        return seeds


def begin_draw(
    context: MicroBatchContext,
    function: str,
    shape: Sequence[int],
    *,
    samples_in: int | None = None,
    is_separable: bool = True,
) -> Drawing | None:
    """Begin a draw of a shape; None: its numbers can follow neither samples nor step.

    samples_in: the dimension in which the samples lie, if they lie in any; None: it is not known
    is_separable: whether a part of the numbers can be drawn alone
    """
    rows, place = context.rows, calls_to_here()
    assert rows
    number, shape = context.draw_number(function), torch.Size(shape)
    rule = context.sites.rule(place, number, shape, rows)
    if samples_in is not None and rule != STEP:
        rule = samples_in if shape[samples_in] % rows == 0 else NONE
    if not is_separable and rule >= 0:
        rule = NONE
    if context.sites.recorded is not None:
        context.sites.recorded.append(Draw(place, shape, rows, number))
    if rule == NONE:
        return None
    return Drawing(context, number, shape, rule, 1 if rule == STEP else rows)


def note_unserved(context: MicroBatchContext, shape: Sequence[int]) -> None:
    """Record a draw from a generator of the user's own."""
    if context.sites.recorded is not None and context.rows:
        context.sites.recorded.append(Draw(calls_to_here(), tuple(shape), context.rows, -1))


def begin_unless_own(
    context: MicroBatchContext,
    function: str,
    shape: Sequence[int],
    generator: torch.Generator | None,
    *,
    is_separable: bool = True,
) -> Drawing | None:
    """Begin a draw, unless the call has a generator of its own or draws no number."""
    if generator is not None:
        note_unserved(context, shape)
        return None
    if not torch.Size(shape).numel():
        return None
    return begin_draw(context, function, shape, is_separable=is_separable)
