"""The generators of random numbers that a user's data can draw from: those that every code has, and
those that the data has as attributes.
"""

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import numpy as np


def states_of(data: Any) -> dict[str, str]:
    """The states of the random generators that data can draw from, as texts by name."""
    states = {"random": str(random.getstate()), "np.random": str(np.random.get_state(legacy=False))}
    if torch := _torch():
        states["torch"] = str(torch.get_rng_state().tolist())
    for name, value in getattr(data, "__dict__", {}).items():
        if isinstance(value, random.Random):
            states[f"self.{name}"] = str(value.getstate())
        elif isinstance(value, np.random.Generator):
            states[f"self.{name}"] = str(value.bit_generator.state)
    return states


def _torch() -> Any:
    """torch, if something has imported it, or is about to: then this waits. Else None."""
    return import_module("torch") if "torch" in sys.modules else None


@contextmanager
def moved(data: Any) -> Iterator[None]:
    """Within the block, the generators that data can draw from have drawn one number more."""
    python, numpys, torch = random.getstate(), np.random.get_state(), _torch()
    torchs = torch.get_rng_state() if torch else None
    random.random()
    np.random.random()
    if torch:
        torch.rand(1)
    for value in getattr(data, "__dict__", {}).values():
        if isinstance(value, random.Random | np.random.Generator):
            value.random()
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpys)
        if torch:
            torch.set_rng_state(torchs)
