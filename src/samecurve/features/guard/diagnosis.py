"""Finds out why a trial or a probe failed, and which line of the user's code is to blame.

The forward pass is repeated with every call of torch recorded (blamed_calls.py) and with an eye on
each line (watched_lines.py); hooks and autograd.Functions of the user's are looked for. This file
is imported only once something has failed.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain, combinations
from typing import Any

import torch
from torch import nn

from samecurve.errors import UserError
from samecurve.features.guard.additivity import (
    GRADIENT,
    TOLERANCE,
    Finding,
    Format,
    compare_repeats,
    number_text,
)
from samecurve.features.guard.blamed_calls import (
    Recorded,
    Recording,
    find_place,
    first_difference,
    first_mixing,
)
from samecurve.features.guard.split_errors import (
    Evidence,
    Place,
    explain,
    explain_deed,
    explain_draws,
    explain_failure,
    explain_state,
)
from samecurve.features.guard.trial_passes import graph_nodes
from samecurve.features.guard.trials import RAISED, Observed, Rows, Trials
from samecurve.features.guard.watched_lines import watch
from samecurve.torch_engine.step import EngineSetup
from samecurve.torch_engine.users_code import loss_place, place_of, users_code
from samecurve.torch_engine.users_code.holders import described
from samecurve.torch_engine.users_code.side_effects import GeneratorStates

_ALONE = 4  # samples that are tried one by one and in pairs
# the tolerance for the single numbers of a tensor
_SINGLE: dict[Format, float] = {"f64": 1e-9, "f32": 1e-4, "narrow": 3e-2}
_STRETCHED = 3.0  # by which a weight is multiplied, once the run is at its end


class Diagnosis:
    """Turns a failed trial into an error. All ranks call it together, with whatever they found."""

    def __init__(self, setup: EngineSetup, trials: Trials) -> None:
        self._setup, self._trials = setup, trials

    def error_of(
        self, seen: Observed, finding: Finding | None, *, of_gradient: bool
    ) -> UserError | None:
        """The most likely cause; None: this rank has found nothing.

        of_gradient: on some rank it is the gradient that does not add up
        """
        tolerance = TOLERANCE[self._trials.format]
        is_counting = seen.is_counting(tolerance)
        evidence = self._evidence(seen, finding, is_counting=is_counting, of_gradient=of_gradient)
        drawn, what = seen.drawn, evidence.what
        if evidence.draws and (drawn.moved or (drawn.seeded and finding)):
            return explain_draws(evidence.draws, f"{what} {finding.text}" if finding else "")
        if evidence.draws and drawn.is_shared(self._setup):
            return explain_draws(evidence.draws, "the devices of one process share a generator")
        if seen.unlike:
            where = evidence.state_at or evidence.loss_at
            return explain_deed("buffer", where, name=seen.unlike[0])
        if is_counting and finding is None:
            return explain_state(evidence, f"{what} changes from microbatch to microbatch")
        if seen.failed and finding and finding.kind == "finite":
            return explain_failure(seen.whole.losses["loss"], seen.failed)
        if finding:
            return explain(finding, evidence, rounded=tolerance)
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
        whole, third = seen.whole.losses[trials.name], trials.loss_if_any(trials.samples)
        trials.put_back()
        name = ""
        if seen.unlike:
            name = seen.unlike[0]
        elif is_counting:
            name = min(seen.counters)
        elif seen.changed and third and compare_repeats(whole, third, 1e-6) is None:
            name = min(seen.counters, default=seen.changed[0])
        all_there = all(singles) and all(pairs.values())
        return Evidence(
            ids=[int(i) for i in trials.rows.ids],
            singles=[trial for trial in singles if trial] if all_there else (),
            pairs={pair: trial for pair, trial in pairs.items() if trial} if all_there else {},
            place=self._place(finding),
            draws=watched.draws,
            backward=self._own_backward() if of_gradient else None,
            state=described(name) if name else "",
            state_at=watched.changes.get(name, ""),
            loss_at=loss_place(self._setup),
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
        return next(chain(_own_functions(total), _hooks(self._setup.strategy.models[0])), None)

    def _what(self) -> str:
        """The subject of the error's sentence."""
        trials = self._trials
        what = _subject(trials.name)
        if self._setup.plan.sees_whole_batch:
            what = "features(), added up,"
        return what if trials.step == trials.rows.step else f"{what} at step {trials.step}"


