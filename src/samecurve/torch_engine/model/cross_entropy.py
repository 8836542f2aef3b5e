"""A model's last layer and the cross-entropy of its logits in one operation.

The rows are computed in chunks, so that the logits of all rows never exist together, and none are
kept for backward. Chunks follow from the number of rows and the vocabulary alone, so that a
microbatch is cut alike wherever it is computed. The forward pass computes the loss of a chunk and
its gradient at once; the backward pass only multiplies that gradient by the one that it is given.

Source: Hsu et al. 2024, arXiv:2410.10989 (Liger Kernel, which needs triton). torch's own
F.linear_cross_entropy (from 2.13 on) imports torch._dynamo, and rounds the loss of two-byte rows to
two bytes.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from samecurve.core.planning.memory import logit_rows

IGNORED = -100  # a label that does not count
Kernel = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


class Head(nn.Linear):
    """A model's last layer, without a bias. Its result depends on what it is given.

    input alone: the logits
    input and labels: the summed cross-entropy
    score=True too: the pair of that sum and the number of rows whose label has the largest logit
    """

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs, bias=False)
        self.kernel: Kernel = _loss_in_place

    def forward(
        self,
        input: Tensor,  # noqa: A002 - torch's name
        labels: Tensor | None = None,
        *,
        score: bool = False,
    ) -> Any:
        if labels is None:
            return super().forward(input)
        rows, labels = input.flatten(0, -2), labels.flatten()
        kind = input.device.type
        if rows.dtype != torch.float64 and torch.is_autocast_enabled(kind):
            rows = rows.to(torch.get_autocast_dtype(kind))  # as autocast would do
        with torch.autocast(kind, enabled=False):
            if score:
                return _scored(rows, self.weight.to(rows.dtype), labels)
            apply: Any = _CrossEntropy.apply
            loss: torch.Tensor = apply(rows, self.weight, labels, self.kernel)
            return loss


class _CrossEntropy(torch.autograd.Function):
    """The summed cross-entropy of rows @ weight.T, with its gradients.

    rows: [n, in], in the format of products; weight: [out, in]; labels: [n]. Sums are at least
    float32.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, labels: Tensor, kernel: Kernel) -> Tensor:
        narrow, wide = weight.to(rows.dtype), _wide(rows)
        counted = (labels != IGNORED)[:, None]
        total = rows.new_zeros((), dtype=wide)
        for_rows = torch.empty_like(rows) if ctx.needs_input_grad[0] else None
        for_weight: Tensor | None = None
        size = logit_rows(weight.shape[0], rows.device.type)
        for first in range(0, rows.shape[0], size):
            chunk = slice(first, first + size)
            loss, gradient = kernel(rows[chunk] @ narrow.t(), labels[chunk])
            total += loss
            if for_rows is not None:
                for_rows[chunk] = gradient @ narrow
            if ctx.needs_input_grad[1]:
                counted_rows = rows[chunk] * counted[chunk]
                for_weight = _added(for_weight, gradient.t(), counted_rows, _wide(weight))
            del gradient  # else it would be held beside the next chunk's logits
        ctx.save_for_backward(None if for_rows is None else for_rows.mul_(counted), for_weight)
        ctx.dtype = weight.dtype
        return total

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, above: Tensor) -> tuple[Tensor | None, ...]:
        for_rows, for_weight = ctx.saved_tensors
        return (
            None if for_rows is None else for_rows.mul_(above),
            None if for_weight is None else for_weight.mul_(above).to(ctx.dtype),
            None,
            None,
        )


def _added(total: Tensor | None, left: Tensor, right: Tensor, dtype: torch.dtype) -> Tensor:
    """The sum total + left @ right in `dtype`; the product is computed in its factors' format."""
    if total is None:
        return (left @ right).to(dtype)
    return total.addmm_(left, right) if left.dtype == dtype else total.add_(left @ right)


def _loss_in_place(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """The summed loss, and its gradient by the logits [n, out] in their format.

    The gradient of a row without a label has no meaning.
    """
    classes, counted = labels.clamp(min=0)[:, None], (labels != IGNORED)[:, None]
    log_softmax = F.log_softmax(logits, 1, dtype=_wide(logits))
    loss = -(log_softmax.gather(1, classes) * counted).sum()
    minus_one = torch.full_like(classes, -1, dtype=log_softmax.dtype)
    gradient = log_softmax.exp_().scatter_add_(1, classes, minus_one)
    return loss, gradient.to(logits.dtype)


def compilable_loss(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Compute what _loss_in_place() computes, without changes in place: compiled, this makes two
    passes over the logits.
    """
    classes, counted = labels.clamp(min=0)[:, None], (labels != IGNORED)[:, None]
    wide = logits.to(_wide(logits))
    log_softmax = wide - torch.logsumexp(wide, 1, keepdim=True)
    loss = -(log_softmax.gather(1, classes) * counted).sum()
    one_hot = torch.arange(logits.shape[1], device=logits.device) == classes
    gradient = log_softmax.exp() - one_hot.to(log_softmax.dtype)
    return loss, gradient.to(logits.dtype)


def _scored(rows: Tensor, weight: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """The summed loss, and the number of rows whose label has the largest logit."""
    loss, correct = rows.new_zeros((), dtype=_wide(rows)), labels.new_zeros(())
    size = logit_rows(weight.shape[0], rows.device.type)
    for first in range(0, rows.shape[0], size):
        chunk = slice(first, first + size)
        logits = rows[chunk] @ weight.t()
        wide = logits.to(_wide(logits))
        loss += F.cross_entropy(wide, labels[chunk], ignore_index=IGNORED, reduction="sum")
        # IGNORED is the number of no logit, so such a row is never counted
        correct += (logits.argmax(1) == labels[chunk]).sum()
    return loss, correct


def _wide(tensor: Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)
