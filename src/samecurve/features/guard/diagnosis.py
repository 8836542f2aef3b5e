"""Finds out why a loss failed the split check, and which line of the user's code is to blame.

The forward pass is repeated with every call of torch recorded (blamed_calls.py) and with an eye on
each line (watched_lines.py). split_check.py imports this file only after a trial has failed.
"""

from collections.abc import Callable
from functools import partial
from itertools import combinations

from samecurve.errors import UserError
from samecurve.features.guard.additivity import TOLERANCE, Finding, Format, compare_repeats
from samecurve.features.guard.backward_code import own_backward
from samecurve.features.guard.blamed_calls import (
    Recorded,
    Recording,
    find_place,
    first_difference,
    first_mixing,
)
from samecurve.features.guard.judge import Observed
from samecurve.features.guard.split_errors import (
    Evidence,
    Place,
    explain,
    explain_buffer,
    explain_draws,
    explain_failure,
    explain_state,
)
from samecurve.features.guard.trials import RAISED, Rows, Trials
from samecurve.features.guard.watched_lines import watch
from samecurve.torch_engine.step import EngineSetup
from samecurve.torch_engine.users_code import place_of_method
from samecurve.torch_engine.users_code.holders import described

_ALONE = 4  # samples that are tried one by one and in pairs
# the tolerance for the single numbers of a tensor
_SINGLE: dict[Format, float] = {"f64": 1e-9, "f32": 1e-4, "narrow": 3e-2}


class Diagnosis:
    """Turns a failed trial into an error. All ranks call it together, with whatever they found."""

    def __init__(self, setup: EngineSetup, trials: Trials) -> None:
        self._setup, self._trials = setup, trials

    def error_of(
        self,
        seen: Observed,
        finding: Finding | None,
        *,
        is_counting: bool,
        of_gradient: bool,
        shared_by_threads: bool,
    ) -> UserError | None:
        """The most likely cause; None: this rank has found nothing.

        is_counting: the loss depends on how many microbatches came before
        of_gradient: on some rank it is the gradient that does not add up
        shared_by_threads: the devices of this process draw from one generator
        """
        evidence = self._evidence(seen, finding, is_counting=is_counting, of_gradient=of_gradient)
        drawn, what = seen.drawn, evidence.what
        if evidence.draws and (drawn.moved or (drawn.seeded and finding)):
            return explain_draws(evidence.draws, f"{what} {finding.text}" if finding else "")
        if evidence.draws and shared_by_threads:
            return explain_draws(evidence.draws, "the devices of one process share a generator")
        if seen.unlike:
            return explain_buffer(seen.unlike[0], evidence.state_at or evidence.loss_at)
        if is_counting and finding is None:
            return explain_state(evidence, f"{what} changes from microbatch to microbatch")
        if seen.failed and finding and finding.kind == "finite":
            return explain_failure(seen.whole, seen.failed)
        if finding:
            return explain(finding, evidence, rounded=TOLERANCE[self._trials.format])
        return None

    def _evidence(
        self, seen: Observed, finding: Finding | None, *, is_counting: bool, of_gradient: bool
    ) -> Evidence:
        trials = self._trials
        watched = watch(
            lambda: trials.loss_if_any(trials.samples), trials.generators, self._reads(seen)
        )
        trials.put_back()
        first = trials.samples[:_ALONE]
        singles = [trials.loss_if_any([row]) for row in first]
        pairs = {pair: trials.loss_if_any(pair) for pair in combinations(first, 2)}
        trials.put_back()
        third = trials.loss_if_any(trials.samples)
        trials.put_back()
        name = ""
        if seen.unlike:
            name = seen.unlike[0]
        elif is_counting:
            name = min(seen.counters)
        elif seen.changed and third and compare_repeats(seen.whole, third, 1e-6) is None:
            name = min(seen.counters, default=seen.changed[0])
        all_there = all(singles) and all(pairs.values())
        method = "features" if self._setup.plan.sees_whole_batch else "loss"
        return Evidence(
            ids=[int(i) for i in trials.rows.ids],
            singles=[trial for trial in singles if trial] if all_there else (),
            pairs={pair: trial for pair, trial in pairs.items() if trial} if all_there else {},
            place=self._place(finding),
            draws=watched.draws,
            backward=self._own_backward() if of_gradient else None,
            state=described(name) if name else "",
            state_at=watched.changes.get(name, ""),
            loss_at=place_of_method(self._setup.task, method),
            what=self._what(),
            has_views=self._setup.draw_sites.has_views,
        )

    def _reads(self, seen: Observed) -> dict[str, Callable[[], object]]:
        """Functions that read the attributes and buffers which change, by name."""
        trials = self._trials
        reads: dict[str, Callable[[], object]] = {
            name: partial(trials.attributes.read, name) for name in seen.changed
        }
        return reads | {name: partial(trials.buffers.read, name) for name in seen.unlike}

    def _place(self, finding: Finding | None) -> Place | None:
        """The call of torch that is to blame."""
        trials, kind = self._trials, finding.kind if finding else ""
        rows = (trials.samples, trials.samples, *trials.parts)
        whole, again, *parts = [self._recorded(each) for each in rows]
        if whole and again and kind == "repeat":
            return first_difference(whole, again)
        if not (finding and whole and all(parts)):
            return None
        present = [part for part in parts if part]
        tolerance = _SINGLE[trials.format]
        if kind == "gradient":
            return first_mixing(whole, present, tolerance)
        of_weight = kind in {"weight", "unweighted"}
        return find_place(whole, present, tolerance, of_weight=of_weight)

    def _recorded(self, rows: Rows) -> Recorded | None:
        """A recorded forward pass; None: the loss can't be computed for these samples."""
        recording = Recording()
        try:
            with recording:
                loss = self._trials.losses_of(rows)[self._trials.name]
        except RAISED:
            return None
        finally:
            self._trials.put_back()
        return Recorded(recording, rows, tuple(loss))

    def _own_backward(self) -> Place | None:
        """A function of the user's that takes part in the backward pass."""
        recording, trials = Recording(), self._trials
        try:
            with trials.with_gradient(), recording:
                total = trials.losses_of(trials.samples)["loss"].sum
        except RAISED:
            return None
        finally:
            trials.put_back()
        if recording.hooks:
            return Place("a hook of a tensor", recording.hooks[0])
        return own_backward(self._setup.strategy.models[0], total)

    def _what(self) -> str:
        """The subject of the error's sentence."""
        trials = self._trials
        what = "the loss" if trials.name == "loss" else f'"{trials.name}", logged beside the loss,'
        if self._setup.plan.sees_whole_batch:
            what = "features(), added up,"
        return what if trials.step == trials.rows.step else f"{what} at step {trials.step}"
