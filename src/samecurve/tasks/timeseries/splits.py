"""Checks that all kinds of sources need: labels are classes, a subject is in one split only."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from samecurve.errors import UserError
from samecurve.tasks.timeseries.windows import Numbers, Windows

_SHOWN = 20  # names in a line


def number_labels(
    labels: Sequence[NDArray[Any]], classes: Sequence[str] | None, where: str
) -> tuple[list[str], list[Numbers]]:
    """The names of the classes, and for each split the class numbers of its windows.

    labels: numbers, or names
    classes: the names in the order of their numbers; None: the labels that occur, sorted

    UserError: a label is of no class, or there is one class only.
    """
    present = sorted(np.unique(np.concatenate(labels)).tolist(), key=_order)
    values: list[Any] = present
    if classes is not None:
        values = list(classes) if isinstance(present[0], str) else list(range(len(classes)))
    names = [str(value) for value in present] if classes is None else list(classes)
    unknown = [value for value in present if value not in values]
    if unknown:
        raise UserError(
            f"label {unknown[0]} is none of the {len(names)} classes: {', '.join(names[:_SHOWN])}",
            f"a name, or a number from 0 to {len(names) - 1}",
            where,
        )
    if len(names) < 2:
        raise UserError(
            f"all labels are {names[0]}: there is nothing to tell apart",
            "windows of two classes or more",
            where,
        )
    number = {value: index for index, value in enumerate(values)}
    return names, [np.array([number[v] for v in part.tolist()], np.int64) for part in labels]


def _order(label: int | str) -> tuple[int, str]:
    """A sort key: numbers by their value (2 before 10, also as text), names after them."""
    if isinstance(label, int) or label.lstrip("-").isdecimal():
        return int(label), ""
    return 1 << 62, label


def check_apart(splits: Sequence[Windows], where: Callable[[int], str]) -> None:
    """Check that no subject is in both splits, where the subjects are known.

    splits: the training windows, and perhaps the test windows
    where: the place of a test window in the source, for the error

    UserError: a subject is in both.
    """
    train, test = splits[0].subjects, splits[-1].subjects
    if len(splits) < 2 or train is None or test is None:
        return
    both = np.flatnonzero(np.isin(test, train))
    if len(both):
        raise UserError(
            f"subject {test[both[0]]} is in the test split and in the training split",
            "each subject in one of them: a test on people that were trained on says little",
            where(int(both[0])),
        )
