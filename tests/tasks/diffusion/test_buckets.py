"""The shapes that pictures are cut to: a pure function of three numbers and the picture's sides."""

from fractions import Fraction
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from picture_sets import data_of, noise, opened, refusal, write_folder

from samecurve.errors import UserError
from samecurve_products.pictures.diffusion.data.buckets import (
    Buckets,
    Shape,
    check_resolution,
    check_sides,
)
from samecurve_products.pictures.diffusion.data.pictures import scale_to_cover

RULES = [
    Buckets(resolution, step, longest)
    for (resolution, step), longest in product(
        [(1024, 64), (512, 64), (768, 32), (32, 8), (512, 512), (512, 8)],
        [1.0, 1.5, 2.0, 3.3, 16.0],
    )
]


def fit_into_no_other(rule: Buckets) -> set[Shape]:
    """The shapes by their definition: of all that are allowed, those that fit into no other."""
    steps = range(1, 16 * rule.resolution // rule.step + 1)
    most = (rule.resolution // rule.step) ** 2
    allowed = [
        (width, height)
        for width in steps
        for height in steps[: most // width]
        if Fraction(max(width, height), min(width, height)) <= Fraction(str(rule.longest))
    ]
    return {
        (width * rule.step, height * rule.step)
        for width, height in allowed
        if sum(other[0] >= width and other[1] >= height for other in allowed) == 1
    }


@pytest.mark.parametrize("rule", [rule for rule in RULES if rule.resolution <= 16 * rule.step])
def test_shapes_are_those_that_fit_into_no_other(rule: Buckets) -> None:
    assert set(rule.shapes) == fit_into_no_other(rule)


@pytest.mark.parametrize("rule", RULES)
def test_shapes_keep_their_limits(rule: Buckets) -> None:
    shapes = rule.shapes
    assert len(set(shapes)) == len(shapes)
    assert (rule.resolution, rule.resolution) in shapes
    assert {(height, width) for width, height in shapes} == set(shapes)
    ratios = [width / height for width, height in shapes]
    assert ratios == sorted(ratios)
    for width, height in shapes:
        assert width % rule.step == height % rule.step == 0
        assert width * height <= rule.resolution**2
        assert max(width, height) <= rule.longest * min(width, height) + 1e-6


def test_shapes_at_the_resolution_of_sdxl() -> None:
    """Each is one of those that SDXL was trained on (arXiv:2307.01952, appendix I)."""
    assert [shape for shape in Buckets(1024, 64, 2.0).shapes if shape[0] >= shape[1]] == [
        (1024, 1024),
        (1088, 960),
        (1152, 896),
        (1216, 832),
        (1344, 768),
        (1408, 704),
    ]


def test_a_picture_goes_to_the_nearest_ratio_and_its_mirror_to_the_mirror() -> None:
    rule = Buckets(1024, 64, 2.0)
    random = np.random.default_rng(0)
    for width, height in random.integers(1, 5000, (300, 2)).tolist():
        chosen = rule.shape_of(width, height)
        ratios = {shape: Fraction(*shape) / Fraction(width, height) for shape in rule.shapes}
        distances = {shape: max(ratio, 1 / ratio) for shape, ratio in ratios.items()}
        assert distances[chosen] == min(distances.values())
        assert rule.shape_of(height, width) == chosen[::-1]


def test_of_two_equally_near_shapes_the_squarer_is_taken() -> None:
    rule = Buckets(64, 32, 4.0)
    assert rule.shapes == ((32, 128), (64, 64), (128, 32))
    assert rule.shape_of(200, 100) == rule.shape_of(100, 200) == (64, 64)
    assert rule.shape_of(201, 100) == (128, 32)


def test_a_scaled_picture_covers_its_shape_and_no_more() -> None:
    random = np.random.default_rng(1)
    for width, height in random.integers(1, 5000, (300, 2)).tolist():
        shape = (64 * int(random.integers(1, 20)), 64 * int(random.integers(1, 20)))
        scaled = scale_to_cover(width, height, shape)
        assert scaled[0] >= shape[0]
        assert scaled[1] >= shape[1]
        assert scaled[0] == shape[0] or scaled[1] == shape[1]
        scale = max(Fraction(shape[0], width), Fraction(shape[1], height))
        assert abs(scaled[0] - width * scale) <= Fraction(1, 2)
        assert abs(scaled[1] - height * scale) <= Fraction(1, 2)


def test_a_resolution_that_the_step_does_not_divide_is_refused(tmp_path: Path, cache: Path) -> None:
    error = refusal(tmp_path, cache, resolution=500, bucket_step=64)
    assert error.cause == "data.resolution 500 is no multiple of data.bucket_step 64"
    assert "data.resolution=448 or 512" in error.remedy
    with pytest.raises(UserError, match=r"multiples of 16, and data.bucket_step is 40"):
        check_resolution(480, 40, multiple=16)
    with pytest.raises(UserError, match="no multiple") as caught:
        check_resolution(30, 64)
    assert "data.resolution=64;" in caught.value.remedy
    check_resolution(480, 48, multiple=16)
    check_sides(data_of(tmp_path, buckets=False, resolution=24, bucket_step=64), multiple=8)
    with pytest.raises(UserError, match=r"data.resolution is 20") as caught:
        check_sides(data_of(tmp_path, buckets=False, resolution=20), multiple=8)
    assert "data.resolution=16 or 24" in caught.value.remedy


def test_without_buckets_every_picture_is_cut_to_a_square(tmp_path: Path, cache: Path) -> None:
    """Of any size: there is no step that it must be a multiple of."""
    sides = {"a": (40, 20), "b": (20, 40), "c": (30, 30)}
    files = {f"{name}.png": noise(*size) for name, size in sides.items()}
    folder = write_folder(tmp_path / "p", {**files, **{f"{name}.txt": name for name in sides}})
    pictures = opened(folder, cache, resolution=17, bucket_step=4, buckets=False)
    assert pictures.train.bucket_shapes == ((17, 17),)
    assert pictures.train.bucket_sizes == (3,)
    assert "3 pictures of 1 folder, each cut to 17x17; none held out" in pictures.lines
