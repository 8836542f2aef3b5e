"""The split check: before a run's first step the loss of some samples is taken whole, again, and in
parts, on the run's own devices. What does not add up, does not repeat or leaves something behind
would give another curve on other devices (core/split_check/split_verdicts.py has the verdicts,
split_trials.py takes the losses). Then it is taken elsewhere: with weights moved a little, there
with its gradient, and at later steps.

Every rank takes the same samples and makes the same calls, whatever it finds; what is found by any
is told by all alike. Afterwards model, task and generators are as before.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from samecurve.core.protocols import TrialRows
from samecurve.core.split_check.split_errors import explain_hook, explain_kept
from samecurve.core.split_check.split_verdicts import TOLERANCE, Trial, compare_repeats, steps_tried
from samecurve.errors import UserError
from samecurve.torch_engine.split_check.split_batch_loss import batch_loss_error
from samecurve.torch_engine.split_check.split_gradients import accumulated_hook
from samecurve.torch_engine.split_check.split_state import plainly_equal
from samecurve.torch_engine.split_check.split_trials import RAISED, Stage, Trials, as_user_error
from samecurve.torch_engine.split_check.split_verdict import Findings, Look
from samecurve.torch_engine.split_check.user_code import names_read, place_of_method
from samecurve.torch_engine.step.setup import EngineSetup

_FEW = 6  # samples elsewhere
_MANY = 1000  # microbatches, after which a counter is tried


@dataclass(frozen=True)
class SplitVerdict:
    """What the split check has found.

    error: what does not add up; None: all does
    repeats: whether the same samples give the same loss twice
    steady: buffers that a forward pass changes, the same way whatever its rows
    """

    error: UserError | None
    repeats: bool
    steady: frozenset[str]


class SplitCheck:
    """One check on this process's first device; all ranks call it together.

    stage: host rows -> tensors, as for a step
    """

    def __init__(self, setup: EngineSetup, rows: TrialRows, stage: Stage) -> None:
        self._setup, self._rows = setup, rows
        self._plan = setup.plan
        self._trials = Trials(setup, rows, stage)
        self._findings = Findings(setup, rows, self._trials)
        self._findings.parts = _two_parts(self._trials.samples)
        self._kept: list[
            str
        ] = []  # attributes that earlier phases left otherwise for other samples

    def run(self) -> SplitVerdict:
        """The first of the step's phases that has an error tells it."""
        steady: frozenset[str] = frozenset()
        for number in range(len(self._trials.phases)):
            self._trials.phase_number = number
            with self._trials.prepared():
                look = self._look()
                error, repeats = self._findings.error_of(look)
                error = error or self._error_of_kept(look.kept) or self._error_elsewhere()
                if not error and (error := self._error_of_batch_loss()):
                    repeats = False  # its devices would differ, however the batch is split
            steady |= look.steady
            if error:
                return SplitVerdict(error, repeats, steady)
        return SplitVerdict(None, repeats=True, steady=steady)

    @property
    def _samples(self) -> Sequence[int]:
        return self._findings.samples

    # --- at the start

    def _look(self) -> Look:
        trials = self._trials
        whole, moved = self._first_trials()
        after_whole = trials.buffers.moved()
        numbers, values = trials.attributes.numbers(), trials.attributes.values()
        trials.generators.put_back()
        again = trials.loss_of(self._samples)
        after_again = trials.buffers.moved()
        moving = [
            name
            for name, value in after_whole.items()
            if name in after_again and not torch.equal(value, after_again[name])
        ]
        changed = trials.attributes.changed()
        kept = _unlike(values, trials.attributes.values())
        counters = {
            name: (value, _MANY * (value - numbers[name]))
            for name, value in trials.attributes.numbers().items()
            if value != numbers.get(name, value)
        }
        if self._findings.agree(bool(moving)):  # once a step, where they move alike: StepBuffers
            trials.buffers.put_back(moving)
            trials.generators.put_back()
            again = trials.loss_of(self._samples)
        trials.put_back()
        parts, after_parts, failed = [], [], None
        for rows in self._findings.parts:
            part, error = trials.loss_of_part(rows)
            parts.append(part)
            failed = failed or error
            after_parts.append(trials.buffers.moved())
            kept |= _unlike(values, trials.attributes.values())
            trials.put_back()
        far = self._far_trial(counters)
        steady = frozenset(
            name for name in moving if _all_like(after_whole[name], name, after_parts)
        )
        unlike = [name for name, value in after_whole.items() if _differs(value, name, after_parts)]
        return Look(
            whole=whole,
            again=again,
            far=far,
            parts=parts,
            failed=failed,
            moved=moved,
            changed=changed,
            counters=sorted(counters),
            steady=steady,
            unlike=unlike,
            kept=sorted(kept),
        )

    def _first_trials(self) -> tuple[Trial, list[str]]:
        """The loss of all samples, and generators that no key serves. Where numbers are drawn it is
        learnt first, from samples of two sizes, what they follow at each place.
        """
        trials = self._trials
        sites = self._setup.draw_sites
        with sites.recording() as draws:
            whole = trials.loss_of_all()
        moved = trials.generators.moved()
        if not self._findings.agree(bool(draws or moved)):
            return whole, []
        trials.put_back()
        with sites.recording() as draws_of_part:
            trials.loss_if_any(self._findings.parts[0])
        trials.put_back()
        sites.learn(draws, draws_of_part)
        self._findings.seeded = [name for name in moved if name in {"numpy", "Python"}]
        sites.reseeds_host |= self._findings.agree(bool(self._findings.seeded))
        whole = trials.loss_of(self._samples)
        moved = [name for name in trials.generators.moved() if name not in {"numpy", "Python"}]
        if self._findings.agree(any(name.startswith("torch") for name in moved)):
            sites.reseeds_torch = True
            trials.put_back()
            whole = trials.loss_of(self._samples)
        return whole, moved

    def _far_trial(self, counters: dict[str, tuple[float, float]]) -> Trial | None:
        """The loss after many microbatches, as far as counters tell it; None: nothing counts."""
        if not self._findings.agree(bool(counters)):
            return None
        self._trials.attributes.advance(counters)
        trial = self._trials.loss_if_any(self._samples)
        self._trials.put_back()
        return trial or Trial(len(self._samples), math.nan, math.nan)

    # --- what is kept of a microbatch

    def _error_of_kept(self, names: Sequence[str]) -> UserError | None:
        """Attributes that are of the last microbatch, where something else reads them."""
        task, error = self._setup.task, None
        read_later = names_read(task, "after_step")
        for name in names:
            if error is None and name.rpartition(".")[2] in read_later:
                error = explain_kept(name, "after_step()", place_of_method(task, "after_step"))
        if self._findings.agree(bool(self._trials.phase_number and self._kept)):
            error = error or self._error_of_earlier_phases()
        self._kept += names
        return self._findings.shared(error)

    def _error_of_earlier_phases(self) -> UserError | None:
        """What they keep, and a later phase depends on."""
        trials, number = self._trials, self._trials.phase_number
        losses = []
        for rows in (self._samples, self._findings.parts[0]):
            for trials.phase_number in range(number):
                trials.loss_if_any(rows)
            trials.phase_number = number
            losses.append(trials.loss_if_any(self._samples))
            trials.put_back()
        one, other = losses
        if one and other and compare_repeats(one, other, TOLERANCE[trials.format]):
            what = f"the loss of phase {trials.phases[number]}"
            return explain_kept(self._kept[0], what, place_of_method(self._setup.task, "loss"))
        return None

    # --- elsewhere

    def _error_of_batch_loss(self) -> UserError | None:
        if not self._plan.whole_batch:
            return None
        steps = [self._rows.step, *self._later_steps()]
        return self._findings.shared(batch_loss_error(self._setup, self._trials, steps))

    def _later_steps(self) -> list[int]:
        """Where the loss may be another one."""
        plan = self._plan
        if not getattr(self._setup.task, "follows_progress", False):
            return []
        return steps_tried(self._rows.step, plan.steps, plan.order.steps_per_epoch)

    def _error_elsewhere(self) -> UserError | None:
        """What is wrong with other weights than those of the beginning, or at later steps."""
        steps = self._later_steps()
        hook = accumulated_hook(self._setup.strategy.models[0])
        error = self._findings.shared(hook and explain_hook(hook))
        error = error or self._error_of_moved(self._rows.step)
        for step in steps:
            error = error or self._error_at(step)
        if steps:  # where a warm-up of a penalty is over
            error = error or self._error_of_moved(steps[-1])
        return error

    def _error_of_moved(self, step: int) -> UserError | None:
        """With weights moved a little, the gradient too."""
        trials = self._trials
        if not trials.is_small():
            return None
        with trials.moved_weights(), self._trying(step, trials.samples[:_FEW], _three_parts):
            return self._error_here(with_gradient=True)

    def _error_at(self, step: int) -> UserError | None:
        with self._trying(step, self._trials.samples[:_FEW], _two_parts):
            return self._error_here(with_gradient=False)

    @contextmanager
    def _trying(
        self, step: int, rows: Sequence[int], cut: Callable[[Sequence[int]], list[list[int]]]
    ) -> Iterator[None]:
        """These samples at this step, as long as it is entered."""
        findings, trials = self._findings, self._trials
        before = findings.samples, findings.parts, trials.step
        findings.samples, findings.parts, trials.step = list(rows), cut(rows), step
        try:
            yield
        finally:
            findings.samples, findings.parts, trials.step = before

    def _error_here(self, *, with_gradient: bool) -> UserError | None:
        """Of the loss whole and in parts, of its gradient, and of what is logged beside it, as the
        conditions are now. None too where it can't be taken: it can at the start.
        """
        trials = self._trials
        try:
            _, moved = self._first_trials()
            trials.put_back()
            whole = self._findings.tried(self._samples, with_gradient=with_gradient)
        except RAISED:
            return None
        finally:
            trials.put_back()
        parts, failed = [], None
        for rows in self._findings.parts:
            try:
                parts.append(self._findings.tried(rows, with_gradient=with_gradient))
            except RAISED as raised:
                failed = failed or as_user_error(raised)
                nothing = Trial(len(rows), math.nan, math.nan)
                parts.append((dict.fromkeys(whole[0], nothing), None))
            trials.put_back()
        error = self._findings.error_of_means(whole, parts, moved, failed)
        lacking = any(gradients is None for _, gradients in (whole, *parts))
        if error or self._findings.agree(lacking):
            return error
        return self._findings.error_of_gradient(whole, parts)


