"""samecurve.rng(batch) with jax: random numbers from keys that travel with the rows as an array.

torch_engine/randomness/keyed_numbers.py explains the arithmetic. Its 64-bit mixing is computed here
in halves of 32 bits, which jax supports on every device.
"""

import hashlib
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from math import pi, prod
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from samecurve.core.determinism.sample_keys import RowKeys
from samecurve.core.protocols import MicroBatch
from samecurve.core.sample_numbers import serving
from samecurve.jax_engine.array_types import Arrays, HostArray, Shape

KEYS = "samecurve:keys"  # the rows' array of keys: uint32 [rows, 2], the low halves first
_MIX = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
_LANES_FACTOR, _WORDS_FACTOR = 0x2C1B3C6D, 0x31848BAB
_AXIS_BITS = 28  # of a coordinate
_HALF = tuple[jax.Array, jax.Array]  # the upper and the lower 32 bits
T = TypeVar("T")


def keyed_arrays(microbatch: MicroBatch) -> Mapping[str, HostArray]:
    """A microbatch's arrays, with an array of its rows' keys."""
    if microbatch.keys is None:
        return microbatch.arrays
    return {**microbatch.arrays, KEYS: _key_array(microbatch.keys)}


def _key_array(keys: RowKeys) -> HostArray:
    return keys.values.view(np.uint32).reshape(-1, 2)


def with_numbers(function: Callable[[Arrays], T], rows: Arrays) -> T:
    """Call a function with the rows; samecurve.rng() inside it draws from the rows' keys."""
    if KEYS not in rows:
        return function(rows)
    arrays = {name: array for name, array in rows.items() if name != KEYS}
    numbers, thread = JaxSampleNumbers(rows[KEYS]), threading.get_ident()
    with serving(lambda: numbers if threading.get_ident() == thread else None):
        return function(arrays)


def with_trial_keys(row: Mapping[str, HostArray], count: int) -> dict[str, HostArray]:
    """Add keys to rows that are tried outside a run."""
    keys = RowKeys(seed=0, epoch=0, step=0, ids=np.arange(count))
    return {**row, KEYS: _key_array(keys)}


