"""The first look at a loss: of all samples at once, once more, in parts, and as after many more
microbatches. It teaches which random numbers follow the samples, and what passes change.
"""

from collections.abc import Mapping, Sequence

import torch

from samecurve.features.guard.additivity import (
    DOUBTFUL,
    TOLERANCE,
    Trial,
    compare_parts,
    compare_repeats,
    no_trial,
)
from samecurve.features.guard.judge import Judge
from samecurve.features.guard.trials import Drawn, Observed, Trials, Tried
from samecurve.torch_engine.randomness.draw_sites import Draw
from samecurve.torch_engine.step import EngineSetup
from samecurve.torch_engine.users_code import equal
from samecurve.torch_engine.users_code.side_effects import TURNS, Counter, counters_in

_HOST = {"numpy", "Python"}  # generators that are seeded for each microbatch, where they are used


class FirstLook:
    """The trials that every other one follows; all ranks call it together."""

    def __init__(self, setup: EngineSetup, trials: Trials, judge: Judge) -> None:
        self._setup, self._trials, self._judge = setup, trials, judge

    def observed(self) -> Observed:
        """The trials "whole", "again", "in parts" and "far"."""
        trials = self._trials
        whole, drawn = self.whole()
        after_whole, kept_of_whole = trials.buffers.changed(), trials.attributes.changed()
        trials.generators.put_back()
        again = trials.loss_of(trials.samples)
        changed = trials.attributes.changed()
        moving = _differing(after_whole, trials.buffers.changed())
        if self._judge.agree(bool(moving)):
            # They will move once a step (StepBuffers), so that must not change the loss here.
            trials.buffers.put_back(moving)
            trials.generators.put_back()
            again = trials.loss_of(trials.samples)
        trials.put_back()
        kept = _differing(kept_of_whole, changed)
        parts, after_parts, failed = [], [], None
        for rows in trials.parts:
            part, error = trials.tried_part(rows)
            parts.append(part)
            failed = failed or error
            after_parts.append(trials.buffers.changed())
            kept |= _differing(kept_of_whole, trials.attributes.changed())
            trials.put_back()
        counters = counters_in(kept_of_whole, changed)
        alike = {name for name in after_whole if _is_alike(name, after_whole, after_parts)}
        unlike = [
            name
            for name in after_whole
            if name not in alike and _has_one_shape(name, after_whole, after_parts)
        ]
        return Observed(
            whole=Tried({"loss": whole}),
            again=again,
            far=self._far(counters, whole),
            parts=parts,
            failed=failed,
            drawn=drawn,
            changed=list(changed),
            counters=counters,
            steady=alike.intersection(moving),
            unlike=unlike,
            kept=sorted(kept),
        )

    def whole(self) -> tuple[Trial, Drawn]:
        """The loss of all samples, and the generators that it draws from without a key."""
        trials, judge, sites = self._trials, self._judge, self._setup.draw_sites
        with sites.recording() as draws:
            whole = trials.first_loss()
        moved = trials.generators.changed()
        if not judge.agree(bool(draws or moved)):
            return whole, Drawn()
        trials.put_back()
        with sites.recording() as draws_of_part:
            trials.loss_if_any(trials.parts[0])
        trials.put_back()
        sites.learn(draws, draws_of_part)
        self._choose_views(draws)
        is_seeded = not _HOST.isdisjoint(moved)
        sites.reseeds_host |= judge.agree(is_seeded)
        whole = trials.loss_of(trials.samples)
        moved = [name for name in trials.generators.changed() if name not in _HOST]
        if judge.agree(any(name.startswith("torch") for name in moved)):
            sites.reseeds_torch = True
            trials.put_back()
            whole = trials.loss_of(trials.samples)
        return whole, Drawn(moved=moved, seeded=is_seeded)

    def _choose_views(self, draws: Sequence[Draw]) -> None:
        """Find how the rows of a sample lie in draws that have several: side by side, or as views
        one after the other. The order with which the loss adds up is the loss's own.
        """
        trials, sites = self._trials, self._setup.draw_sites
        differences: dict[int, float] = {}
        possible = sites.possible_views(draws)
        for sites.views in possible if len(possible) > 1 else ():
            whole, *parts = (trials.loss_if_any(rows) for rows in (trials.samples, *trials.parts))
            trials.put_back()
            finding = whole and compare_parts(whole, [p or no_trial(()) for p in parts], 0.0)
            differences[sites.views] = finding.difference if finding else 0.0
            if not self._judge.agree(differences[sites.views] > TOLERANCE[trials.format]):
                return
        if differences:  # rounding, or a loss that adds up in no order
            best = min(possible, key=lambda views: differences[views])
            best = best if differences[best] < DOUBTFUL else possible[0]
            sites.views = int(self._judge.largest(best))

    def _far(self, counters: Mapping[str, Counter], whole: Trial) -> Trial | None:
        """The loss as after many more microbatches: at a number where it differs from `whole`, if
        there is one. None: no attribute counts.
        """
        if not self._judge.agree(bool(counters)):
            return None
        trials, found = self._trials, None
        for turn in range(TURNS):
            trials.attributes.advance(counters, turn)
            trial = trials.loss_if_any(trials.samples) or no_trial(trials.samples)
            trials.put_back()
            if found is None or compare_repeats(whole, trial, TOLERANCE[trials.format]):
                found = trial
        return found


def _differing(one: Mapping[str, object], other: Mapping[str, object]) -> set[str]:
    """Names of the values that differ, among those that are in both."""
    return {name for name in one.keys() & other.keys() if not equal(one[name], other[name])}


Buffers = Mapping[str, torch.Tensor]  # changed ones, by name


def _is_alike(name: str, after_whole: Buffers, after_parts: Sequence[Buffers]) -> bool:
    """Whether each part changed a buffer as all samples did."""
    value = after_whole[name]
    return all(name in part and _is_close(value, part[name]) for part in after_parts)


def _has_one_shape(name: str, after_whole: Buffers, after_parts: Sequence[Buffers]) -> bool:
    """Whether a buffer's shape does not follow the samples, as that of a cache does."""
    shape = after_whole[name].shape
    return all(part[name].shape == shape for part in after_parts if name in part)


def _is_close(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.shape != other.shape:
        return False
    if not one.is_floating_point():
        return torch.equal(one, other)
    difference = (one.double() - other.double()).abs().nan_to_num()
    largest = torch.maximum(one.double().abs().max(), other.double().abs().max())
    return bool(difference.max() <= 1e-5 * largest) if one.numel() else True
