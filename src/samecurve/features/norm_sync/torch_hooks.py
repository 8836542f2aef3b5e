"""Synchronised norms in engine torch."""

from torch import nn

from samecurve.features.norm_sync.batch_norm import synchronise_batch_norms
from samecurve.torch_engine.step.feature_hooks import TorchHooks


class Hooks(TorchHooks):
    """Synchronises the norms of each model of this process."""

    def prepare(self, model: nn.Module, device_index: int) -> None:
        setup = self.setup
        peers = setup.strategy.peers()[device_index]
        synchronise_batch_norms(model, peers, setup.contexts[device_index])
