"""Places at which a model or a loss draws random numbers, and what the numbers follow there: the
samples, or the step.

A draw follows the samples if its shape has a dimension with k rows for each row of the microbatch.
Other draws belong to the step. A shape alone can mislead: the noise of a weight may have as many
rows as a microbatch. So learn() compares two forward passes of unlike size and notes a rule for
each place. A place that was not seen there follows plain_rule().

The k rows of a sample are neighbours ([samples * T, C]), or lie a microbatch apart, as views do
(cat([view_1, view_2])). No shape tells which, so the split check tries it (`views`).
"""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch

Place = tuple[tuple[str, int], ...]  # (file, line) of each call, the user's own line last
Rule = int  # the dimension in which the samples lie, or one of:
STEP: Rule = -1  # no dimension: every microbatch of the step has the same numbers
NONE: Rule = -2  # the shape grows with the microbatch, but not by the row
ALL_ROWS = 0

_TORCH = str(Path(torch.__file__).parent)
_OVERRIDES = str(Path(torch.__file__).parent / "overrides.py")
_OURS = tuple(str(Path(__file__).parents[2] / room) for room in ("torch_engine", "features"))
_WRAPPERS = str(Path(torch.__file__).parent / "_dynamo")  # around functions that aren't compiled


class Draw(NamedTuple):
    """A draw of random numbers in a forward pass.

    place: the calls that led to the draw, the user's own line last
    rows: of the microbatch
    number: which draw of the forward pass it is, from 0; -1: one from a generator of the user's own
    """

    place: Place
    shape: tuple[int, ...]
    rows: int
    number: int