def _three_parts(rows: Sequence[int]) -> list[list[int]]:
    """Two of one row each, their order turned, and the rest."""
    turned = list(reversed(rows))
    return [part for part in (turned[:1], turned[1:2], turned[2:]) if part]


def _two_parts(rows: Sequence[int]) -> list[list[int]]:
    """Two unequal ones, their order turned; one row can't be split."""
    turned = list(reversed(rows))
    if len(turned) < 2:
        return [turned]
    cut = max(1, 3 * len(turned) // 8)
    return [turned[:cut], turned[cut:]]


def _unlike(one: Mapping[str, object], other: Mapping[str, object]) -> set[str]:
    """Names of values that differ."""
    return {name for name in one.keys() & other.keys() if not plainly_equal(one[name], other[name])}


def _all_like(value: torch.Tensor, name: str, others: Sequence[dict[str, torch.Tensor]]) -> bool:
    return all(name in other and _close(value, other[name]) for other in others)


def _differs(value: torch.Tensor, name: str, others: Sequence[dict[str, torch.Tensor]]) -> bool:
    """Not where its size follows the rows: a cache."""
    return not _all_like(value, name, others) and all(
        name not in other or other[name].shape == value.shape for other in others
    )


def _close(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.shape != other.shape:
        return False
    if not one.is_floating_point():
        return torch.equal(one, other)
    difference = (one.double() - other.double()).abs().nan_to_num()
    largest = torch.maximum(one.double().abs().max(), other.double().abs().max())
    return bool(difference.max() <= 1e-5 * largest) if one.numel() else True
