"""Blocks that run again in backward, in engine torch."""

from functools import partial
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from samecurve.torch_engine.model.model_setup import KeptProducts, repeated_blocks
from samecurve.torch_engine.step.feature_hooks import TorchHooks


class Hooks(TorchHooks):
    """Wraps the blocks of each model of this process."""

    value: str

    def prepare(self, model: nn.Module, _device_index: int) -> None:
        if self.value == "selective":  # before a compiler, which sees what is kept
            recompute(model, self.value)

    def wrap_blocks(self, model: nn.Module) -> None:
        if self.value == "block":
            recompute(model, self.value)


def recompute(model: nn.Module, how: str) -> None:
    """Let each block run again in backward instead of keeping its activations; names and results
    stay. how: as train.recompute
    """
    if how == "none":
        return
    options: dict[str, Any] = {"use_reentrant": False}
    if how == "selective":
        contexts: Any = create_selective_checkpoint_contexts  # of a call, and of its repetition
        options["context_fn"] = lambda: contexts(KeptProducts().policy)
    for block in repeated_blocks(model):
        block.forward = partial(checkpoint, block.forward, **options)
