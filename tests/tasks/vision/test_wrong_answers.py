"""Samples of the vision task: wrong answers, the surest first, and the filters of the blocks."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx

from samecurve.jax_engine.model import named_values
from samecurve_products.pictures.vision import filters
from samecurve_products.pictures.vision.captions import SIDE, with_text
from samecurve_products.pictures.vision.data.image_sets import ImageRows
from samecurve_products.pictures.vision.filters import filter_pictures
from samecurve_products.pictures.vision.flax_layers import bounded, even, inverse
from samecurve_products.pictures.vision.jax_task import JaxVision
from samecurve_products.pictures.vision.layout import Grid
from samecurve_products.pictures.vision.sections import VisionData, VisionModel
from samecurve_products.pictures.vision.torch_task import TorchVision
from samecurve_products.pictures.vision.wrong_answers import SHOWN, wrong_answers

CLASSES = ["cat", "dog", "eel"]


def images(count: int, channels: int = 3) -> ImageRows:
    pixels = np.arange(count, dtype=np.uint8)[:, None, None, None].repeat(8, 1).repeat(8, 2)
    return ImageRows(pixels.repeat(channels, 3), np.zeros(count, np.int64))


def test_the_surest_wrong_answers_come_first() -> None:
    def answer(rows: dict[str, Any]) -> Any:
        """Image n is a cat for even n, else a dog, the surer the larger n."""
        number = rows["pixels"][:, 0, 0, 0].astype(float)
        chances = np.zeros((len(number), 3))
        chances[np.arange(len(number)), (number % 2).astype(int)] = 0.5 + number / 200
        return chances

    for channels in (1, 3):
        pictures: Any = wrong_answers(images(50, channels), answer, CLASSES)
        assert len(pictures) == SHOWN
        assert [int(picture[0, 0, 0]) for picture in pictures] == list(
            range(49, 49 - 2 * SHOWN, -2)
        )
        assert all(picture.dtype == np.uint8 for picture in pictures)
        assert {picture.shape for picture in pictures} == {(SIDE + 64, SIDE, 3)}
    assert wrong_answers(images(1), answer, CLASSES) == ["no wrong answer among 1 held-out image"]
    assert wrong_answers(None, answer, CLASSES) == ["no images are held out, so none is answered"]
    floats = with_text(np.full((8, 8, 3), 0.5, np.float32), ["cat"])
    assert floats[0, 0].tolist() == [128, 128, 128]


def test_a_long_name_ends_in_the_picture() -> None:
    """The text of one class, and of another that differs where there is no room."""
    pixels = np.zeros((8, 8, 1), np.uint8)
    first, second, short = (with_text(pixels, [name]) for name in ("n" * 99 + "a", "n" * 99, "n"))
    np.testing.assert_array_equal(first, second)
    assert (first[:, -4:][SIDE:] == 255).all()  # a margin stays free
    assert (first != short).any()


@pytest.mark.parametrize("grid", [Grid(4, 6), Grid(5, 7)], ids=["even", "odd"])
def test_filters_are_those_that_the_model_multiplies_with(grid: Grid) -> None:
    random = np.random.default_rng(0)
    with jax.enable_x64(True):
        kernels = random.normal(size=(3, 3, 3))
        shown = filters._of_channels(kernels, grid, filters._bounded)
        half = np.abs(np.asarray(bounded(jnp.asarray(kernels), grid)))
        for (magnitudes, _), expected in zip(shown, half, strict=True):
            whole = np.fft.ifftshift(magnitudes)
            np.testing.assert_allclose(whole[:, : grid.width // 2 + 1], expected, atol=1e-14)
        values = {
            f"{name}.bias": random.normal(size=grid.frequencies)
            for name in ("delta", "gain", "readout")
        }
        by_name = [
            even(jnp.asarray(values[f"{name}.bias"]).reshape(grid.height, -1), grid)
            for name in ("delta", "gain", "readout")
        ]
        factors = jnp.logaddexp(by_name[0], 0) * by_name[1] * by_name[2]
        in_space = inverse(factors[None].astype(complex), grid)[..., 0]
        _, found = filters._gates(values, grid)
        np.testing.assert_allclose(np.fft.ifftshift(found), in_space, atol=1e-13)


def torch_pictures(fields: VisionModel, values: Mapping[str, Any], cache: Path) -> list[Any]:
    task = TorchVision(fields, VisionData(), cache)
    model = task.model()
    model.load_state_dict({name: torch.tensor(value) for name, value in values.items()})
    return list(task.sample(model.eval(), 0))


def test_both_engines_show_the_same_pictures(cache: Path) -> None:
    """Of a model with the same weights: twelve wrong answers, and a filter for each block."""
    fields = VisionModel(cssm="gated", steps=2, kernel_size=3, width=8, depth=2, patch=2)
    task = JaxVision(fields, VisionData(), cache, engine="jax")
    model = task.model(jnp.float32)
    random = np.random.default_rng(1)
    values = {
        name: random.normal(0, 0.3, value.shape).astype(np.float32)
        for name, value in named_values(model).items()
    }
    state = nnx.state(model, nnx.Param)
    flat = nnx.to_flat_state(state)
    nnx.update(
        model,
        nnx.from_flat_state(
            {path: leaf.replace(values[".".join(map(str, path))]) for path, leaf in flat}
        ),
    )
    pictures = list(task.sample(model, 0))
    assert len(pictures) == SHOWN + 2 * fields.depth  # each block's kernel, and its gates
    for one, other in zip(pictures, torch_pictures(fields, values, cache), strict=True):
        np.testing.assert_array_equal(one, other)


def test_a_model_without_filters_shows_none() -> None:
    assert filter_pictures({"blocks.0.mixer.out.weight": np.ones((2, 2))}, Grid(4, 4)) == []
    many = {f"blocks.{block}.mixer.kernel": np.ones((2, 3, 3)) for block in range(20)}
    assert len(filter_pictures(many, Grid(4, 4))) == filters.SHOWN