class DrawSites:
    """The places that draw random numbers, and their rules, for all devices of a process.

    reseeds_torch: whether torch's own generators are seeded for each microbatch, by the run's seed,
        the step and the microbatch; for draws that no key serves
    reseeds_host: whether numpy's and Python's are, by the run's seed and the step
    seeds_batch_loss: whether they are seeded so before batch_loss()
    any_drawn: whether keys were ever asked for
    views: views of all samples that are laid one after the other in one microbatch; 1: none are,
        and all rows of a sample are neighbours; ALL_ROWS: each row of a sample is a view
    has_views: whether some draw has several rows for each sample
    recorded: the draws so far, while they are recorded
    """

    def __init__(self) -> None:
        self.views, self.has_views = 1, False
        self.reseeds_torch = self.reseeds_host = self.seeds_batch_loss = False
        self.any_drawn = False
        self._rules: dict[Place, Rule | None] = {}  # None: each draw has a rule, see _numbered
        self._numbered: dict[tuple[Place, int], Rule] = {}
        self.recorded: list[Draw] | None = None

    @contextmanager
    def recording(self) -> Iterator[list[Draw]]:
        """Record the draws inside of it, in their order."""
        recorded: list[Draw] = []
        self.recorded = recorded
        try:
            yield recorded
        finally:
            self.recorded = None

    def learn(self, one: Sequence[Draw], other: Sequence[Draw]) -> None:
        """Note the rule of each place, from recordings of two microbatches of unlike size.

        The numbers that a place draws may be others afterwards.
        """
        others = {(draw.place, draw.number): draw for draw in other}
        for draw in one:
            twin = others.get((draw.place, draw.number))
            if twin is None or twin.rows == draw.rows:
                continue
            rule = _learnt(draw, twin)
            self._numbered[draw.place, draw.number] = rule
            known = self._rules.setdefault(draw.place, rule)
            if known != rule:
                self._rules[draw.place] = None

    def possible_views(self, draws: Sequence[Draw]) -> list[int]:
        """The values of `views` that draw unlike numbers in these draws, the present one first."""
        each = set()
        for draw in draws:
            rule = self.rule(draw.place, draw.number, draw.shape, draw.rows)
            if rule >= 0 and draw.shape[rule] > draw.rows > 1:
                each.add(draw.shape[rule] // draw.rows)
        self.has_views |= bool(each)
        others = [1, min(each), *([ALL_ROWS] if len(each) > 1 else [])] if each else []
        return list(dict.fromkeys([self.views, *others]))

    def views_of(self, shape: Sequence[int], rule: Rule, rows: int) -> int:
        """How many views of all samples lie one after the other in a draw's dimension `rule`."""
        each = shape[rule] // rows if rule >= 0 else 1
        if self.views == ALL_ROWS:
            return each
        return self.views if each % self.views == 0 else 1

    def learnt(self, place: Place, number: int) -> Rule | None:
        """The rule that was learnt for a draw; None: none."""
        if place not in self._rules:
            return None
        rule = self._rules[place]
        return self._numbered.get((place, number)) if rule is None else rule

    def rule(self, place: Place, number: int, shape: Sequence[int], rows: int) -> Rule:
        """The rule for a draw of this shape."""
        rule = self.learnt(place, number)
        if rule is None:
            return plain_rule(shape, rows)
        if rule >= 0 and (rule >= len(shape) or shape[rule] % rows):
            return NONE
        return rule


def plain_rule(shape: Sequence[int], rows: int) -> Rule:
    """The rule of a place that was not learnt: samples lie in the first dimension, each with
    equally many neighbouring rows, or else in the second dimension ([sequence, samples, ...]).
    """
    if shape and shape[0] and shape[0] % rows == 0:
        return 0
    if len(shape) > 2 and shape[1] == rows:
        return 1
    return STEP


def row_shape(shape: Sequence[int], rule: Rule, rows: int) -> list[int]:
    """The shape of one sample's numbers: its neighbouring rows first, then the other dimensions."""
    if rule < 0:
        return list(shape) or [1]
    others = [size for dim, size in enumerate(shape) if dim != rule]
    each = shape[rule] // rows
    return [each, *others] if each > 1 or not others else others


def in_shape(values: torch.Tensor, shape: torch.Size, rule: Rule, views: int) -> torch.Tensor:
    """Arrange numbers [rows, *row_shape()] in the shape of a draw. views: as of views_of()"""
    others = [size for dim, size in enumerate(shape) if dim != rule]
    if views > 1:
        each = shape[rule] // len(values)
        values = values.reshape(len(values), views, each // views, *others).transpose(0, 1)
    if rule <= 0:
        return values.reshape(shape)
    return values.reshape(shape[rule], *others).movedim(0, rule)


def rows_of_sample(sample: int, count: int, samples: int, views: int) -> slice | torch.Tensor:
    """The numbers of a sample's rows among `count` rows. views: as of views_of()"""
    each = count // samples
    if views == 1:
        return slice(sample * each, (sample + 1) * each)
    return torch.arange(count).view(views, samples, each // views)[:, sample].flatten()


def _learnt(one: Draw, other: Draw) -> Rule:
    if len(one.shape) != len(other.shape):
        return NONE
    sizes = list(zip(one.shape, other.shape, strict=True))
    for dim, (a, b) in enumerate(sizes):
        if a and a % one.rows == 0 and b % other.rows == 0 and a // one.rows == b // other.rows:
            return dim
    return STEP if all(a == b for a, b in sizes) else NONE


def calls_to_here() -> Place:
    """The calls that led from the user's code to here: the same ones, whether or not a
    TorchFunctionMode is in force, as the split check has it where it looks for a cause.

    Left out are this program's own calls, with torch.compiler's wrappers around them, and the
    detour to a mode: a function of torch calls the mode through torch/overrides.py, and the mode
    calls that function once more.
    """
    frame = sys._getframe(1)  # noqa: SLF001 - as inspect does, without its cost
    calls = []
    before = ""  # the file of the frame that this one called
    while frame is not None:
        file = frame.f_code.co_filename
        owner = _owner(file)
        is_detour = _OVERRIDES in {file, before}
        if owner == "user" or (owner == "torch" and not is_detour):
            calls.append((file, frame.f_lineno))
            if owner == "user":
                break
        before, frame = file, frame.f_back  # type: ignore[assignment]
    return tuple(calls)


@cache
def _owner(file: str) -> str:
    if file.startswith((*_OURS, _WRAPPERS)):
        return "ours"
    return "torch" if file.startswith(_TORCH) else "user"
