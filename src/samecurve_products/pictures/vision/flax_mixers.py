"""Blocks' parts that mix over space, in flax: x [rows, steps, down, across, width] -> the same.

K stands for rho K / (1 + |K|) of a kernel's frequencies, and U for rfft2(u). A recurrence over the
steps is computed by an associative scan; the step before the first one has the state 0.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from samecurve.jax_engine.attention import FusibleAttention
from samecurve_products.pictures.vision.flax_layers import (
    DepthwiseConv,
    Linear,
    bounded,
    by_frequency,
    inverse,
    spectrum,
)
from samecurve_products.pictures.vision.layout import (
    COUPLINGS,
    DECAY_RANGE,
    DECAYS,
    INPUTS,
    LEAST_DECAY,
    Grid,
)
from samecurve_products.pictures.vision.sections import VisionModel

_STATES = 3  # of hgru_bi: X, Y, Z


class Attention(FusibleAttention):
    """Self-attention over the patches, of clips those of all frames."""

    def __init__(self, fields: VisionModel, _grid: Grid, narrow: Any) -> None:
        self.heads, self.size = fields.heads, fields.width // fields.heads
        self.query_key_value = Linear(fields.width, 3 * fields.width, narrow)
        self.out = Linear(fields.width, fields.width, narrow)

    def __call__(self, x: jax.Array) -> jax.Array:
        rows, steps, height, width, _ = x.shape
        parts = jnp.split(self.query_key_value(x), 3, axis=-1)
        shape = (rows, steps * height * width, self.heads, self.size)
        query, key, value = (part.reshape(shape) for part in parts)
        return self.out(self.attend(query, key, value).reshape(x.shape))


class NoGate(nnx.Module):
    """S_t = K S_{t-1} + X_t; y = out irfft2(S_t)."""

    def __init__(self, fields: VisionModel, grid: Grid, narrow: Any) -> None:
        self.grid = grid
        self.kernel = _kernel(fields)
        self.out = Linear(fields.width, fields.width, narrow)

    def __call__(self, x: jax.Array) -> jax.Array:
        entering = spectrum(x)
        kernel = bounded(self.kernel[...], self.grid)
        steps = jnp.broadcast_to(kernel, (1, x.shape[1], *kernel.shape))
        return self.out(inverse(states_of(steps, entering), self.grid))


class Gated(nnx.Module):
    """The gated state space.

    (u, z) = input x; u = SiLU(conv u); h_t = exp(-delta) K h_{t-1} + delta gain U_t;
    y = out [irfft2(readout h_t) SiLU(z)]. delta, gain and readout are one number a frequency, and
    follow from the mean of u over space.
    """

    def __init__(self, fields: VisionModel, grid: Grid, narrow: Any) -> None:
        width = fields.width
        self.grid = grid
        self.input = Linear(width, 2 * width, narrow)
        self.conv = DepthwiseConv(width, narrow)
        self.kernel = _kernel(fields) if fields.num_steps > 1 else None  # one step moves no state
        self.delta = Linear(width, grid.frequencies, narrow)
        self.gain = Linear(width, grid.frequencies, narrow)
        self.readout = Linear(width, grid.frequencies, narrow)
        self.out = Linear(width, width, narrow)

    def __call__(self, x: jax.Array) -> jax.Array:
        u, z = jnp.split(self.input(x), 2, axis=-1)
        u = jax.nn.silu(self.conv(u))
        context = u.mean((2, 3))
        delta, gain, readout = (
            by_frequency(layer(context), self.grid, 1)[0]
            for layer in (self.delta, self.gain, self.readout)
        )
        delta = jnp.logaddexp(delta, 0)
        states = delta * gain * spectrum(u)
        if self.kernel is not None:
            states = states_of(jnp.exp(-delta) * bounded(self.kernel[...], self.grid), states)
        y = inverse(readout * states, self.grid)
        return self.out(y.astype(z.dtype) * jax.nn.silu(z))


class HgruBi(nnx.Module):
    """Three states that inhibit and excite each other, after the horizontal gated recurrent unit.

    X_t = d_x X - mu_i K_i Y - alpha_i K_i Z + b U_X
    Y_t = mu_e K_e X + d_y Y + alpha_e K_e Z + d U_Y
    Z_t = gamma X + delta Y + d_z Z + e U_Z          (states on the right: at t - 1)
    y = out irfft2(c [X, Y, Z]), where (U_X, U_Y, U_Z) are the frequencies of input x.

    Gates are one number a frequency, and follow from the mean of x over space. The decays d_* are
    0.1 + 0.89 sigmoid(...), all others sigmoid(...).
    """

    def __init__(self, fields: VisionModel, grid: Grid, narrow: Any) -> None:
        width, frequencies = fields.width, grid.frequencies
        self.grid = grid
        self.input = Linear(width, _STATES * width, narrow)
        self.kernel_i = _kernel(fields)
        self.kernel_e = _kernel(fields)
        self.decays = Linear(width, len(DECAYS) * frequencies, narrow)
        self.couplings = Linear(width, len(COUPLINGS) * frequencies, narrow)
        self.inputs = Linear(width, len(INPUTS) * frequencies, narrow)
        self.outputs = Linear(width, frequencies, narrow)
        self.out = Linear(_STATES * width, width, narrow)

    def __call__(self, x: jax.Array) -> jax.Array:
        gates = self.gates(x.mean((2, 3)))
        parts = jnp.split(self.input(x), _STATES, axis=-1)
        entering = jnp.stack(
            [gates[name] * spectrum(part) for name, part in zip(INPUTS, parts, strict=True)]
        )
        by_step = matrix_states(self.matrix(gates), jnp.moveaxis(entering, 2, 0))
        states = jnp.moveaxis(by_step, 0, 2)
        images = inverse(gates["c"] * states, self.grid)
        return self.out(jnp.concatenate(list(images), axis=-1))

    def gates(self, context: jax.Array) -> Mapping[str, jax.Array]:
        """Every gate by its name. context: [rows, steps, width]"""
        sigmoids: dict[str, jax.Array] = {}
        for names, layer in (
            (DECAYS, self.decays),
            (COUPLINGS, self.couplings),
            (INPUTS, self.inputs),
            (("c",), self.outputs),
        ):
            values = by_frequency(layer(context), self.grid, len(names))
            sigmoids.update(zip(names, map(jax.nn.sigmoid, values), strict=True))
        return sigmoids | {name: LEAST_DECAY + DECAY_RANGE * sigmoids[name] for name in DECAYS}

    def matrix(self, gates: Mapping[str, jax.Array]) -> jax.Array:
        """What a step multiplies the states with: [steps, to, from, rows, channels, ...]."""
        inhibits = bounded(self.kernel_i[...], self.grid)
        excites = bounded(self.kernel_e[...], self.grid)
        lines = (
            (gates["d_x"], -gates["mu_i"] * inhibits, -gates["alpha_i"] * inhibits),
            (gates["mu_e"] * excites, gates["d_y"], gates["alpha_e"] * excites),
            (gates["gamma"], gates["delta"], gates["d_z"]),
        )
        shape = jnp.broadcast_shapes(gates["d_x"].shape, inhibits.shape)
        kind = inhibits.dtype
        stacked = [
            jnp.stack([jnp.broadcast_to(factor, shape).astype(kind) for factor in line])
            for line in lines
        ]
        return jnp.moveaxis(jnp.stack(stacked), 3, 0)


class NoMixing(nnx.Module):
    """The gated block without all that mixes over space: no convolution, no kernel, no gates that
    follow from a mean over space.
    """

    def __init__(self, fields: VisionModel, _grid: Grid, narrow: Any) -> None:
        self.input = Linear(fields.width, 2 * fields.width, narrow)
        self.out = Linear(fields.width, fields.width, narrow)

    def __call__(self, x: jax.Array) -> jax.Array:
        u, z = jnp.split(self.input(x), 2, axis=-1)
        return self.out(jax.nn.silu(u) * jax.nn.silu(z))


MIXERS = {
    "attention": Attention,
    "no_gate": NoGate,
    "gated": Gated,
    "hgru_bi": HgruBi,
    "no_fft": NoMixing,
}


def states_of(factors: jax.Array, entering: jax.Array) -> jax.Array:
    """The states s_t = factors_t s_{t-1} + entering_t of all steps, which are axis 1."""

    def after(
        first: tuple[jax.Array, jax.Array], then: tuple[jax.Array, jax.Array]
    ) -> tuple[jax.Array, jax.Array]:
        return then[0] * first[0], then[0] * first[1] + then[1]

    states: jax.Array
    _, states = lax.associative_scan(after, (factors, entering), axis=1)
    return states


def matrix_states(matrices: jax.Array, entering: jax.Array) -> jax.Array:
    """The states s_t = matrices_t s_{t-1} + entering_t of all steps, which are axis 0.

    matrices: [steps, to, from, ...]. entering: [steps, to, ...]
    """

    def times(matrix: jax.Array, other: jax.Array) -> jax.Array:
        """The product of [steps, to, from, ...] and [steps, from, columns, ...]."""
        product: jax.Array = (matrix[:, :, :, None] * other[:, None]).sum(2)
        return product

    def after(
        first: tuple[jax.Array, jax.Array], then: tuple[jax.Array, jax.Array]
    ) -> tuple[jax.Array, jax.Array]:
        moved = times(then[0], first[1][:, :, None])[:, :, 0]
        return times(then[0], first[0]), moved + then[1]

    states: jax.Array
    _, states = lax.associative_scan(after, (matrices, entering), axis=0)
    return states


def _kernel(fields: VisionModel) -> nnx.Param[jax.Array]:
    return nnx.Param(jnp.zeros((fields.width, fields.kernel_size, fields.kernel_size)))
