"""Hashes of arrays' bits, as a part of a compiled program."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

_UNSIGNED = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32, 8: jnp.uint32}  # by bytes
_SEEDS = (np.uint32(0x9E3779B9), np.uint32(0x7F4A7C15))  # of the two halves of a hash
_MIX = np.uint32(0x85EBCA6B)  # odd


def bit_sums(array: jax.Array) -> jax.Array:
    """The two halves of an array's hash: sums of its bits times odd factors of their places, modulo
    2^32. A single number that differs changes both.
    """
    values = array.astype(jnp.uint8) if array.dtype == jnp.bool_ else array
    unsigned = _UNSIGNED[values.dtype.itemsize]
    bits = lax.bitcast_convert_type(values.reshape(-1), unsigned).reshape(-1).astype(jnp.uint32)
    places = lax.iota(jnp.uint32, len(bits))
    return jnp.stack([(bits * _factors(places, seed)).sum(dtype=jnp.uint32) for seed in _SEEDS])


def _factors(places: jax.Array, seed: np.uint32) -> jax.Array:
    """Odd numbers that look like random ones, each a function of its place."""
    mixed = (places + seed) * seed
    mixed = (mixed ^ (mixed >> 15)) * _MIX
    return (mixed ^ (mixed >> 13)) | 1
