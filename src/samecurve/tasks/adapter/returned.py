"""What a class's methods return: losses by name, metrics as sums and weights, and data that has a
known length and is read by id. Data that is read in its own order is refused; the error names what
to return in its place.

what: the method that has returned it, for errors: "MyTask.loss()"
"""

import inspect
import math
import sys
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from samecurve.core.determinism import NEGATIVE_WEIGHT_REMEDY, Mean
from samecurve.core.evaluation import EvalSums, Metric, SumSpec
from samecurve.core.events import BESIDE_METRICS
from samecurve.core.step_logger import STEP_VALUES
from samecurve.errors import UserError

Columns = dict[str, NDArray[Any]]  # arrays with one row a sample
_OF_CONTAINERS = (dict.__getitem__, list.__getitem__, tuple.__getitem__)
FORM = (
    "a torch Dataset (not its DataLoader), or an object with __len__ and __getitem__(ids: int64"
    " array) -> {name: array with one row an id}"
)
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


def count_samples(data: Any, what: str) -> int:
    """How many samples the data has.

    what: the call that gave the data, for errors

    UserError: the data has no sample or no length, or can't be read by id.
    """
    lack, remedy = _lack(data)
    if lack:
        raise UserError(
            f"the data of {what}, of type {type(data).__name__}, {lack}", remedy, "task"
        )
    count = len(data)
    if count < 1:
        raise UserError(
            f"the data of {what} has no sample",
            "its length must be at least 1; eval_data() may return None",
            "task",
        )
    return count


def is_torch(data: Any, kind: str) -> bool:
    """Whether the data is of this class of torch.utils.data, if torch has been imported."""
    if "torch.utils.data" not in sys.modules:
        return False
    import torch.utils.data  # waits, where another thread is importing it

    return isinstance(data, getattr(torch.utils.data, kind))


def is_from(data: Any, module: str) -> bool:
    """Whether the data's class, or a base of it, is of this module or one below it."""
    modules = (kind.__module__ for kind in type(data).__mro__)
    return any(name == module or name.startswith(f"{module}.") for name in modules)


def parameters_of(function: Callable[..., Any]) -> frozenset[str]:
    """The names of a function's parameters; none for a builtin that has no signature."""
    try:
        return frozenset(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        return frozenset()


def _lack(data: Any) -> tuple[str, str]:
    """Why the data can't be read by id, and what to return in its place; both empty: it can."""
    by_id = f"return {FORM}: which samples a step takes follows from their number and the seed"
    if is_torch(data, "DataLoader"):
        return "reads in its own order, and makes batches", (
            "return the Dataset that it was made of: batch.samples, --num-workers and the seed of"
            " the config do what its arguments did, and a method collate(self, samples) of the task"
            " what its collate_fn did"
        )
    if is_from(data, "webdataset"):
        return "is read in its own order, not by id", (
            'return samecurve.Shards("shards/*.tar", decode=...): the same tar files, read by id'
            " through an index that is made once"
        )
    if is_from(data, "datasets.iterable_dataset"):
        return "is read in its own order, not by id", (
            "load_dataset(..., streaming=False); or, where that is too big,"
            ' samecurve.Shards("data/*.parquet") over its files'
        )
    if is_torch(data, "IterableDataset"):
        return "is read in its own order, not by id", (
            f'{by_id}; samecurve.Shards("data/*.jsonl") reads shards (JSON lines, parquet, tar)'
            " that are too big for memory in this way"
        )
    if is_from(data, "datasets.dataset_dict"):
        return f"holds several data sets ({_some(data)})", 'return one of them: data["train"]'
    if getattr(type(data), "__getitem__", None) in _OF_CONTAINERS:
        return _lack_of_container(data)
    if not hasattr(data, "__getitem__"):
        return "has no __getitem__", by_id
    if not hasattr(data, "__len__"):
        return "has no length (__len__)", by_id
    return "", ""


def _lack_of_container(data: Any) -> tuple[str, str]:
    if isinstance(data, Mapping):
        return f"is read by names ({_some(data)}), not by ids", (
            "an object around it with __len__ and __getitem__(self, ids), which returns"
            " {name: array[ids] for name, array in arrays.items()}"
        )
    return "is read by one number at a time, not by an array of ids", (
        "torch.utils.data.TensorDataset(x, y) for tensors; for a list of samples, a torch Dataset"
        " with __len__ and __getitem__(self, index) around it"
    )


def _some(names: Any) -> str:
    return ", ".join(map(repr, list(names)[:4]))
