"""The split check of batch_loss(): every device takes it by itself of the same features, so it must
give all of them the same, and reach the model through features only.
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from samecurve.core.determinism.mean import Mean
from samecurve.core.split_check.split_errors import Evidence, explain, explain_draws, explain_state
from samecurve.core.split_check.split_verdicts import TOLERANCE, Trial, compare_repeats
from samecurve.errors import UserError
from samecurve.torch_engine.split_check.split_diagnosis import watch
from samecurve.torch_engine.split_check.split_trials import RAISED, Trials
from samecurve.torch_engine.split_check.user_code import place_of_method
from samecurve.torch_engine.step.gathered_features import Features
from samecurve.torch_engine.step.precision import current_device
from samecurve.torch_engine.step.setup import EngineSetup

_MANY = 1000  # times, after which a counter is tried


def batch_loss_error(setup: EngineSetup, trials: Trials, steps: Sequence[int]) -> UserError | None:
    """What is wrong with it; None too where the loss of a few samples can't be taken.

    steps: at which it is tried
    """
    for step in steps:
        trials.step = step
        try:
            error = _BatchLoss(setup, trials).error()
        except RAISED:  # of a few samples
            error = None
        finally:
            trials.step = steps[0]
            trials.put_back()
        if error:
            return error
    return None


class _BatchLoss:
    """At the step that is tried."""

    def __init__(self, setup: EngineSetup, trials: Trials) -> None:
        self._setup, self._trials = setup, trials
        self._evidence = partial(
            Evidence, loss_at=place_of_method(setup.task, "batch_loss"), what="batch_loss()"
        )

    def error(self) -> UserError | None:
        trials, tolerance = self._trials, TOLERANCE[self._trials.format]
        features = self._features(trials.samples)
        trials.generators.put_back()
        total, leaves = self._total(features)
        first = self._trial(total)
        numbers, moved = trials.attributes.numbers(), trials.generators.moved()
        if moved:
            return self._drawn(features)
        if name := _weight_behind(total.sum, leaves, self._setup.strategy.models[0]):
            return UserError(
                f"batch_loss() uses {name} of the model itself, whose gradient would be lost",
                f'as a feature: features() gives {{"{name.rpartition(".")[2]}": ...}}, a number of'
                " the model for all samples as model.scale.expand(len(x)); a penalty on weights"
                " there too, a share of it for each sample",
                place_of_method(self._setup.task, "batch_loss"),
            )
        self._features(trials.samples[:1])  # what it keeps is of another microbatch now
        again = self._trial(self._total(features)[0])
        changed = trials.attributes.changed()
        now = trials.attributes.numbers()
        if finding := compare_repeats(first, again, tolerance):
            evidence = self._of_state(changed[0], features) if changed else self._evidence()
            return explain(finding, evidence, rounded=tolerance)
        counters = {
            name: (value, _MANY * (value - numbers[name]))
            for name, value in now.items()
            if value != numbers.get(name, value)
        }
        trials.put_back()
        self._features(trials.samples)
        trials.attributes.advance(counters)
        if counters and compare_repeats(first, self._trial(self._total(features)[0]), tolerance):
            cause = "batch_loss() changes from call to call"
            return explain_state(self._of_state(next(iter(counters)), features), cause)
        return None

    def _features(self, rows: Sequence[int]) -> Features:
        features = self._trials.features_of(rows)
        return {name: feature.detach() for name, feature in features.items()}

    def _total(self, features: Features) -> tuple[Mean, Mapping[str, torch.Tensor]]:
        """The loss, and what it may have a gradient by."""
        setup, trials = self._setup, self._trials
        leaves = {name: rows.clone() for name, rows in features.items()}
        for rows in leaves.values():
            if rows.is_floating_point() or rows.is_complex():
                rows.requires_grad_()
        progress = setup.plan.progress_at(trials.step)
        phase = trials.phases[trials.phase_number]
        with current_device(setup.device), torch.enable_grad():
            # the loss may put others in their place
            losses = setup.task.batch_losses(dict(leaves), progress, phase)
        return losses["loss"], leaves

    def _trial(self, total: Mean) -> Trial:
        return Trial(len(self._trials.samples), float(total.sum), float(total.weight))

    def _drawn(self, features: Features) -> UserError:
        trials = self._trials
        trials.generators.put_back()
        watched = watch(partial(self._total, features), trials.generators, {})
        error = explain_draws(watched.draws, "every device takes batch_loss() by itself")
        return UserError(error.cause, "draw them in features(), a row a sample", error.where)

    def _of_state(self, name: str, features: Features) -> Evidence:
        trials = self._trials
        read = partial(trials.attributes.read, name)
        watched = watch(partial(self._total, features), trials.generators, {name: read})
        return self._evidence(state=f"attribute {name}", state_at=watched.changes.get(name, ""))


def _weight_behind(
    total: torch.Tensor, leaves: Mapping[str, torch.Tensor], model: torch.nn.Module
) -> str:
    """A parameter that the loss reaches by itself; '': none."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    known = {id(leaf) for leaf in leaves.values()}
    for leaf in _leaves_of(total):
        if id(leaf) not in known and id(leaf) in names:
            return names[id(leaf)]
    return ""


def _leaves_of(total: torch.Tensor) -> Iterator[torch.Tensor]:
    waiting: list[Any] = [total.grad_fn]
    seen = set()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        waiting += [inner for inner, _ in node.next_functions]
        leaf = getattr(node, "variable", None)
        if isinstance(leaf, torch.Tensor):
            yield leaf
