"""The recipe: what follows the sample, what pairs do, and one curve for all of it."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from class_pictures import make_folder

from one_curve import check_one_curve
from samecurve.core.determinism.data_order import Order, permute
from samecurve.errors import InvalidConfigError, UserError
from samecurve.tasks import open_task
from samecurve_products.pictures.sample_pairs import paired_ids, positions_of
from samecurve_products.pictures.vision.augment_section import Augment
from samecurve_products.pictures.vision.data.augmentation import ArrayViews, with_recipe
from samecurve_products.pictures.vision.data.image_sets import ImageRows
from samecurve_products.pictures.vision.data.operations import _OPERATIONS as OPERATIONS
from samecurve_products.pictures.vision.data.recipe import (
    AugmentedRows,
    blend,
    cut_in,
    erased,
    fitting_box,
)
from samecurve_products.pictures.vision.data.views import Box, OpenImage
from tiny import config_of
from worlds import Pool

ALL: dict[str, Any] = {
    "crop": 0.3,
    "flip": 0.5,
    "operations": 2,
    "color": 0.3,
    "erase": 0.4,
    "mixup": 0.4,
    "cutmix": 1.0,
    "mix_probability": 0.8,
}


class Drawn:
    """A source of another kind."""

    def __len__(self) -> int:
        return 1

    def __getitem__(self, ids: Any) -> dict[str, Any]:
        return {}


def arrays(count: int, channels: int = 3) -> ImageRows:
    random = np.random.default_rng(0)
    pixels = random.integers(0, 256, (count, 12, 10, channels)).astype(np.uint8)
    return ImageRows(pixels, np.arange(count) % 4)


@pytest.mark.parametrize("size", [1, 2, 7, 64, 1001])
def test_pairs_are_neighbours_in_the_order_of_their_epoch(size: int) -> None:
    everything = np.arange(size)
    for seed, epoch in ((0, 0), (3, 5)):
        stream = permute(everything, size, seed, epoch)
        assert (positions_of(stream, size, seed, epoch) == everything).all()
        others = paired_ids(everything, size, seed, epoch)
        assert (others[others] == everything).all()
        assert (others == everything).sum() == size % 2
    batch = min(8, size)
    ids = np.concatenate(Order(size, batch, 3).ids(range(-(-size // batch))))
    assert (paired_ids(ids[: size - size % 2 : 2], size, 3, 0) == ids[1::2]).all()


@pytest.mark.parametrize("channels", [1, 3])
def test_a_row_follows_from_seed_epoch_and_sample_alone(channels: int) -> None:
    source = arrays(9, channels)
    rows = with_recipe(source, Augment(**ALL), 5)
    assert isinstance(rows, AugmentedRows)
    whole = rows.__getitem__(np.arange(9), 2)
    assert whole["pixels"].shape == (9, 12, 10, channels)
    assert whole["pixels"].dtype == np.uint8
    assert whole["mix"].dtype == np.float32
    for sample in (8, 0, 3):
        alone = rows.__getitem__(np.array([sample]), 2)
        for name, column in alone.items():
            np.testing.assert_array_equal(column[0], whole[name][sample])
    for other in (
        rows.__getitem__(np.arange(9), 3),
        with_recipe(source, Augment(**ALL), 6)[np.arange(9)],
    ):
        assert (other["pixels"] != whole["pixels"]).reshape(9, -1).any(1).sum() > 6
    plain = with_recipe(source, Augment(flip=1.0), 5)[np.arange(9)]
    np.testing.assert_array_equal(plain["pixels"], source[np.arange(9)]["pixels"][:, :, ::-1])


def test_switching_one_change_on_leaves_the_draws_of_the_others() -> None:
    views = ArrayViews(arrays(6))
    few, more = (
        AugmentedRows(views, augment, size=(10, 12), seed=1)
        for augment in (Augment(mixup=0.4), Augment(mixup=0.4, flip=0.5, crop=0.5, erase=0.5))
    )
    np.testing.assert_array_equal(few[np.arange(6)]["mix"], more[np.arange(6)]["mix"])


def test_what_is_mixed_counts_as_it_is_seen() -> None:
    black, white = np.zeros((20, 30, 3), np.uint8), np.full((20, 30, 3), 255, np.uint8)
    random = np.random.default_rng(0)
    for share, across, down in random.random((200, 3)):
        mixed, first = cut_in(black, white, share, (across, down))
        assert first == pytest.approx((mixed == 0).mean())
        mixed, first = blend(black, white, share)
        assert mixed.mean() / 255 == pytest.approx(1 - first, abs=0.002)
        assert first == pytest.approx(share, abs=1e-6)
    crops = [fitting_box((30, 20), random.random((10, 4)), (0.1, 1), 4 / 3) for _ in range(300)]
    boxes = np.array([box for box in crops if box is not None])
    assert len(boxes) > 290
    assert (boxes[:, :2] >= 0).all()
    assert (boxes[:, 2:] <= (30, 20)).all()
    areas = (boxes[:, 2] - boxes[:, 0]) * (boxes[:, 3] - boxes[:, 1]) / 600
    assert areas.min() == pytest.approx(0.1, abs=0.03)
    shares = [(erased(black, random, 1.0) != 0).any(2).mean() for _ in range(100)]
    assert 0.01 < min(shares) < 0.08
    assert 0.25 < max(shares) < 0.36


@pytest.mark.parametrize("channels", [1, 3])
def test_operations_change_images_of_grey_and_of_colours(channels: int) -> None:
    image = ArrayViews(arrays(1, channels)).open(0)
    assert isinstance(image, OpenImage)
    for number in range(len(OPERATIONS)):
        view = image.view(Box(0, 0, *image.size), image.size)
        changed = OPERATIONS[number](view, -0.7)
        assert (changed.size, changed.mode) == (view.size, view.mode)
        assert OPERATIONS[number](view, 0.0).size == view.size


def test_what_cant_be_augmented_is_refused() -> None:
    floats = ImageRows(np.zeros((2, 4, 4, 3), np.float32), np.zeros(2, np.int64))
    with pytest.raises(UserError, match="3 channels of float32"):
        with_recipe(floats, Augment(flip=0.5), 0)
    assert with_recipe(floats, Augment(), 0) is floats
    with pytest.raises(UserError, match="drawn when they are read"):
        with_recipe(Drawn(), Augment(flip=0.5), 0)
    with pytest.raises(InvalidConfigError, match="mix_probability is of mixup and cutmix"):
        config_of({"task": "vision", "model": {}, "data": {"augment": {"mix_probability": 0.5}}})


CURVES: dict[str, tuple[dict[str, Any], list[str]]] = {
    "all": (ALL, ["single/4", "ddp:3/2"]),
    "mixup": ({"mixup": 0.8}, ["single/4", "ddp:2", "ddp:3", "ddp:3/4", "fsdp:2/2"]),
    "cutmix": ({"cutmix": 1.0}, ["single/4", "ddp:2", "ddp:3", "ddp:3/4", "dp:2/2"]),
}


@pytest.mark.parametrize(
    "case",
    [each if each == "all" else pytest.param(each, marks=pytest.mark.long) for each in CURVES],
)
def test_a_recipe_has_one_curve_on_any_devices(case: str, pool: Pool, tmp_path: Path) -> None:
    """Batches of 10 of 23: pairs are cut by microbatches, by ranks, and by steps' ends; stochastic
    depth and label smoothing beside the recipe.
    """
    augment, layouts = CURVES[case]
    root = make_folder(tmp_path / "set", {"disc": 8, "ring": 8, "square": 7}, side=24)
    config = config_of(
        {
            "task": "vision",
            "model": {
                **{"width": 8, "depth": 2, "heads": 2, "patch": 8},
                **{"drop_path": 0.3, "label_smoothing": 0.1, "dropout": 0.1},
            },
            "data": {
                "source": str(root),
                "resolution": 16,
                "validation": 0,
                "augment": augment,
            },
            "batch": {"samples": 10},
            "optimizer": {"lr": 3e-3},
            "train": {"steps": 6, "precision": "f64"},
            "devices": {"use": "cpu", "preflight": 0},
        }
    )
    columns = open_task(config, tmp_path / "cache").train_data()[np.arange(3)]
    assert {"pixels", "labels", "labels_2", "mix"} == set(columns)
    check_one_curve(config, layouts, pool, tmp_path, steps=6, near=1e-10)
