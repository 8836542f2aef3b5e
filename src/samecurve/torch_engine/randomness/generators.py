"""The generators that a whole process shares: torch's, numpy's and Python's. Numbers drawn from
them depend on the device, and on what was drawn before.
"""

import random

import numpy as np
import torch

TORCH, NUMPY, PYTHON = "torch", "numpy.random", "random"


class GeneratorWatch:
    """Tells which generators have drawn since it was made.

    device: where torch may draw, beside the host
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._before = self._states()

    def moved(self) -> tuple[str, ...]:
        """The generators that have drawn: TORCH, NUMPY, PYTHON."""
        now = self._states()
        return tuple(name for name, state in self._before.items() if state != now[name])

    def _states(self) -> dict[str, object]:
        states = [torch.default_generator.get_state().numpy().tobytes()]
        if self._device.type == "cuda":
            states.append(torch.cuda.get_rng_state(self._device).numpy().tobytes())
        numpy = str(np.random.get_state(legacy=False))
        return {TORCH: tuple(states), NUMPY: numpy, PYTHON: random.getstate()}
