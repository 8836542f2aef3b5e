"""Initial values as a pure function of (seed, parameter name, shape): equal under every strategy, world and engine."""

import hashlib

import numpy as np
from numpy.typing import NDArray


def normal(seed: int, name: str, shape: tuple[int, ...], std: float) -> NDArray[np.float32]:
    """Normal values of this standard deviation, drawn by numpy in float32 (and only widened from there)."""
    key = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    generator = np.random.Generator(np.random.PCG64DXSM(int.from_bytes(key[:16], "little")))
    return generator.standard_normal(shape, dtype=np.float32) * np.float32(std)