class JaxSampleNumbers:
    """The numbers that samecurve.rng(batch) returns under jax. keys: uint32 [rows, 2]."""

    def __init__(self, keys: jax.Array) -> None:
        self._keys, self._draws = keys, 0
        self._calls: Counter[str] = Counter()  # of layers, by name

    @property
    def rows(self) -> int:
        """The rows of the microbatch in work."""
        return len(self._keys)

    def lanes(self, seed: int, name: str, shape: Shape) -> jax.Array:
        """Uniform int16 [rows, *shape] for the next call of a layer."""
        a, b = self._salted(f"{seed}/{name}/{self._calls[name]}")
        self._calls[name] += 1
        *outer, last = shape
        places = _places((*outer, -(-last // 2)))
        a, b = (word.astype(jnp.int32).reshape(-1, *[1] * len(shape)) for word in (a, b))
        pairs = places * a + b
        pairs = (pairs ^ (pairs >> 15)) * jnp.int32(_LANES_FACTOR)
        halves = jnp.stack([pairs << 16 >> 16, pairs >> 16], axis=-1).astype(jnp.int16)
        return halves.reshape(*pairs.shape[:-1], -1)[..., :last]

    def uniform(self, *shape: int, dtype: str = "float32") -> jax.Array:
        return self._uniform(prod(shape), dtype).reshape(-1, *shape)

    def normal(self, *shape: int, dtype: str = "float32") -> jax.Array:
        count = prod(shape)
        pairs = -(-count // 2)
        both = self._uniform(2 * pairs, dtype).reshape(-1, pairs, 2)
        radius = jnp.sqrt(-2 * jnp.log(1 - both[:, :, 0]))
        angle = both[:, :, 1] * (2 * pi)
        numbers = jnp.stack([radius * jnp.cos(angle), radius * jnp.sin(angle)], axis=2)
        return numbers.reshape(-1, 2 * pairs)[:, :count].reshape(-1, *shape)

    def integers(self, low: int, high: int, *shape: int) -> jax.Array:
        words = jnp.uint32(1 << 31) + self._words(prod(shape)).astype(jnp.uint32)
        upper, _ = _product(words, jnp.uint32(high - low))
        return (upper.astype(jnp.int32) + low).reshape(-1, *shape)

    def bernoulli(self, p: float, *shape: int) -> jax.Array:
        return self.uniform(*shape) < p

    def _uniform(self, count: int, dtype: str) -> jax.Array:
        if dtype == "float64":
            words = self._words(2 * count).astype(jnp.uint32).astype(jnp.uint64)
            wide = (words[:, 0::2] | words[:, 1::2] << 32).astype(jnp.int64)
            return (wide >> 11).astype(jnp.float64) * 2.0**-53 + 0.5
        return (self._words(count) >> 8).astype(jnp.float32) * 2.0**-24 + 0.5

    def _words(self, count: int) -> jax.Array:
        """The words of the next draw: int32 [rows, count]."""
        a, b = self._salted(f"0/samecurve.rng/{self._draws}")
        self._draws += 1
        hashes = _lowbias32(jnp.arange(count, dtype=jnp.uint32))
        words: jax.Array = (hashes * a + b).astype(jnp.int32)
        words = (words ^ (words >> 15)) * jnp.int32(_LANES_FACTOR)
        words = (words ^ (words >> 13)) * jnp.int32(_WORDS_FACTOR)
        return jnp.asarray(words)

    def _salted(self, name: str) -> _HALF:
        """a and b of each row, for a draw of this name: uint32 [rows, 1]."""
        salt = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little")
        lower = self._keys[:, :1] ^ jnp.uint32(salt & 0xFFFFFFFF)
        upper = self._keys[:, 1:] ^ jnp.uint32(salt >> 32)
        upper, lower = _mixed((upper, lower))
        return lower | 1, upper


def _places(shape: Shape) -> jax.Array:
    """Hashes of the places in a row, as torch's Tables.places() has them: int32, in its shape.

    The program has the hashes of each axis as constants, and joins them where they are used.
    """
    hashes = jnp.zeros(shape, jnp.int32)
    for dim, size in enumerate(reversed(shape)):
        of_axis = _lowbias32(
            np.arange(dim << _AXIS_BITS, (dim << _AXIS_BITS) + size, dtype=np.uint32)
        )
        if dim:
            of_axis = of_axis ^ of_axis[0]
        hashes = hashes ^ of_axis.view(np.int32).reshape(-1, *[1] * dim)
    return hashes


def _mixed(value: _HALF) -> _HALF:
    """Mix 64 bits as core.determinism.sample_keys.mix does."""
    for bits, factor in zip((30, 27), _MIX, strict=True):
        value = _times(_xor_shifted(value, bits), factor)
    return _xor_shifted(value, 31)


def _xor_shifted(value: _HALF, bits: int) -> _HALF:
    """value ^ value >> bits; bits: fewer than 32."""
    upper, lower = value
    return upper ^ upper >> bits, lower ^ (lower >> bits | upper << (32 - bits))


def _times(value: _HALF, factor: int) -> _HALF:
    """value * factor modulo 2**64."""
    upper, lower = value
    above, below = jnp.uint32(factor >> 32), jnp.uint32(factor & 0xFFFFFFFF)
    carried, product = _product(lower, below)
    return carried + upper * below + lower * above, product


def _product(one: jax.Array, other: jax.Array) -> _HALF:
    """The 64-bit product of two uint32, computed in halves of 16 bits."""
    low, high = one & 0xFFFF, one >> 16
    other_low, other_high = other & 0xFFFF, other >> 16
    bottom, middle = low * other_low, high * other_low
    middle = middle + (bottom >> 16)
    other_middle = low * other_high + (middle & 0xFFFF)
    return high * other_high + (middle >> 16) + (other_middle >> 16), one * other


def _lowbias32(values: Any) -> Any:
    """hash (keyed_numbers.py) of uint32 numbers, of numpy or jax."""
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        values = (values ^ values >> np.uint32(shift)) * np.uint32(factor)
    return values ^ values >> np.uint32(16)
