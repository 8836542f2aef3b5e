"""Random numbers as pure functions of (row key, draw, element), in integers that wrap around. So
CPU, GPU, numpy and JAX give the same numbers.

For element words of a row (int32; shifts keep the sign):

salt   the first 8 bytes, little endian, of sha256(f"{seed}/{name}/{call}"); of the n-th draw of
       torch's functions 0/*/n, of the n-th of samecurve.rng 0/samecurve.rng/n
a, b   the low and the high half of core.determinism.sample_keys.mix(key ^ salt), a made odd
place  hash(j) for word j of the row's last dimension; of every other dimension, the t-th from the
       end, hash(t << 28 | i) ^ hash(t << 28) comes to it by ^, where i is the coordinate there
x      place * a + b, then x ^= x >> 15, then x *= 0x2C1B3C6D; its halves are lanes, of elements
       2j and 2j+1 of a mask (dropout_layers.py)
word   x ^= x >> 13, then x *= 0x31848BAB; its upper bits are used: of a float64 number 53 of two
       words (the second one the upper half), of a float32 number 24, of a narrower one as many as
       it has

So a number depends on its coordinates alone, not on how long the dimensions are: a sample that is
padded to the longest of its microbatch draws the same.

uniform   (upper bits + half of their range) / range: in [0, 1)
normal    Box-Muller: of uniform u, v: sqrt(-2 log(1 - u)) times cos and sin of 2 pi v
integers  low + (word + 2**31) * span >> 32

hash is lowbias32 (github.com/skeeto/hash-prospector): x ^= x >> 16, x *= 0x7FEB352D, x ^= x >> 15,
x *= 0x846CA68B, x ^= x >> 16, unsigned.
"""

import hashlib
import math
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np
import torch

# Factors of core.determinism.sample_keys.mix, as signed numbers:
_MIX = (0xBF58476D1CE4E5B9 - 2**64, 0x94D049BB133111EB - 2**64)
_LANES_FACTOR, _WORDS_FACTOR = 0x2C1B3C6D, 0x31848BAB
FUNCTIONS = "*"  # the name for draws of torch's functions: no module has it
_FEW = 8  # draws that are prepared together, at least
_AXIS_BITS = 28  # of a coordinate
_MOST_SHAPES = 8  # of rows whose hashes are kept
# By dtype, how many of a word's bits a number between 0 and 1 has; others have 24, float64 has 53.
_BITS = {torch.float16: 11, torch.bfloat16: 8}


_Function = TypeVar("_Function", bound=Callable[..., Any])


def constant(function: _Function) -> _Function:
    """Do as torch.compiler.assume_constant_result: a compiled program takes the result for a
    constant. That function would import torch._dynamo: a second or two of every rank's start.
    """
    function.__dict__["_dynamo_marked_constant"] = True
    return function


@constant
def salt(seed: int, name: str, call: int) -> int:
    return int.from_bytes(
        hashlib.sha256(f"{seed}/{name}/{call}".encode()).digest()[:8], "little", signed=True
    )


def mixed(values: torch.Tensor) -> torch.Tensor:
    """core.determinism.sample_keys.mix on int64, the lowest bit set."""
    values = (values ^ _shifted(values, 30)) * _MIX[0]
    values = (values ^ _shifted(values, 27)) * _MIX[1]
    return (values ^ _shifted(values, 31)) | 1


def _shifted(values: torch.Tensor, bits: int) -> torch.Tensor:
    """Shift right as unsigned numbers."""
    return (values >> bits) & ((1 << (64 - bits)) - 1)


class Tables:
    """Tables that all microbatches of a device share: hashes of the places in a row, and the salts
    of draws 0, 1, ...
    """

    def __init__(self) -> None:
        self._axes: dict[int, torch.Tensor] = {}  # hashes, by dimension from the last
        self._places: dict[tuple[int, ...], torch.Tensor] = {}  # hashes, by the shape of a row
        self._salts: dict[str, torch.Tensor] = {}  # by name

    def places(self, shape: Sequence[int], device: torch.device) -> torch.Tensor:
        """Hashes of the places in a row: int32 [elements of the shape], in C order.

        shape: of a row, one dimension at least
        """
        *outer, last = shape
        hashes = self._axis(0, last, device)
        if math.prod(outer) == 1:
            return hashes
        known = self._places.get(tuple(shape))
        if known is None or known.device != device:
            if len(self._places) >= _MOST_SHAPES:
                self._places.clear()
            known = hashes
            for dim, size in enumerate(reversed(outer), start=1):
                known = self._axis(dim, size, device).view(-1, *[1] * dim) ^ known
            self._places[tuple(shape)] = known = known.reshape(-1)
        return known

    def _axis(self, dim: int, count: int, device: torch.device) -> torch.Tensor:
        """int32 [count]: hashes of the coordinates of a dimension. dim: counted from the last."""
        known = self._axes.get(dim)
        if known is None or len(known) < count or known.device != device:
            first, size = dim << _AXIS_BITS, 1 << (count - 1).bit_length()
            hashes = _lowbias32(first, size)
            if dim:
                hashes ^= hashes[0]
            self._axes[dim] = known = torch.from_numpy(hashes).to(device)
        return known[:count]

    def salts(self, name: str, count: int, device: torch.device) -> torch.Tensor:
        """int64 [count]."""
        known = self._salts.get(name)
        if known is None or len(known) < count or known.device != device:
            salts = [salt(0, name, number) for number in range(1 << (count - 1).bit_length())]
            known = torch.tensor(salts, dtype=torch.int64, device="cpu").to(device)
            self._salts[name] = known
        return known[:count]


