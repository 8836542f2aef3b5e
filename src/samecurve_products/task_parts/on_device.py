"""Small tensors that a loss makes on the host, on the device where the loss is computed."""

import torch
from torch import Tensor


def on_device(values: Tensor, device: torch.device) -> Tensor:
    """The values on a device. A GPU copies them from pinned memory, so that no step waits."""
    if device.type == "cuda":
        values = values.pin_memory()
    return values.to(device, non_blocking=True)
