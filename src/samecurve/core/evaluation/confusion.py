"""A confusion matrix, whole numbers [label, answer], how many samples; and what it says of a class.

The names of classes, in the matrix's order, stand in a run's reference figures, each with what a
sample of it counts in the loss.
"""

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

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
