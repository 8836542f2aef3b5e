"""Initial values as a pure function of (seed, parameter name, shape): equal under every strategy,
world and engine.
"""

import hashlib

import numpy as np
from numpy.typing import NDArray

from samecurve.core.protocols import Initial


def values(seed: int, name: str, shape: tuple[int, ...], initial: Initial) -> NDArray[np.float32]:
    """Drawn by numpy in float32 (and only widened from there)."""
    if initial.std == 0:
        return np.full(shape, initial.mean, dtype=np.float32)
    key = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    generator = np.random.Generator(np.random.PCG64DXSM(int.from_bytes(key[:16], "little")))
    normal = generator.standard_normal(shape, dtype=np.float32)
    return normal * np.float32(initial.std) + np.float32(initial.mean)
