"""Blocks in which adamw8bit keeps an array's moments: each has one scale.

A block lies within one row (an index of the first dimension), so blocks are the same however many
shards a parameter is cut into.
"""

from math import gcd, prod

_LARGEST, _SMALLEST = 256, 64  # numbers: smaller blocks would take more for scales than they save
_LEAST_SIZE = 4096  # of an array: its authors leave small ones as they are


def block_size(shape: tuple[int, ...]) -> int | None:
    """Numbers of a block of an array: the largest power of two, up to 256, that divides a row.

    None: the array is kept as it is.
    """
    if len(shape) < 2 or prod(shape) < _LEAST_SIZE:
        return None
    block = gcd(prod(shape[1:]), _LARGEST)
    return block if block >= _SMALLEST else None
