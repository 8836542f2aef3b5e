"""The products in eight bits in engine torch."""

import torch
from torch import nn

from samecurve.torch_engine.step.feature_hooks import TorchHooks


class Hooks(TorchHooks):
    """Converts each model of this process."""

    changes_products = True

    def prepare(self, model: nn.Module, device: torch.device) -> None:
        from samecurve.features.float8.conversion import convert

        convert(model, device)
