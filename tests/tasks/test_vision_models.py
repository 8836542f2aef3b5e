"""The vision models: each block against a plain loop of its equations, its gradients against finite
differences, and the models of the two engines against each other.
"""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx
from numpy.typing import NDArray

from samecurve.jax_engine.model import named_values
from samecurve_products.pictures.vision.flax_mixers import MIXERS
from samecurve_products.pictures.vision.flax_model import Classifier as FlaxClassifier
from samecurve_products.pictures.vision.layout import Grid
from samecurve_products.pictures.vision.sections import VisionModel
from samecurve_products.pictures.vision.torch_model import Classifier as TorchClassifier

GRID = Grid(4, 6)
ROWS, WIDTH = 2, 4
Values = Mapping[str, jax.Array]


@pytest.fixture(autouse=True)
def _wide() -> Iterator[None]:
    with jax.enable_x64(True):
        yield


def fields(cssm: str, **more: Any) -> VisionModel:
    return VisionModel.model_validate(
        {"cssm": cssm, "width": WIDTH, "depth": 2, "patch": 2, **more}
    )


def drawn(module: nnx.Module, seed: int = 0) -> dict[str, NDArray[np.float64]]:
    """Values for a module's parameters, by name."""
    random = np.random.default_rng(seed)
    return {
        name: random.normal(0, 0.4, value.shape) for name, value in named_values(module).items()
    }


def calling(module: nnx.Module) -> Callable[..., jax.Array]:
    """The module as a function of its parameters, by name, and its inputs."""
    graph, state = nnx.split(module)
    paths = {".".join(map(str, path)): path for path, _ in nnx.to_flat_state(state)}

    def call(values: Values, *inputs: Any) -> jax.Array:
        flat = {paths[name]: nnx.Param(value) for name, value in values.items()}
        merged: Any = nnx.merge(graph, nnx.from_flat_state(flat))
        output: jax.Array = merged(*inputs)
        return output

    return call


# the equations, one step after the other; nothing is shared with the models but numpy's FFT


def linear(values: Values, name: str, x: jax.Array) -> jax.Array:
    return x @ values[f"{name}.weight"].T + values[f"{name}.bias"]


