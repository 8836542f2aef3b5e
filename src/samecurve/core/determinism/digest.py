"""Digests of arrays: two states are equal to the last bit if, and only if, their digests are."""

import hashlib
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

BYTES = 16  # of a SHA-256: enough that no two arrays ever meet


def digest(array: NDArray[Any]) -> bytes:
    """Of values, type and shape."""
    found = hashlib.sha256(f"{array.dtype.str} {array.shape}".encode())
    found.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
    return found.digest()[:BYTES]


def combined(digests: Mapping[str, str]) -> str:
    """One for all arrays of a state, by their names, whatever the order in which they were hashed."""
    return hashlib.sha256(
        "\n".join(f"{name} {found}" for name, found in sorted(digests.items())).encode()
    ).hexdigest()
