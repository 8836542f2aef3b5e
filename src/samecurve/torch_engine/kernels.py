"""Which kernels torch computes with: the fastest, or those that give the same bits each time."""

import torch


def set_deterministic(enabled: bool, /) -> None:  # noqa: FBT001 - as torch's own
    """Choose kernels that give the same bits each time; or, when disabled, the fastest kernels.

    An operation that has no deterministic kernel raises an error when it runs.
    """
    torch.use_deterministic_algorithms(enabled)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.backends.cudnn.deterministic = enabled
    torch.backends.cuda.enable_cudnn_sdp(not enabled)  # its backward has no deterministic form