def _lowbias32(first: int, count: int) -> np.ndarray[Any, np.dtype[np.int32]]:
    values = np.arange(first, first + count, dtype=np.uint32)
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        values = (values ^ (values >> np.uint32(shift))) * np.uint32(factor)
    return (values ^ (values >> np.uint32(16))).view(np.int32)


def keyed_pairs(words: torch.Tensor, shape: Sequence[int], tables: Tables) -> torch.Tensor:
    """int32 [rows, *shape], two lanes each. words: int32 [rows, 2], a and b."""
    pairs = tables.places(shape, words.device) * words[:, :1]
    pairs.add_(words[:, 1:])
    return pairs.bitwise_xor_(pairs >> 15).mul_(_LANES_FACTOR).view(len(words), *shape)


def keyed_lanes(words: torch.Tensor, shape: Sequence[int], tables: Tables) -> torch.Tensor:
    """Uniform int16 [rows, *shape]. words: int32 [rows, 2], a and b."""
    *outer, last = shape
    return keyed_pairs(words, [*outer, -(-last // 2)], tables).view(torch.int16)[..., :last]


class KeyedNumbers:
    """Numbers of the rows that have these keys: [rows, *shape] for each draw.

    keys: int64 [rows] on a device.
    """

    def __init__(
        self, keys: torch.Tensor, tables: Tables, name: str = FUNCTIONS, draws: int = _FEW
    ) -> None:
        """name: of the module or function that draws. draws: how many are expected."""
        self.keys, self._tables, self._name = keys, tables, name
        self._words = self._words_of(max(draws, _FEW))

    def _words_of(self, draws: int) -> torch.Tensor:
        """int32 [draws, rows, 2]: a and b of each."""
        salts = self._tables.salts(self._name, draws, self.keys.device)
        return mixed(self.keys ^ salts[:, None])[:, :, None].view(torch.int32)

    def _of_draw(self, draw: int) -> torch.Tensor:
        if draw >= len(self._words):
            self._words = self._words_of(2 * draw)
        return self._words[draw]

    def lanes(self, draw: int, shape: Sequence[int]) -> torch.Tensor:
        """Uniform int16."""
        return keyed_lanes(self._of_draw(draw), shape, self._tables)

    def _bits(self, draw: int, shape: Sequence[int], words: int = 1) -> torch.Tensor:
        """Uniform int32. words: count for each element."""
        *outer, last = shape
        pairs = keyed_pairs(self._of_draw(draw), [*outer, words * last], self._tables)
        return pairs.bitwise_xor_(pairs >> 13).mul_(_WORDS_FACTOR)

    def uniform(self, draw: int, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Uniform numbers in [0, 1)."""
        if dtype == torch.float64:
            wide = self._bits(draw, shape, 2).view(torch.int64) >> 11
            return wide.to(torch.float64).mul_(2.0**-53).add_(0.5)
        used = _BITS.get(dtype, 24)
        bits = self._bits(draw, shape) >> (32 - used)
        return bits.to(torch.float32).mul_(2.0**-used).add_(0.5).to(dtype)

    def normal(self, draw: int, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Normal numbers of mean 0 and variance 1."""
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        *outer, last = shape
        both = self.uniform(draw, [*outer, -(-last // 2) * 2], wide)
        both = both.view(*both.shape[:-1], -1, 2)
        radius = (1 - both[..., 0]).log_().mul_(-2).sqrt_()
        angle = both[..., 1] * (2 * math.pi)
        numbers = torch.stack([radius * angle.cos(), radius * angle.sin()], dim=-1)
        return numbers.flatten(-2)[..., :last].to(dtype)

    def integers(self, draw: int, shape: Sequence[int], low: int, high: int) -> torch.Tensor:
        """Uniform int64 from low to high - 1."""
        span = high - low
        if span <= 1 << 31:
            bits = self._bits(draw, shape).to(torch.int64).add_(1 << 31)
            return bits.mul_(span).bitwise_right_shift_(32).add_(low)
        wide = self._bits(draw, shape, 2).view(torch.int64) & ((1 << 63) - 1)
        return wide.remainder_(span).add_(low)
