"""Shared parts of classifiers: class weights, and metrics from a confusion matrix.

confusion: how many samples have each [label, answer]. No engine is imported here.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from samecurve.seam import Mean, UserError

_SHOWN = 20  # classes named in an error


def weigh_classes(
    chosen: str | Mapping[str, float], classes: Sequence[str], counts: Sequence[int]
) -> list[float]:
    """The weight of a sample for each class, by number.

    chosen: none (1 for each class); balanced (N / (C n) for a class of n, with N samples in C
        classes; a class without samples is not counted, and has weight 1); or weights by name
    counts: samples of each class that are trained on

    UserError: a weight names no class.
    """
    if chosen == "none":
        return [1.0] * len(classes)
    if chosen == "balanced":
        num_classes = sum(count > 0 for count in counts)
        return [sum(counts) / (num_classes * count) if count else 1.0 for count in counts]
    assert isinstance(chosen, Mapping)
    for name in chosen:
        if name not in classes:
            raise UserError(
                f"model.class_weights: {name} is no label of the data, which has"
                f" {', '.join(classes[:_SHOWN])}",
                "weights by label, such as {spam: 4}",
                "model.class_weights",
            )
    return [chosen.get(name, 1.0) for name in classes]


def summarize_classes(totals: Mapping[str, Mean]) -> dict[str, Any]:
    """The loss, and accuracy and macro F1 from the confusion matrix."""
    loss = float(totals["loss"].sum / totals["loss"].weight)
    return {"loss": loss, **read_confusion(np.asarray(totals["confusion"].sum))}


def read_confusion(confusion: NDArray[np.int64]) -> dict[str, Any]:
    """Accuracy, and the mean F1 over classes that are a label or an answer; beside the counts."""
    right = np.diagonal(confusion)
    counts = confusion.sum(0) + confusion.sum(1)
    f1: NDArray[np.float64] = 2 * right[counts > 0] / counts[counts > 0]
    return {
        "accuracy": float(right.sum() / confusion.sum()),
        "macro_f1": float(f1.mean()),
        "confusion": confusion,
    }
