"""Layers of the vision models in flax, and their spectra.

Everything is computed in the parameters' own type; with `narrow` products are computed in that
type, while norms, spectra and the residual stream stay in the parameters' type, as under torch's
autocast.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from samecurve_products.pictures.vision.layout import NORM_AXES, RHO, Grid
from samecurve_products.pictures.vision.sections import NormOver

EPS = 1e-6


class Linear(nnx.Module):
    """x [..., in] -> [..., out]; its weight is [out, in]."""

    def __init__(self, inputs: int, outputs: int, narrow: Any) -> None:
        self.weight = nnx.Param(jnp.zeros((outputs, inputs)))
        self.bias = nnx.Param(jnp.zeros(outputs))
        self.narrow = narrow

    def __call__(self, x: jax.Array) -> jax.Array:
        weight, bias = self.weight[...], self.bias[...]
        if self.narrow:
            x, weight, bias = (array.astype(self.narrow) for array in (x, weight, bias))
        return jax.lax.dot_general(x, weight, (((x.ndim - 1,), (1,)), ((), ()))) + bias


class Norm(nnx.Module):
    """Layer normalisation of [..., down, across, width]: over the width, or over a whole image."""

    def __init__(self, size: int, over: NormOver) -> None:
        self.weight = nnx.Param(jnp.ones(size))
        self.bias = nnx.Param(jnp.zeros(size))
        self.axes = NORM_AXES[over]

    def __call__(self, x: jax.Array) -> jax.Array:
        centred = x - x.mean(self.axes, keepdims=True)
        variance = (centred * centred).mean(self.axes, keepdims=True)
        return centred * jax.lax.rsqrt(variance + EPS) * self.weight[...] + self.bias[...]


class Positions(nnx.Module):
    """A vector for each patch."""

    def __init__(self, patches: int, width: int) -> None:
        self.weight = nnx.Param(jnp.zeros((patches, width)))


class Conv(nnx.Module):
    """A 3 x 3 convolution [..., down, across, in] -> [..., down, across, out]; zeros beyond the
    edges. Its filter is [out, in, 3, 3].
    """

    def __init__(self, inputs: int, outputs: int, narrow: Any) -> None:
        self.filter = nnx.Param(jnp.zeros((outputs, inputs, 3, 3)))
        self.bias = nnx.Param(jnp.zeros(outputs))
        self.narrow = narrow

    def __call__(self, x: jax.Array) -> jax.Array:
        taps, bias = self.filter[...], self.bias[...]
        if self.narrow:
            x, taps, bias = (array.astype(self.narrow) for array in (x, taps, bias))
        around = jnp.concatenate(_neighbours(x), -1)
        by_place = taps.transpose(2, 3, 1, 0).reshape(around.shape[-1], -1)
        return around @ by_place + bias


class DepthwiseConv(nnx.Module):
    """A 3 x 3 convolution of each channel by itself; zeros beyond the edges.

    Nine shifted products: XLA's grouped convolution on a CPU is many times slower.
    """

    def __init__(self, channels: int, narrow: Any) -> None:
        self.filter = nnx.Param(jnp.zeros((channels, 3, 3)))
        self.bias = nnx.Param(jnp.zeros(channels))
        self.narrow = narrow

    def __call__(self, x: jax.Array) -> jax.Array:
        taps, bias = self.filter[...], self.bias[...]
        if self.narrow:
            x, taps, bias = (array.astype(self.narrow) for array in (x, taps, bias))
        by_place = taps.reshape(-1, 9).T
        weighted = [values * tap for values, tap in zip(_neighbours(x), by_place, strict=True)]
        convolved: jax.Array = sum(weighted[1:], weighted[0]) + bias
        return convolved


def _neighbours(x: jax.Array) -> Sequence[jax.Array]:
    """The image [..., down, across, channels] as each of the 3 x 3 places around a pixel sees it;
    zeros beyond the edges.
    """
    height, width = x.shape[-3:-1]
    padded = jnp.pad(x, [(0, 0)] * (x.ndim - 3) + [(1, 1), (1, 1), (0, 0)])
    return [
        padded[..., down : down + height, across : across + width, :]
        for down in range(3)
        for across in range(3)
    ]


def widened(x: jax.Array) -> jax.Array:
    """x as float32 at least."""
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def spectrum(x: jax.Array) -> jax.Array:
    """[..., down, across, channels] -> frequencies [..., channels, down, across / 2 + 1]."""
    return jnp.fft.rfft2(jnp.moveaxis(widened(x), -1, -3))


def inverse(frequencies: jax.Array, grid: Grid) -> jax.Array:
    """Frequencies [..., channels, down, across / 2 + 1] -> [..., down, across, channels]."""
    return jnp.moveaxis(jnp.fft.irfft2(frequencies, s=(grid.height, grid.width)), -3, -1)


def bounded(kernel: jax.Array, grid: Grid) -> jax.Array:
    """rho K / (1 + |K|) of the kernel's frequencies K; the kernel's middle is at the origin."""
    height, width = kernel.shape[-2:]
    beyond = ((0, 0), (0, grid.height - height), (0, grid.width - width))
    padded = jnp.roll(jnp.pad(kernel, beyond), (-(height // 2), -(width // 2)), (-2, -1))
    frequencies = jnp.fft.rfft2(padded)
    return RHO * frequencies / (1 + jnp.abs(frequencies))


def even(gates: jax.Array, grid: Grid) -> jax.Array:
    """Gates that are equal at a frequency and at its negative: those of a real convolution.

    rfft2 holds both only in its first column, and, of an even width, in its last one.
    """
    down = (-jnp.arange(grid.height)) % grid.height
    columns = jnp.arange(gates.shape[-1])
    both = (columns == 0) | (2 * columns == grid.width)
    return jnp.where(both, (gates + gates[..., down, :]) / 2, gates)


def by_frequency(gates: jax.Array, grid: Grid, count: int) -> Sequence[jax.Array]:
    """`count` gates in one array [rows, steps, count x frequencies], each as an even one
    [rows, steps, 1, down, across / 2 + 1].
    """
    rows, steps, _ = gates.shape
    shape = (rows, steps, count, 1, grid.height, grid.width // 2 + 1)
    return [even(gate, grid) for gate in jnp.moveaxis(widened(gates).reshape(shape), 2, 0)]