def frequencies_of(kernel: jax.Array) -> jax.Array:
    """rho K / (1 + |K|), from the definition of a circular convolution around the middle."""
    side, (height, width) = kernel.shape[-1], (GRID.height, GRID.width)
    places = np.zeros((side, side, height, width))
    for down in range(side):
        for across in range(side):
            place = ((down - side // 2) % height, (across - side // 2) % width)
            places[down, across][place] = 1
    padded = jnp.einsum("cij,ijhw->chw", kernel, places)
    of_kernel = jnp.fft.rfft2(padded)
    return 0.999 * of_kernel / (1 + abs(of_kernel))


def gates_of(numbers: jax.Array) -> jax.Array:
    """[rows, frequencies] -> [rows, 1, down, across], the same at a frequency and its negative."""
    gates = numbers.reshape(-1, 1, GRID.height, GRID.width // 2 + 1)
    mirrored = jnp.roll(gates[:, :, ::-1], 1, axis=2)  # row -k of the same column
    is_whole = np.isin(np.arange(gates.shape[-1]), [0, GRID.width / 2])
    return jnp.where(is_whole, gates / 2 + mirrored / 2, gates)


def to_frequencies(image: jax.Array) -> jax.Array:
    return jnp.fft.rfft2(image.transpose(0, 3, 1, 2))


def to_image(frequencies: jax.Array) -> jax.Array:
    return jnp.fft.irfft2(frequencies, s=(GRID.height, GRID.width)).transpose(0, 2, 3, 1)


def convolved(values: Values, x: jax.Array) -> jax.Array:
    y = jax.lax.conv_general_dilated(
        x.transpose(0, 3, 1, 2),
        values["conv.filter"][:, None],
        (1, 1),
        "SAME",
        feature_group_count=WIDTH,
    )
    return y.transpose(0, 2, 3, 1) + values["conv.bias"]


def no_gate_loop(values: Values, x: jax.Array) -> jax.Array:
    kernel, state, steps = frequencies_of(values["kernel"]), jnp.zeros(()), []
    for step in range(x.shape[1]):
        state = kernel * state + to_frequencies(x[:, step])
        steps.append(linear(values, "out", to_image(state)))
    return jnp.stack(steps, 1)


def gated_loop(values: Values, x: jax.Array) -> jax.Array:
    kernel = frequencies_of(values["kernel"]) if "kernel" in values else 0
    state, steps = jnp.zeros(()), []
    for step in range(x.shape[1]):
        u, z = jnp.split(linear(values, "input", x[:, step]), 2, axis=-1)
        u = jax.nn.silu(convolved(values, u))
        context = u.mean((1, 2))
        delta = gates_of(linear(values, "delta", context))
        delta = jnp.log1p(jnp.exp(delta))
        gain = gates_of(linear(values, "gain", context))
        readout = gates_of(linear(values, "readout", context))
        state = jnp.exp(-delta) * kernel * state + delta * gain * to_frequencies(u)
        steps.append(linear(values, "out", to_image(readout * state) * jax.nn.silu(z)))
    return jnp.stack(steps, 1)


def hgru_bi_loop(values: Values, x: jax.Array) -> jax.Array:
    inhibits, excites = (frequencies_of(values[f"kernel_{name}"]) for name in "ie")
    x_state = y_state = z_state = jnp.zeros(())
    steps = []
    for step in range(x.shape[1]):
        context = x[:, step].mean((1, 2))

        def gate(layer: str, number: int, context: jax.Array = context) -> jax.Array:
            numbers = linear(values, layer, context)
            begin = number * GRID.frequencies
            return jax.nn.sigmoid(gates_of(numbers[:, begin : begin + GRID.frequencies]))

        d_x, d_y, d_z = (0.1 + 0.89 * gate("decays", number) for number in range(3))
        mu_i, alpha_i, mu_e, alpha_e, gamma, delta = (gate("couplings", i) for i in range(6))
        u_x, u_y, u_z = (
            gate("inputs", number) * to_frequencies(part)
            for number, part in enumerate(jnp.split(linear(values, "input", x[:, step]), 3, -1))
        )
        x_state, y_state, z_state = (
            d_x * x_state - mu_i * inhibits * y_state - alpha_i * inhibits * z_state + u_x,
            mu_e * excites * x_state + d_y * y_state + alpha_e * excites * z_state + u_y,
            gamma * x_state + delta * y_state + d_z * z_state + u_z,
        )
        c = gate("outputs", 0)
        images = [to_image(c * state) for state in (x_state, y_state, z_state)]
        steps.append(linear(values, "out", jnp.concatenate(images, -1)))
    return jnp.stack(steps, 1)


LOOPS: dict[tuple[str, int], Callable[[Values, jax.Array], jax.Array]] = {
    ("no_gate", 4): no_gate_loop,
    ("gated", 1): gated_loop,
    ("gated", 3): gated_loop,
    ("hgru_bi", 4): hgru_bi_loop,
}


@pytest.mark.parametrize(
    ("cssm", "steps"),  # in make test: one whose gates see the past, one of two directions
    [
        pytest.param(*which, marks=[pytest.mark.long] * (which in {("no_gate", 4), ("gated", 1)}))
        for which in LOOPS
    ],
)
def test_a_block_is_the_loop_of_its_equations(cssm: str, steps: int) -> None:
    """Outputs and gradients of a scan and of a loop agree; so do finite differences."""
    kernel = {"kernel_size": 3} if steps > 1 else {}
    module = MIXERS[cssm](fields(cssm, steps=steps, **kernel), GRID, None)
    values, block, loop = drawn(module), calling(module), LOOPS[cssm, steps]
    random = np.random.default_rng(1)
    shape = (ROWS, steps, GRID.height, GRID.width, WIDTH)
    x, weights = random.normal(size=shape), random.normal(size=shape)

    def looked(
        function: Callable[..., jax.Array], values: Values, x: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        out = function(values, x)
        return (out * weights).sum(), out

    of_block, of_loop = (
        jax.jit(jax.value_and_grad(partial(looked, function), argnums=(0, 1), has_aux=True))
        for function in (block, loop)
    )
    found, expected = of_block(values, x), of_loop(values, x)
    for one, other in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-10 * max(1, float(abs(other).max())))

    towards = {name: random.normal(size=value.shape) for name, value in values.items()}
    moved = [
        of_block({name: values[name] + far * towards[name] for name in values}, x)[0][0]
        for far in (-1e-5, 1e-5)
    ]
    slope = sum((found[1][0][name] * towards[name]).sum() for name in values)
    np.testing.assert_allclose(slope, (moved[1] - moved[0]) / 2e-5, rtol=1e-7)


@pytest.mark.parametrize(
    ("cssm", "more"),
    [
        ("attention", {"heads": 2}),
        pytest.param("gated", {"steps": 3, "kernel_size": 3}, marks=pytest.mark.long),
        pytest.param("gated", {"arch": "simple"}, marks=pytest.mark.long),
        ("gated", {"stem": "conv", "norm": "image", "pool": "max"}),
        ("no_fft", {"arch": "simple"}),
    ],
)
def test_the_engines_have_one_model(cssm: str, more: Mapping[str, Any]) -> None:
    """The weights of one engine's model give the same logits and gradients in the other's."""
    chosen = fields(cssm, **more)
    of_flax = FlaxClassifier(chosen, GRID, channels=3, classes=5)
    of_torch = TorchClassifier(chosen, GRID, channels=3, classes=5).double()
    values = drawn(of_flax)
    of_torch.load_state_dict({name: torch.from_numpy(value) for name, value in values.items()})
    random = np.random.default_rng(2)
    images = random.normal(size=(ROWS, 2 * GRID.height, 2 * GRID.width, 3))
    kept, features = random.random((ROWS, 2)), random.random((ROWS, WIDTH))
    weights = random.normal(size=(ROWS, 5))

    def looked(values: Values, *inputs: Any) -> tuple[jax.Array, jax.Array]:
        logits = calling(of_flax)(values, *inputs)
        return (logits * weights.astype(logits.dtype)).sum(), logits

    run = jax.jit(jax.value_and_grad(looked, has_aux=True))
    (_, found), gradients = run(values, images, kept, features)
    logits = of_torch(*map(torch.from_numpy, (images, kept, features)))
    np.testing.assert_allclose(found, logits.detach(), rtol=1e-10, atol=1e-12)
    (logits * torch.from_numpy(weights)).sum().backward()
    for name, parameter in of_torch.named_parameters():
        assert parameter.grad is not None, name
        np.testing.assert_allclose(gradients[name], parameter.grad, rtol=1e-10, atol=1e-11)
    narrow = of_torch.float()(*(torch.from_numpy(a).float() for a in (images, kept, features)))
    single = {name: value.astype(np.float32) for name, value in values.items()}
    (_, found), _ = run(single, *(a.astype(np.float32) for a in (images, kept, features)))
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, narrow.detach(), rtol=1e-5, atol=1e-5)
