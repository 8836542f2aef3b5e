"""How a model is laid out over ranks. A strategy is one class here, one formula in core/memory.py and one entry in STRATEGIES."""

import inspect
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lockstep.on_torch.collectives import BucketSum, Ranks

# A model's buffers are functions of its fields here, so none is sent along; torch 2.13 renamed the argument.
_RENAMED = "forward_sync_buffers" in inspect.signature(DistributedDataParallel.__init__).parameters
_NO_BUFFER_SYNC: dict[str, Any] = {"forward_sync_buffers" if _RENAMED else "broadcast_buffers": False}


class Strategy(Protocol):
    def place(self, model: nn.Module) -> nn.Module:
        """The module to call in a step; gradients land in the parameters of `model`."""
        ...

    def round(self, last: bool, real: bool) -> AbstractContextManager[Any]:
        """Around forward and backward of one slot. The last round leaves the sum over all ranks in the gradients."""
        ...

    def norm(self, gradients: Iterable[torch.Tensor]) -> torch.Tensor:
        """The norm of the whole gradient, after the reduction; float64, the same on every rank."""
        ...


class Single:
    """One device."""

    def __init__(self, ranks: Ranks, device: torch.device) -> None:
        self._device = device

    def place(self, model: nn.Module) -> nn.Module:
        return model

    def round(self, last: bool, real: bool) -> AbstractContextManager[Any]:
        return nullcontext()

    def norm(self, gradients: Iterable[torch.Tensor]) -> torch.Tensor:
        norms = torch._foreach_norm(list(gradients))
        whole: torch.Tensor = torch.linalg.vector_norm(torch.stack(norms).double())
        return whole


class DDP(Single):
    """Every device holds the whole model; gradients are summed once a step, overlapped with the last backward pass."""

    def __init__(self, ranks: Ranks, device: torch.device) -> None:
        super().__init__(ranks, device)
        assert ranks.group is not None
        self._sum = BucketSum(ranks.group)

    def place(self, model: nn.Module) -> nn.Module:
        self._placed = DistributedDataParallel(
            model, device_ids=[self._device.index] if self._device.type == "cuda" else None,
            process_group=self._sum.group, gradient_as_bucket_view=True, **_NO_BUFFER_SYNC)
        self._placed.register_comm_hook(self._sum, BucketSum.hook)
        return self._placed

    def round(self, last: bool, real: bool) -> AbstractContextManager[Any]:
        self._sum.real = real
        return nullcontext() if last else self._placed.no_sync()


STRATEGIES: dict[str, Callable[[Ranks, torch.device], Strategy]] = {"single": Single, "ddp": DDP}
