"""Digests of arrays: two states are equal to the last bit if, and only if, their digests are."""

import hashlib
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

BYTES = 16  # of a SHA-256: enough that no two arrays ever meet


def digest(array: NDArray[Any]) -> bytes:
    """The digest of an array's values, type and shape."""
    sha256 = hashlib.sha256(f"{array.dtype.str} {array.shape}".encode())
    sha256.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
    return sha256.digest()[:BYTES]


def combined(digests: Mapping[str, str]) -> str:
    """The digest of all arrays of a state, whatever the order in which they were hashed."""
    lines = [f"{name} {of_array}" for name, of_array in sorted(digests.items())]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()
