"""A model's last layer and the cross-entropy of its logits in one, some rows at a time: all logits
are never held, and the loss keeps none of them for backward.

Of each chunk of rows the loss and, at once, its gradient are computed, for the loss is what
backward begins at: that pass only multiplies by what comes from above. Source: Hsu et al. 2024,
arXiv:2410.10989 (Liger Kernel, which needs triton). torch's own F.linear_cross_entropy (from 2.13
on) imports torch._dynamo, and rounds the loss of two-byte rows to two bytes.
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
    """Logits; or, given labels, the summed cross-entropy; or, scored too, that and how many labels
    are the likeliest. No bias.
    """

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs, bias=False)
        self.kernel: Kernel = _loss_in_place

    def forward(self, input: Tensor, labels: Tensor | None = None, score: bool = False) -> Any:
        if labels is None:
            return super().forward(input)
        rows, labels = input.flatten(0, -2), labels.flatten()
        kind = input.device.type
        narrow = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else rows.dtype
        rows = rows if rows.dtype == torch.float64 else rows.to(narrow)  # as autocast has it
        with torch.autocast(kind, enabled=False):
            return (
                _scored(rows, self.weight.to(rows.dtype), labels)
                if score
                else _CrossEntropy.apply(rows, self.weight, labels, self.kernel)  # type: ignore[no-untyped-call]
            )


class _CrossEntropy(torch.autograd.Function):
    """rows [n, in], in what products are computed in; weight [out, in]; labels [n].

    Sums are at least float32.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, labels: Tensor, kernel: Kernel) -> Tensor:
        narrow, wide, counted = weight.to(rows.dtype), _wide(rows), (labels != IGNORED)[:, None]
        total = rows.new_zeros((), dtype=wide)
        for_rows = torch.empty_like(rows) if ctx.needs_input_grad[0] else None
        for_weight: Tensor | None = None
        for cut in _cuts(rows, weight):
            loss, gradient = kernel(rows[cut] @ narrow.t(), labels[cut])
            total += loss
            if for_rows is not None:
                for_rows[cut] = gradient @ narrow
            if ctx.needs_input_grad[1]:
                for_weight = _added(
                    for_weight, gradient.t(), rows[cut] * counted[cut], _wide(weight)
                )
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
    """total + left @ right; the sum wide, the product in what it is given in."""
    if total is None:
        return (left @ right).to(dtype)
    return total.addmm_(left, right) if left.dtype == dtype else total.add_(left @ right)


def _loss_in_place(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """(summed loss, its gradient by the logits [n, out], in their format).

    Of a row without a label the gradient means nothing.
    """
    places, counted = labels.clamp(min=0)[:, None], (labels != IGNORED)[:, None]
    found = F.log_softmax(logits, 1, dtype=_wide(logits))
    loss = -(found.gather(1, places) * counted).sum()
    found.exp_().scatter_add_(1, places, torch.full_like(places, -1, dtype=found.dtype))
    return loss, found.to(logits.dtype)


def compilable_loss(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """The same, without a change in place, so that a compiler makes two passes over the logits of
    it.
    """
    places, counted = labels.clamp(min=0)[:, None], (labels != IGNORED)[:, None]
    wide = logits.to(_wide(logits))
    found = wide - torch.logsumexp(wide, 1, keepdim=True)
    loss = -(found.gather(1, places) * counted).sum()
    return loss, (
        found.exp()
        - (torch.arange(logits.shape[1], device=logits.device) == places).to(found.dtype)
    ).to(logits.dtype)


def _scored(rows: Tensor, weight: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """(summed loss, labels that are the likeliest)."""
    loss, correct = rows.new_zeros((), dtype=_wide(rows)), labels.new_zeros(())
    for cut in _cuts(rows, weight):
        logits = rows[cut] @ weight.t()
        loss += F.cross_entropy(
            logits.to(_wide(logits)), labels[cut], ignore_index=IGNORED, reduction="sum"
        )
        correct += (
            logits.argmax(1) == labels[cut]
        ).sum()  # no logit has the number of a label that does not count
    return loss, correct


def _cuts(rows: Tensor, weight: Tensor) -> list[slice]:
    """Where the rows are cut: by their number and the vocabulary alone, so that a slot is cut alike
    wherever it is computed.
    """
    size = logit_rows(weight.shape[0], rows.device.type)
    return [slice(first, first + size) for first in range(0, len(rows), size)]


def _wide(tensor: Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)