def unlike_error(setup: EngineSetup, cause: str) -> UserError:
    """The error of a loss that is another one on another rank; all ranks call it together."""
    where, state = loss_place(setup), setup.features.get("task_state")
    differing = state.differing() if state else {}
    if not differing:
        return explain_deed("rank", where, name=cause)
    from samecurve.features.task_state.torch_hooks import KEEP_IN_MODEL, shown_name

    name, values = next(iter(differing.items()))
    return UserError(f"{cause}: {shown_name(name)} {values}", KEEP_IN_MODEL, where)


def rank_text(
    name: str,
    samples: Sequence[int],
    rank: int,
    one: Sequence[float] | None,
    two: Sequence[float] | None,
) -> str:
    """How a loss, a mean or a gradient differs between ranks, in words.

    one, two: sum and weight that ranks 0 and `rank` have got; None: nothing of that name
    """
    ids = f"samples {', '.join(map(str, samples))}"
    if name == GRADIENT:
        return f"{ids} give another gradient on rank {rank} than on rank 0"
    first, other = (
        number_text(each[0] / (each[1] or 1)) if each else "absent" for each in (one, two)
    )
    what = _subject(name)
    if first == other:
        return f"{what} of {ids} is another one on rank {rank} than on rank 0"
    return f"{what} of {ids} is {first} on rank 0, and {other} on rank {rank}"


def _subject(name: str) -> str:
    return "the loss" if name == "loss" else f'"{name}", logged beside the loss,'


def write_error(setup: EngineSetup, name: str, again: Callable[[], object]) -> UserError:
    """The error of a weight, or a buffer, that the loss writes into, with the line that does.

    name: of something else in words, as the optimizer keeps it
    again: computes the loss once more
    """
    where, model = loss_place(setup), setup.strategy.models[0]
    weights, buffers = dict(model.named_parameters()), dict(model.named_buffers())
    tensor = weights.get(name, buffers.get(name))
    if tensor is not None and not setup.strategy.gathers_weights:  # each rank for itself
        if name in weights:
            with torch.no_grad():  # what has been clamped once would stay as it is
                tensor.mul_(_STRETCHED)
        reads = {name: lambda: (tensor._version, tensor.detach().clone())}  # noqa: SLF001
        where = watch(again, GeneratorStates(setup.device), reads).changes.get(name, where)
    if name in buffers:
        return explain_deed("late", where, name=name)
    return explain_deed("written", where, name=f"the weight {name}" if name in weights else name)


# --- the user's functions in a backward pass


def _own_functions(loss_sum: torch.Tensor) -> Iterator[Place]:
    """autograd.Functions whose backward stands in the user's code."""
    for node in graph_nodes(loss_sum):
        function: Any = getattr(node, "_forward_cls", None)
        if code := users_code(getattr(function, "backward", None)):
            yield Place(f"{function.__name__}.backward", place_of(code))


def _hooks(model: nn.Module) -> Iterator[Place]:
    """Hooks of the user's on parameters and modules."""
    for name, parameter in model.named_parameters():
        yield from _users_hooks(parameter._backward_hooks, f"a hook of {name}")  # noqa: SLF001
    for name, module in model.named_modules():
        for kind in ("_backward_hooks", "_backward_pre_hooks"):
            title = f"a hook of {name or 'the model'}"
            yield from _users_hooks(getattr(module, kind), title)


def _users_hooks(hooks: Mapping[int, Any] | None, title: str) -> Iterator[Place]:
    codes = map(users_code, (hooks or {}).values())
    yield from (Place(title, place_of(code)) for code in codes if code)
