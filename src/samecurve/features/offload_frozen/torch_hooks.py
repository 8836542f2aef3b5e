"""Frozen weights of blocks in host memory, in engine torch."""

from torch import nn

from samecurve.features.offload_frozen.offloaded_blocks import FrozenOffload
from samecurve.torch_engine.step import EngineSetup
from samecurve.torch_engine.step.feature_hooks import TorchHooks
from samecurve.torch_engine.strategies import Materialize


class Hooks(TorchHooks):
    """Keeps blocks of this process's models in host memory."""

    moves_weights = True

    def __init__(self, setup: EngineSetup, value: float) -> None:
        super().__init__(setup, value)
        self._offload = FrozenOffload(value)

    def prepare(self, model: nn.Module, _device_index: int) -> None:
        self._offload.add(model)
        self.names_on_host = self._offload.names

    def before_layout(self, materialize: Materialize) -> Materialize:
        return self._offload.set_aside(materialize, pinned=self.setup.device.type == "cuda")

    def after_layout(self) -> None:
        self._offload.put_back(self.setup.strategy, self.setup.devices)
