"""What a class's methods return: losses by name, and metrics as sums and weights.

what: the method that has returned it, for errors: "MyTask.loss()"
"""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from samecurve.core.determinism import NEGATIVE_WEIGHT_REMEDY, Mean
from samecurve.core.evaluation import EvalSums, Metric, SumSpec
from samecurve.core.events import BESIDE_METRICS
from samecurve.core.step_logger import STEP_VALUES
from samecurve.errors import UserError

FEATURES = (
    "return {name: tensor with one row a sample}: a number of the model for all samples as"
    " model.scale.expand(len(x)), sums over a sample's tokens as one row each"
)


def check_named(losses: Mapping[str, Mean], what: str) -> None:
    """UserError: there is no loss, or a Mean beside it has no free name, or can't be added up."""
    for name, mean in losses.items():
        if not isinstance(name, str) or not name or name in STEP_VALUES:
            raise UserError(f"{what} gives {name!r}, a name that is taken", "another name", "task")
        is_single = isinstance(mean, Mean) and not any(getattr(n, "ndim", 0) for n in mean)
        if name != "loss" and not is_single:
            raise UserError(
                f'{what} gives no single Mean as "{name}"',
                "Mean(sum, weight), each a number or a tensor with one",
                "task",
            )
    if "loss" not in losses:
        raise UserError(
            f'{what} gives {", ".join(losses)}, but no "loss"',
            'return {"loss": Mean(...), ...}: the others are logged beside it',
            "task",
        )


def check_metrics(metrics: object, what: str, *, whole_batch: bool) -> None:
    """UserError: metrics() has returned what can't be added up, or a name that is taken.

    whole_batch: batch_loss() gives the loss
    """
    if not isinstance(metrics, Mapping):
        cause = f"{what} returns {type(metrics).__name__}"
        raise UserError(cause, "a dict of name -> Mean(sum, weight)", "task")
    for name, mean in metrics.items():
        if name in BESIDE_METRICS or (name == "loss" and whole_batch):
            raise UserError(f'{what} gives "{name}", a name that is taken', "another name", "task")
        if not isinstance(mean, Mean) or getattr(mean.weight, "ndim", 0) != 0:
            raise UserError(
                f'{what} gives no single Mean as "{name}"',
                "Mean(sum, weight), each a number or a tensor with one, or the sum an array of"
                " whole numbers (counts); both are added over all devices and divided once",
                "task",
            )


def parts_of(means: Mapping[str, Mean]) -> dict[str, Any]:
    """The sum and the weight of each mean, as `name.sum` and `name.weight`."""
    return {
        f"{name}.{part}": value
        for name, mean in means.items()
        for part, value in zip(Mean._fields, mean, strict=True)
    }


def totals_of(sums: EvalSums, names: Mapping[str, Mean]) -> dict[str, Mean]:
    """The means of an evaluation from their parts. UserError: a weight is below 0."""
    totals = {name: Mean(sums[f"{name}.sum"], sums[f"{name}.weight"]) for name in names}
    for name, total in totals.items():
        if total.weight < 0:
            raise UserError(
                f'the weights of "{name}" add up to {total.weight:g} in the evaluation',
                NEGATIVE_WEIGHT_REMEDY,
                "task",
            )
    return totals


def spec_of(mean: Mean) -> Mean:
    """The form of a metric's sum and weight: whole numbers are added as such."""
    shape = tuple(getattr(mean.sum, "shape", ()))
    return Mean(SumSpec(shape, integer=bool(shape) and _is_whole(mean.sum)), SumSpec())


def _is_whole(array: Any) -> bool:
    """Whether an array, of whichever library, has integers or booleans."""
    return any(kind in str(array.dtype) for kind in ("int", "bool"))


def shown(total: Mean) -> Metric:
    """The value that is shown of a total: sum / weight, and counts as they are."""
    if isinstance(total.sum, np.ndarray) and _is_whole(total.sum):
        return total.sum
    if not total.weight:
        return math.nan
    quotient: Metric = total.sum / total.weight
    return quotient
