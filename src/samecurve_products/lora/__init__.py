"""Adapters on frozen weights, for every task that trains another library's models.

Which layers, which matrices, their first values, how they are merged, how files name them, and the
packed weights beneath them. A task brings its model and says which layers it has.
"""

from typing import Any

# an array that is read late: it has dtype, shape, read()
StoredArray = Any
