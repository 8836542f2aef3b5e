"""A sum of squares whose bits do not depend on how arrays are cut.

A shard holds whole rows: indices of an array's longest axis. The squares of a row are added by
halves, number by number, in pieces of fixed width; so are the sums of all pieces. No kernel can do
that in two ways. Squares are taken by another program: a compiler may join a product and a sum into
one operation, which rounds once, in one program and not in another.
"""

from collections.abc import Iterable, Mapping

import jax
import jax.numpy as jnp

from samecurve.jax_engine.array_types import Arrays

_WIDEST = 1024  # numbers of a piece


def piece_sums(squares: Arrays, axes: Mapping[str, int]) -> Arrays:
    """The sums of the pieces of each array's rows, one row after the other: [rows x pieces].

    axes: of the rows, by name; a single number needs none. Empty arrays are left out.
    """
    pieces = {name: _cut(array, axes.get(name, 0)) for name, array in squares.items() if array.size}
    sums: Arrays = {}
    for width in sorted({array.shape[1] for array in pieces.values()}):
        alike = {name: array for name, array in pieces.items() if array.shape[1] == width}
        together, begin = _halved(jnp.concatenate([*alike.values()])), 0
        for name, array in alike.items():
            sums[name] = together[begin : begin + len(array)]
            begin += len(array)
    return {name: sums[name] for name in pieces}


def sum_of_pieces(sums: Iterable[jax.Array]) -> jax.Array:
    """The sum of all pieces of all arrays, in their order."""
    total: jax.Array = _halved(jnp.concatenate([*sums])[None])[0]
    return total


def _cut(array: jax.Array, axis: int) -> jax.Array:
    """The pieces of an array's rows, [rows x pieces, width], filled up with zeros."""
    several = jnp.atleast_1d(array)
    rows = jnp.moveaxis(several, axis, 0).reshape(several.shape[axis], -1)
    length = rows.shape[1]
    width = min(_WIDEST, 1 << (length - 1).bit_length())
    return jnp.pad(rows, ((0, 0), (0, -length % width))).reshape(-1, width)


def _halved(rows: jax.Array) -> jax.Array:
    """The sum of each row, [number, width] -> [number]: the second half of a row is added to the
    first one until one number is left.
    """
    while rows.shape[1] > 1:
        half = rows.shape[1] // 2
        added = rows[:, :half] + rows[:, half : 2 * half]
        rows = jnp.concatenate([added, rows[:, 2 * half :]], axis=1)
    return rows[:, 0]
