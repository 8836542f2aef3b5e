"""Number formats: weights in f32 (or f64), mixed precisions by autocast, f16 with a scale all ranks
share.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

from samecurve.core.config.values import Precision

_INITIAL_SCALE = 2.0**16
_GROW_AFTER = 2000  # finite steps before the scale is doubled, as torch.amp.GradScaler has it


def weight_dtype(precision: Precision) -> torch.dtype:
    return torch.float64 if precision == "f64" else torch.float32


def current_device(device: torch.device) -> AbstractContextManager[object]:
    """Makes a GPU the current one of this thread: what a model makes on "cuda" then lies beside its
    weights.
    """
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def autocast_for(
    precision: Precision, device: torch.device, *, keeps_copies: bool = True
) -> AbstractContextManager[object]:
    """The context of a forward pass.

    keeps_copies: of weights in two bytes, until the context is left
    """
    if precision in {"bf16", "f16"}:
        dtype = torch.bfloat16 if precision == "bf16" else torch.float16
        return torch.autocast(device.type, dtype=dtype, cache_enabled=keeps_copies)
    return nullcontext()


@contextmanager
def attention_of_any_length() -> Iterator[None]:
    """Meanwhile attention is never cuDNN's, which builds a plan for each new shape: torch prefers
    it on GPUs of Hopper and later, and a text that is being written has a new one at every token.
    """
    before = torch.backends.cuda.cudnn_sdp_enabled()  # type: ignore[no-untyped-call]
    torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        yield
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)


class LossScale:
    """The factor on an f16 loss: halved after a gradient that is not finite, doubled after many
    that are; 1 otherwise.

    It follows only from numbers that every rank has alike, so that it stays the same on all of
    them.
    """

    def __init__(self, precision: Precision, device: torch.device) -> None:
        self.active = precision == "f16"
        self.value = torch.tensor(
            _INITIAL_SCALE if self.active else 1.0, dtype=torch.float64, device=device
        )
        self.streak = torch.zeros((), dtype=torch.float64, device=device)

    def update(self, *, finite: torch.Tensor | bool) -> None:
        if not self.active:
            return
        finite = torch.as_tensor(finite)
        self.streak = torch.where(finite, self.streak + 1, 0.0)
        grow = self.streak >= _GROW_AFTER
        grown = torch.where(grow, self.value * 2, self.value)
        self.value = torch.where(finite, grown, self.value * 0.5)
        self.streak = torch.where(grow, 0.0, self.streak)
