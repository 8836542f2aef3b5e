"""A tensor that autograd saves, kept with the count of its changes."""

import torch


def with_version(tensor: torch.Tensor) -> tuple[torch.Tensor, int]:
    # detached: the operation that made the tensor would be held by what it keeps
    return tensor.detach(), tensor._version  # noqa: SLF001 - torch's own check reads it


def unchanged(kept: tuple[torch.Tensor, int]) -> torch.Tensor:
    """The kept tensor. torch checks by itself that nobody has changed it, but not under hooks."""
    tensor, version = kept
    if tensor._version != version:  # noqa: SLF001 - as above
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace"
            f" operation: a tensor of shape {list(tensor.shape)} is at version {tensor._version};"  # noqa: SLF001 - as above
            f" expected version {version} instead"
        )
    return tensor
