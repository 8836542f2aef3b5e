"""The form of what loss() and features() of a class for PyTorch return, and its gradients."""

from collections.abc import Mapping
from typing import Any

import torch

from samecurve.core.determinism.mean import NEGATIVE_WEIGHT_REMEDY, Mean
from samecurve.core.split_check.additivity import MEAN
from samecurve.errors import UserError
from samecurve.tasks.adapter.engine_adapter import FEATURES


def check_loss(loss: object, what: str) -> None:
    """UserError: what a method returns as the loss can't be added up and divided once.

    what: the method, for errors
    """
    if not isinstance(loss, Mean):
        raise UserError(f"{what} returns {_kind_of(loss)}, not a samecurve.Mean", MEAN, "task")
    total, weight = loss
    if not isinstance(total, torch.Tensor) or total.ndim or not total.is_floating_point():
        kind = f"of type {type(total).__name__}"
        if isinstance(total, torch.Tensor):
            kind = f"a {total.dtype} tensor of shape {tuple(total.shape)}"
        raise UserError(
            f"the sum of {what} is {kind}, not a tensor with one real number", MEAN, "task"
        )
    if torch.is_grad_enabled() and not total.requires_grad:
        raise UserError(
            f"the sum of {what} has no gradient",
            "compute it from the model's output, without .item(), .detach(), float() or"
            " torch.no_grad() on the way",
            "task",
        )
    is_one_number = isinstance(weight, int | float)
    kind = f"of type {type(weight).__name__}"
    if isinstance(weight, torch.Tensor):
        is_one_number = not weight.ndim
        kind = f"a tensor of shape {tuple(weight.shape)}"
    if not is_one_number:
        raise UserError(f"the weight of {what} is {kind}, not one number", MEAN, "task")
    if not isinstance(weight, torch.Tensor) and weight < 0:
        raise UserError(f"the weight of {what} is {weight:g}", NEGATIVE_WEIGHT_REMEDY, "task")


def check_features(features: object, what: str) -> None:
    """UserError: what features() returns is not tensors by name, with rows."""
    if not isinstance(features, Mapping) or not features:
        raise UserError(f"{what} returns {_kind_of(features)}", FEATURES, "task")
    for name, feature in features.items():
        if not isinstance(feature, torch.Tensor) or not feature.ndim:
            raise UserError(f'{what} gives "{name}" as {_kind_of(feature)}', FEATURES, "task")


def _kind_of(value: object) -> str:
    shape = f" of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else ""
    return f"{type(value).__name__}{shape}"


def without_gradient(losses: Mapping[str, Mean]) -> Mapping[str, Mean]:
    """The means with those beside the loss taken off their graphs: they are only logged."""
    if len(losses) == 1:
        return losses
    return {
        name: mean if name == "loss" else Mean(*map(_detached, mean))
        for name, mean in losses.items()
    }


def _detached(number: Any) -> Any:
    return number.detach() if isinstance(number, torch.Tensor) else number
