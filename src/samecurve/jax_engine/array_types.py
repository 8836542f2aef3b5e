"""Types of the arrays and trees that this package's files pass to each other."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from numpy.typing import NDArray

Shape = tuple[int, ...]
HostArray = NDArray[Any]
Arrays = dict[str, jax.Array]  # by the name of a parameter, or of a row's array
PyTree = Any  # nested containers whose leaves are arrays, shapes or specs
Float = np.dtype[np.floating[Any]]  # the type in which a run computes sums
ReadBox = Callable[[Shape, Shape], HostArray]  # offsets, shape -> that box of an array
