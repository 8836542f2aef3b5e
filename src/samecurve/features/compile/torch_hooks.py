"""Compiled blocks in engine torch."""

from torch import nn

from samecurve.torch_engine.step.feature_hooks import TorchHooks


class Hooks(TorchHooks):
    """Compiles the blocks of each model of this process."""

    def wrap_blocks(self, model: nn.Module) -> None:
        from samecurve.features.compile.blocks import compile_model

        setup = self.setup
        compile_model(model, setup.compiler, num_threads=len(setup.devices))
