"""Types of what passes between the files of this room."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from numpy.typing import NDArray

Shape = tuple[int, ...]
HostArray = NDArray[Any]
Arrays = dict[str, jax.Array]  # by the name of a parameter, or of what a row holds
PyTree = Any  # nested containers with arrays, or what stands in their place, as leaves
Float = np.dtype[np.floating[Any]]  # what a run computes sums in
ReadBox = Callable[[Shape, Shape], HostArray]  # offsets, shape -> that box of an array
