"""The split check of batch_loss(). Every device computes it by itself from the features of the
whole batch, so it must give every device the same, and reach the model through features only.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch

from samecurve.core.determinism import Mean
from samecurve.core.determinism.sample_keys import step_key
from samecurve.errors import UserError
from samecurve.features.guard.additivity import TOLERANCE, Trial, compare_repeats
from samecurve.features.guard.split_errors import Evidence, explain, explain_draws, explain_state
from samecurve.features.guard.trial_passes import graph_nodes
from samecurve.features.guard.trials import RAISED, Rows, Trials
from samecurve.features.guard.watched_lines import Watched, watch
from samecurve.features.whole_batch.gathered_features import Features
from samecurve.torch_engine.precision import current_device
from samecurve.torch_engine.randomness import seed_host
from samecurve.torch_engine.step import EngineSetup
from samecurve.torch_engine.users_code import place_of_method
from samecurve.torch_engine.users_code.holders import described
from samecurve.torch_engine.users_code.side_effects import counters_in

_HOST = {"numpy", "Python"}  # generators that are seeded by the step, where batch_loss() draws


def batch_loss_error(setup: EngineSetup, trials: Trials, steps: Sequence[int]) -> UserError | None:
    """The first error of batch_loss() at these steps; None: nothing is wrong, or it can't be
    computed for the few samples that are tried.
    """
    for step in steps:
        try:
            with trials.trying(step, trials.samples, trials.parts):
                error = _BatchLoss(setup, trials).error()
        except RAISED:
            error = None
        finally:
            trials.put_back()
        if error:
            return error
    return None


class _BatchLoss:
    """The batch_loss() of the step that is tried."""

    def __init__(self, setup: EngineSetup, trials: Trials) -> None:
        self._setup, self._trials = setup, trials
        self._where = place_of_method(setup.task, "batch_loss")

    def error(self) -> UserError | None:
        """The first error of: draws, weights of the model, another loss again, a counter."""
        trials, tolerance = self._trials, TOLERANCE[self._trials.format]
        features = self._features(trials.samples)
        trials.generators.put_back()
        total, leaves = self._total(features)
        first = self._trial(total)
        after_first = trials.attributes.changed()
        moved = trials.generators.changed()
        if moved and (not _HOST.issuperset(moved) or self._setup.has_several_devices):
            return self._error_of_draws(features)
        if moved:  # on every device the same from now on, and after a resume
            trials.generators.put_back()
            self._setup.draw_sites.seeds_batch_loss = True
            first = self._trial(self._total(features)[0])
        if name := _weight_behind(total.sum, leaves, self._setup.strategy.models[0]):
            return UserError(
                f"batch_loss() uses {name} of the model itself, whose gradient would be lost",
                f'make it a feature: features() returns {{"{name.rpartition(".")[2]}": ...}}; a'
                " single number as model.scale.expand(len(x)); a penalty on weights too, with an"
                " equal share of it in each sample's row",
                self._where,
            )
        self._features(trials.samples[:1])  # so that what it keeps is of another microbatch
        again = self._trial(self._total(features)[0])
        after_again = trials.attributes.changed()
        if finding := compare_repeats(first, again, tolerance):
            evidence = self._evidence(next(iter(after_again), ""), features)
            return explain(finding, evidence, rounded=tolerance)
        counters = counters_in(after_first, after_again)
        trials.put_back()
        self._features(trials.samples)
        trials.attributes.advance(counters)
        if counters and compare_repeats(first, self._trial(self._total(features)[0]), tolerance):
            cause = "batch_loss() changes from call to call"
            return explain_state(self._evidence(next(iter(counters)), features), cause)
        return None

    def _features(self, rows: Rows) -> Features:
        features = self._trials.features_of(rows)
        return {name: feature.detach() for name, feature in features.items()}

    def _total(self, features: Features) -> tuple[Mean, Mapping[str, torch.Tensor]]:
        """The loss, and the tensors that may have a gradient."""
        setup, trials = self._setup, self._trials
        leaves = {name: rows.clone() for name, rows in features.items()}
        for rows in leaves.values():
            if rows.is_floating_point() or rows.is_complex():
                rows.requires_grad_()
        progress = setup.plan.progress_at(trials.step)
        phase = trials.phases[trials.phase_number]
        if setup.draw_sites.seeds_batch_loss:
            seed_host(step_key(setup.plan.fixed.seed, progress.epoch, progress.step))
        with current_device(setup.device), torch.enable_grad():
            # a copy of the dict, in which the loss may put other tensors
            losses = setup.task.batch_losses(dict(leaves), progress, phase)
        return losses["loss"], leaves

    def _trial(self, total: Mean) -> Trial:
        return Trial(len(self._trials.samples), float(total.sum), float(total.weight))

    def _error_of_draws(self, features: Features) -> UserError:
        self._trials.generators.put_back()
        draws = self._watched(features, {}).draws
        error = explain_draws(draws, "every device takes batch_loss() by itself")
        return UserError(error.cause, "draw them in features(), a row a sample", error.where)

    def _evidence(self, name: str, features: Features) -> Evidence:
        """name: of an attribute that batch_loss() changes; '': of none"""
        evidence = Evidence(loss_at=self._where, what="batch_loss()")
        if not name:
            return evidence
        read = partial(self._trials.attributes.read, name)
        changes = self._watched(features, {name: read}).changes
        return replace(evidence, state=described(name), state_at=changes.get(name, ""))

    def _watched(self, features: Features, reads: Mapping[str, Callable[[], object]]) -> Watched:
        return watch(partial(self._total, features), self._trials.generators, reads)


def _weight_behind(
    total: torch.Tensor, leaves: Mapping[str, torch.Tensor], model: torch.nn.Module
) -> str:
    """A parameter that the loss reaches by itself; '': none."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    known = {id(leaf) for leaf in leaves.values()}
    for node in graph_nodes(total):
        leaf = getattr(node, "variable", None)
        if isinstance(leaf, torch.Tensor) and id(leaf) not in known and id(leaf) in names:
            return names[id(leaf)]
    return ""
