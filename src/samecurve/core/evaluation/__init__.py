"""The sums of an evaluation: numbers, and arrays of counts such as a confusion matrix.

They are added over microbatches, devices and processes. Integer sums stay integers all the way, so
that they are the same on any number of devices, whatever the order they are added in.

A confusion matrix [label, answer] says how many samples of a label got an answer. The names of its
classes, in its order, stand in a run's reference figures, each with what a sample of the class
counts in the loss.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from samecurve.core.config import MetricGoal
from samecurve.errors import UserError

EvalSum = float | NDArray[Any]  # of a sum's own shape: float64, or int64 where it is an integer
EvalSums = Mapping[str, EvalSum]
JournalMetric = float | list[Any] | None
Metric = float | list[Any] | tuple[Any, ...] | NDArray[Any]  # a number, or an array of them


class SumSpec(NamedTuple):
    """The form of one of a task's sums, the same for every microbatch."""

    shape: tuple[int, ...] = ()  # (): one number
    integer: bool = False  # a count: added as a whole number, up to 2**63


SumSpecs = Mapping[str, SumSpec]


class Summarize(Protocol):
    """The sums of an evaluation -> its metrics; among them the number "loss"."""

    def __call__(self, sums: EvalSums, /) -> Mapping[str, Metric]: ...


def size(specs: SumSpecs, *, integer: bool) -> int:
    """How many numbers the integer sums hold together, or the others."""
    return sum(math.prod(spec.shape) for spec in specs.values() if spec.integer == integer)


def check_shape(name: str, shape: Sequence[int], spec: SumSpec) -> None:
    """UserError: a microbatch's sum has another shape than it was said to have."""
    if tuple(shape) != spec.shape:
        raise UserError(
            f'the sum "{name}" of an evaluation has shape {tuple(shape)} for one microbatch, and'
            f" {spec.shape} was expected",
            "the same shape for every microbatch: say the number of classes, not those seen in it",
            "task",
        )


def unpack_sums(
    specs: SumSpecs, floats: NDArray[np.float64], counts: NDArray[np.int64]
) -> dict[str, EvalSum]:
    """Sums by name, from those that are not integers and those that are, each in a row."""
    sums: dict[str, EvalSum] = {}
    begin = {False: 0, True: 0}
    for name, spec in specs.items():
        end = begin[spec.integer] + math.prod(spec.shape)
        values = (counts if spec.integer else floats)[begin[spec.integer] : end]
        sums[name] = values.reshape(spec.shape) if spec.shape else values[0].item()
        begin[spec.integer] = end
    return sums


def sums_of_ones(specs: SumSpecs) -> dict[str, EvalSum]:
    """Sums of ones in the form of an evaluation's sums."""
    floats, counts = (np.ones(size(specs, integer=integer)) for integer in (False, True))
    return unpack_sums(specs, floats, counts.astype(np.int64))


def journal_value(metric: Metric | None) -> JournalMetric:
    """A metric as JSON has it: what is not finite is null, an array is nested lists."""
    if isinstance(metric, np.ndarray | np.generic):
        return journal_value(metric.tolist())
    if isinstance(metric, list | tuple):
        return [journal_value(item) for item in metric]
    if isinstance(metric, float) and not math.isfinite(metric):
        return None
    return metric


def check_metric(goal: MetricGoal, metrics: Iterable[str]) -> None:
    """metrics: what an evaluation gives that is one number. UserError: the goal is not among it."""
    names = sorted(metrics)
    if goal.metric not in names:
        raise UserError(
            f"{goal.metric!r} is no number that an evaluation gives",
            f"one of {', '.join(names)} as train.best_metric and train.early_stop.metric",
            "train",
        )


def metric_of(metrics: Mapping[str, float | None], goal: MetricGoal) -> float | None:
    """The goal's metric in an evaluation; None: not finite. UserError: it is not there."""
    check_metric(goal, metrics)
    return metrics[goal.metric]


def check_goals(
    goals: Iterable[MetricGoal], specs: Callable[[], SumSpecs], summarize: Summarize
) -> None:
    """Before the first step: what can't be found then would end the run at its first evaluation.

    specs: of the task's sums; learning them takes a batch
    summarize: of the task

    UserError: a goal goes by what is no metric of the task.
    """
    named = [goal for goal in goals if goal.metric != "loss"]
    if not named:
        return
    try:
        metrics = summarize(sums_of_ones(specs()))
    except UserError:  # a class's own summarize() may take only what adds up; its evaluation tells
        return
    numbers = [
        name for name, value in metrics.items() if not isinstance(journal_value(value), list)
    ]
    for goal in named:
        check_metric(goal, numbers)


CLASS_WEIGHT = "class_weight/"  # before the names of classes in a run's reference


@dataclass(frozen=True)
class ClassScore:
    """Scores of one class. A quotient with 0 below it is 0."""

    name: str
    samples: int  # with that label
    precision: float
    recall: float
    f1: float

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def is_confusion(value: object) -> bool:
    """Whether it is a square matrix of whole numbers, none below 0, of two classes or more."""
    if not isinstance(value, list) or len(value) < 2:
        return False
    return all(
        isinstance(row, list)
        and len(row) == len(value)
        and all(isinstance(n, int) and not isinstance(n, bool) and n >= 0 for n in row)
        for row in value
    )


def class_names(reference: Iterable[str], count: int) -> list[str]:
    """The names of `count` classes; their numbers, where the reference has not so many."""
    names = [key.removeprefix(CLASS_WEIGHT) for key in reference if key.startswith(CLASS_WEIGHT)]
    return names if len(names) == count else [str(number) for number in range(count)]


def class_scores(matrix: Sequence[Sequence[int]], names: Sequence[str]) -> list[ClassScore]:
    scores = []
    for number, name in enumerate(names):
        right = matrix[number][number]
        samples, answers = sum(matrix[number]), sum(row[number] for row in matrix)
        f1 = _share(2 * right, samples + answers)
        scores.append(ClassScore(name, samples, _share(right, answers), _share(right, samples), f1))
    return scores


def _share(part: int, whole: int) -> float:
    return part / whole if whole else 0.0
