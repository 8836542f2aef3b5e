"""Tiny runs in which a gradient of one rank or device gets a bit that it should not have."""

from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch

import tiny
from samecurve.errors import RunError
from samecurve.worker.rank_main import train_rank
from tiny import Outcome, TinyRun, train_tiny

_INTEGERS = {4: torch.int32, 8: torch.int64}  # by bytes
NAME = "layers.0.mlp.down_proj.weight"


@dataclass(frozen=True)
class Flip:
    """A bit of a gradient that is flipped on one rank or device.

    step: counted from 0
    time: of the backward passes in that step, which one; None: each one, in each later step, too
    bit: a higher one each time, where it is 'another'
    """

    holder: int
    step: int
    time: int | None = None
    bit: str = "lowest"


def train_with_flip(
    index: int, group: Any, run: TinyRun, flip: Flip | None
) -> Outcome | tuple[str, int]:
    """train_tiny() with this fault; or the RunError's text and exit code."""

    def with_fault(context: Any, engine: Any, *arguments: Any) -> Any:
        if flip and context.config.engine == "jax":
            _plant_in_jax(engine, flip)
        elif flip:
            _plant(engine, index, flip)
        return train_rank(context, engine, *arguments)

    with patch.object(tiny, "train_rank", with_fault):
        try:
            return train_tiny(index, group, run)
        except RunError as error:
            return str(error), error.exit_code


class _FlipHook:
    """Flips a bit of a gradient while backward computes it."""

    def __init__(self, flip: Flip) -> None:
        self._flip = flip
        self.step = self._time = -1
        self._leaves: set[int] = set()

    def begin(self, step: int, leaf: torch.Tensor) -> None:
        self.step, self._time = step, -1
        if id(leaf) not in self._leaves:
            self._leaves.add(id(leaf))
            leaf.register_hook(self)  # type: ignore[no-untyped-call]

    def __call__(self, gradient: torch.Tensor) -> torch.Tensor | None:
        self._time += 1
        flip = self._flip
        is_due = self.step == flip.step and self._time == flip.time
        if not is_due and not (flip.time is None and self.step >= flip.step):
            return None
        changed = gradient.detach().clone()
        bits = changed.view(-1).view(_INTEGERS[changed.element_size()])
        bits[-1] ^= 1 << self._time if flip.bit == "another" else 1
        return changed


def _plant(engine: Any, index: int, flip: Flip) -> None:
    """Flip in backward passes of engine torch. dp: index is 0, and `holder` a device."""
    begin_steps = engine._begin_steps
    several = len(engine.devices) > 1
    hook = _FlipHook(flip)

    def begin(state: Any, *arguments: Any) -> None:
        begin_steps(state, *arguments)
        step = engine.step

        def stepping(state: Any, batch: Any, *others: Any) -> Any:
            if several or index == flip.holder or flip.holder < 0:
                strategy = engine._strategy
                leaf = strategy.leaves(flip.holder if several else 0)[NAME]
                hook.begin(batch.step, leaf)
            return step(state, batch, *others)

        engine.step = stepping

    engine._begin_steps = begin


def _plant_in_jax(engine: Any, flip: Flip) -> None:
    """Flip in the hash of one device's gradient, as one of its bits does."""
    step, now = engine.step, [-1, -1]

    def stepping(state: Any, batch: Any, *others: Any) -> Any:
        now[:] = batch.step, -1
        if not engine._checked:
            engine._check_loss(batch.rounds.example)
        sentinel = engine.features["guard"]
        if "hashes" not in vars(sentinel):
            hashes = sentinel.hashes

            def flipped(*arguments: Any) -> Any:
                import numpy as np

                now[1] += 1
                table = np.array(hashes(*arguments))
                if now == [flip.step, flip.time] or (flip.time is None and now[0] >= flip.step):
                    table[flip.holder, sentinel.arrays.index(NAME), 0] ^= 1
                return table

            vars(sentinel)["hashes"] = flipped
        return step(state, batch, *others)

    engine.step = stepping
