"""The products in eight bits in engine torch."""

from torch import nn

from samecurve.torch_engine.step.feature_hooks import TorchHooks


class Hooks(TorchHooks):
    """Converts each model of this process."""

    changes_products = True

    def prepare(self, model: nn.Module, device_index: int) -> None:
        from samecurve.features.float8.conversion import convert

        convert(model, self.setup.devices[device_index])
