"""Counts of labels and answers, with PyTorch."""

import torch
from torch import Tensor


def count_answers(labels: Tensor, answers: Tensor, classes: int) -> Tensor:
    """How many samples have each label and answer: int64 [label, answer].

    labels, answers: int64 [samples]
    """
    empty = torch.zeros(classes * classes, dtype=torch.int64, device=labels.device)
    pairs = empty.index_add(0, labels * classes + answers, torch.ones_like(labels))
    return pairs.view(classes, classes)
