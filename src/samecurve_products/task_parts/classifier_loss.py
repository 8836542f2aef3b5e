"""The loss and the counts of a classifier, with PyTorch.

A sample's loss counts as much as its class weighs. The sum is divided by those weights once, over
all devices, so classes that are spread unevenly over devices or microbatches change nothing.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from samecurve.seam import Mean
from samecurve_products.task_parts.on_device import on_device


def class_loss(
    logits: Tensor, labels: Tensor, weights: Sequence[float], label_smoothing: float = 0.0
) -> Mean:
    """Cross-entropy. logits: [samples, classes]. labels: int64 [samples]. weights: by class."""
    by_class = on_device(torch.tensor(weights, dtype=logits.dtype), logits.device)
    error = F.cross_entropy(
        logits, labels, weight=by_class, label_smoothing=label_smoothing, reduction="none"
    )
    return Mean(error.sum(), by_class[labels].sum())


def count_answers(labels: Tensor, answers: Tensor, classes: int) -> Tensor:
    """How many samples have each label and answer: int64 [label, answer].

    labels, answers: int64 [samples]
    """
    empty = torch.zeros(classes * classes, dtype=torch.int64, device=labels.device)
    pairs = empty.index_add(0, labels * classes + answers, torch.ones_like(labels))
    return pairs.view(classes, classes)


def widened(logits: Tensor) -> Tensor:
    """The logits as float32 at least."""
    return logits.to(torch.promote_types(logits.dtype, torch.float32))
