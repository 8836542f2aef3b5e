"""The head's own cross-entropy: the same numbers as all logits at once, in a fraction of their
memory.
"""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from samecurve.core.planning import memory
from samecurve.torch_engine.model.cross_entropy import Head, compilable_loss


def made(rows: int, inputs: int, vocab: int, dtype: torch.dtype) -> tuple[Head, Tensor, Tensor]:
    """A head, rows before it, and labels of which every third does not count, the whole last chunk
    among them.
    """
    random = torch.Generator().manual_seed(3)
    head = Head(inputs, vocab).to(dtype)
    nn.init.normal_(head.weight, 0.0, 0.2, generator=random)
    labels = torch.randint(0, vocab, (rows,), generator=random)
    labels[::3] = labels[-2:] = -100
    return head, torch.randn(rows, inputs, dtype=dtype, generator=random).requires_grad_(), labels


def plain(head: Head, rows: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    logits = head(rows)
    return (
        F.cross_entropy(logits, labels, ignore_index=-100, reduction="sum"),
        (logits.argmax(-1) == labels).sum(),
    )


def gradients(loss: Tensor, head: Head, rows: Tensor) -> list[Any]:
    return list(
        torch.autograd.grad(loss, [head.weight, rows], torch.tensor(1 / 512, dtype=loss.dtype))
    )


@pytest.mark.parametrize(("cut", "compiled"), [(7, False), (7, True), (8192, False)])
def test_loss_and_gradients_are_those_of_all_logits_at_once(
    *, cut: int, compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "_LOGIT_ROWS", (1, cut))
    head, rows, labels = made(50, 12, 31, torch.float64)
    if compiled:
        head.kernel = compilable_loss
    expected, likeliest = plain(head, rows, labels)
    loss = head(rows.view(5, 10, 12), labels.view(5, 10))
    torch.testing.assert_close(loss, expected, rtol=1e-13, atol=0)
    for found, right in zip(
        gradients(loss, head, rows), gradients(expected, head, rows), strict=True
    ):
        torch.testing.assert_close(found, right, rtol=1e-12, atol=1e-17)
    with torch.no_grad():
        scored, correct = head(rows, labels, score=True)
    torch.testing.assert_close(scored, expected.detach(), rtol=1e-13, atol=0)
    assert correct == likeliest


def test_autocast_and_a_frozen_head_give_what_autocast_gives() -> None:
    head, rows, labels = made(40, 16, 24, torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss, (expected, _) = head(rows, labels), plain(head, rows, labels)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0)
    for found, right in zip(
        gradients(loss, head, rows), gradients(expected, head, rows), strict=True
    ):
        assert found.dtype == right.dtype
        torch.testing.assert_close(found, right, rtol=1e-2, atol=1e-5)
    head.weight.requires_grad_(False)
    torch.autograd.backward(head(rows, labels))
    assert rows.grad is not None
    assert head.weight.grad is None


def test_logits_are_not_held() -> None:
    """512 rows over 32,000."""
    head, rows, labels = made(512, 16, 32_000, torch.float32)
    kept: list[int] = []
    largest: list[int] = []

    class Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
        def __torch_dispatch__(
            self, function: Any, types: Any, arguments: Any = (), keywords: Any = None
        ) -> Any:
            found = function(*arguments, **(keywords or {}))
            largest.extend(
                one.untyped_storage().nbytes()
                for one in (found if isinstance(found, tuple) else [found])
                if isinstance(one, Tensor)
            )
            return found

    def pack(tensor: Tensor) -> Tensor:
        kept.append(tensor.untyped_storage().nbytes())
        return tensor

    def sizes(way: Any) -> tuple[int, int]:
        kept.clear()
        largest.clear()
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor), Watch():  # type: ignore[no-untyped-call]
            way(head, rows, labels)
        return max(largest), sum(kept)

    whole = 4 * 512 * 32_000
    assert min(sizes(plain)) >= whole
    assert sizes(Head.__call__) == (
        4 * 131 * 32_000,
        4 * 16 * (32_000 + 512),
    )  # a chunk; and two gradients until backward
