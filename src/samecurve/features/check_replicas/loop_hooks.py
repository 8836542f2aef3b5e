"""When the loop has replicas compared: nothing is made of weights that differ."""

from typing import Any

from samecurve.core.events import Event
from samecurve.core.loop_hooks import LoopHooks


class Hooks(LoopHooks):
    """Compares before a start's first step, and before anything is evaluated or saved."""

    def before_training(self, state: Any, step: int) -> None:
        self._compare(state, step)

    def before_actions(self, state: Any, step: int) -> None:
        self._compare(state, step)

    def _compare(self, state: Any, step: int) -> None:
        """RunError: devices that should have the same weights have other bits."""
        num_arrays = self.context.engine.features["check_replicas"].compare(state, step)
        self.context.record(Event("hashed", step, {"arrays_alike": num_arrays}))
