"""The images of task vision: digits, .npz files, Pathfinder; and `eval -d` on other images."""

import json
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from PIL import Image

from commands import samecurve
from samecurve.core.protocols import Part
from samecurve.errors import UserError
from samecurve_products.pictures.vision.data import pathfinder_set
from samecurve_products.pictures.vision.data.pathfinder import draw_image, draw_scene
from samecurve_products.pictures.vision.data.pathfinder_set import SHEET, read_pathfinder
from samecurve_products.pictures.vision.data.sources import open_images, stamp_images
from samecurve_products.pictures.vision.sections import VisionData, VisionModel
from samecurve_products.pictures.vision.task import VisionTask

ROOT = Path(__file__).parents[2]


def every(source: Any) -> dict[str, Any]:
    return dict(source[np.arange(len(source))])


def test_digits_are_split_without_overlap(cache: Path) -> None:
    images = open_images(VisionData(), cache)
    assert images.test is not None
    assert images.validation is not None
    parts = [every(part) for part in (images.train, images.validation, images.test)]
    assert [len(part["labels"]) for part in parts] == [1294, 144, 359]
    assert parts[0]["pixels"].shape[1:] == images.shape == (8, 8, 1)
    assert parts[0]["pixels"].dtype == np.uint8
    assert parts[0]["pixels"].max() == 255
    assert sum(images.counts) == 1294
    scaled = parts[0]["pixels"] / 255
    assert (images.mean[0], images.std[0]) == pytest.approx((scaled.mean(), scaled.std()), rel=1e-9)


def files(home: Path, **arrays: Any) -> VisionData:
    np.savez(home / "set.npz", **arrays)
    return VisionData(source=str(home / "set.npz"))


PIXELS = np.random.default_rng(0).integers(0, 256, (30, 6, 5, 3), dtype=np.uint8)
LABELS = np.arange(30) % 3


@pytest.mark.parametrize(
    ("arrays", "counts"),
    [
        ({"images": PIXELS, "labels": LABELS}, (27, 3, 0)),
        (
            {"x_train": PIXELS, "y_train": LABELS, "x_test": PIXELS[:4], "y_test": LABELS[:4]},
            (27, 3, 4),
        ),
        (
            {
                "train_images": PIXELS[..., 0],
                "train_labels": LABELS[:, None],
                "val_images": PIXELS[:5, ..., 0],
                "val_labels": LABELS[:5, None],
            },
            (30, 5, 0),
        ),
        ({"data": PIXELS / 255, "target": np.array(["cat", "dog", "owl"])[LABELS]}, (27, 3, 0)),
    ],
)
def test_npz_files_in_their_usual_spellings(
    arrays: Mapping[str, Any], counts: tuple[int, ...], tmp_path: Path, cache: Path
) -> None:
    images = open_images(files(tmp_path, **arrays), cache)
    parts = (images.train, images.validation, images.test)
    assert tuple(0 if part is None else len(part) for part in parts) == counts
    assert images.classes in (["0", "1", "2"], ["cat", "dog", "owl"])
    assert sum(images.counts) == counts[0]
    rows = every(images.train)
    assert rows["pixels"].ndim == 4
    assert rows["labels"].dtype == np.int64
    first = stamp_images(files(tmp_path, **arrays))
    assert first != stamp_images(files(tmp_path, **arrays, more=PIXELS))


@pytest.mark.parametrize(
    ("arrays", "says"),
    [
        ({"images": PIXELS}, "no images and labels to train on; it has images"),
        ({"images": PIXELS.astype(np.int32), "labels": LABELS}, "type int32"),
        ({"images": PIXELS.astype(float), "labels": LABELS}, "numbers from 0 to 255"),
        ({"images": np.full((4, 2, 2), np.nan), "labels": LABELS[:4]}, "numbers from nan to nan"),
        ({"images": PIXELS, "labels": LABELS[:9]}, "for 30 images"),
        ({"images": PIXELS, "labels": LABELS - 1}, "labels go from -1 to 1"),
        ({"images": PIXELS, "labels": LABELS, "classes": ["a", "b"]}, "classes has 2 names"),
        ({"images": np.zeros((4, 3, 8, 20), np.uint8), "labels": LABELS[:4]}, "20 channels"),
        (
            {"images": PIXELS, "labels": LABELS, "x_test": PIXELS[:, :4], "y_test": LABELS},
            "x_test has images of",
        ),
    ],
)
def test_npz_files_that_are_none(
    arrays: Mapping[str, Any], says: str, tmp_path: Path, cache: Path
) -> None:
    with pytest.raises(UserError) as caught:
        open_images(files(tmp_path, **arrays), cache)
    assert says in caught.value.cause
    assert "set.npz" in caught.value.where
    (tmp_path / "set.npz").write_bytes(b"PK\x03\x04 no archive")
    with pytest.raises(UserError, match="can't be read"):
        open_images(VisionData(source=str(tmp_path / "set.npz")), cache)


PATHS = {"source": "pathfinder", "samples": 40, "validation": 0.25}


@pytest.mark.parametrize(("size", "contour"), [(32, 9), (64, 14), (96, 20)])
def test_an_image_of_pathfinder_follows_from_its_number(size: int, contour: int) -> None:
    image, label = draw_image(7, size=size, contour=contour, distractors=3)
    again, _ = draw_image(7, size=size, contour=contour, distractors=3)
    other, _ = draw_image(7, size=size, contour=contour, distractors=3, seed=1)
    assert image.shape == (size, size)
    assert label == 1
    np.testing.assert_array_equal(image, again)
    assert (image != other).mean() > 0.05
    assert image.max() == 255
    assert 0.02 < (image > 127).mean() < 0.3


@pytest.mark.parametrize("shortest", [None, 4])
def test_neither_bright_pixels_nor_the_distance_of_the_dots_tell_the_label(
    shortest: int | None, cache: Path
) -> None:
    """Means over the classes differ by less than three standard errors."""
    fields = {**PATHS, "samples": 600, "validation": 0.0, "shortest": shortest}
    data = VisionData.model_validate(fields)
    rows = every(open_images(data, cache).train)
    pixels, labels = rows["pixels"][..., 0] / 255, rows["labels"]
    assert labels.mean() == 0.5
    for measured in (pixels.mean((1, 2)), (pixels > 0.5).mean((1, 2)), _distances(pixels)):
        halves = [measured[labels == label] for label in (0, 1)]
        error = np.sqrt(sum(half.var() / len(half) for half in halves))
        assert abs(halves[0].mean() - halves[1].mean()) < 3 * error
        assert measured.std() > 0


def _distances(pixels: Any) -> Any:
    """How far apart the two brightest discs of each image are."""
    filled = sum(
        np.roll(np.roll(pixels, down, 1), across, 2) for down in (-1, 0, 1) for across in (-1, 0, 1)
    )
    distances = []
    for image in filled:
        first = np.array(np.unravel_index(image.argmax(), image.shape))
        grid = np.moveaxis(np.indices(image.shape), 0, -1)
        apart = np.linalg.norm(grid - first, axis=-1)
        second = np.array(np.unravel_index(np.where(apart > 4, image, 0).argmax(), image.shape))
        distances.append(np.linalg.norm(first - second))
    return np.array(distances)


def test_contours_of_several_lengths() -> None:
    """Both long contours of an image have one length, and each length is as common."""
    scenes = [draw_scene(number, contour=9, shortest=4, distractors=1) for number in range(300)]
    lengths = np.array([[len(contour) - 1 for contour in scene.long] for scene in scenes])
    assert (lengths[:, 0] == lengths[:, 1]).all()
    counts = np.bincount(lengths[:, 0])[4:]
    assert len(counts) == 6
    assert counts.min() > 25
    assert all(len(contour) == 4 for scene in scenes for contour in scene.short)


@pytest.mark.long
@pytest.mark.parametrize("shortest", [None, 4])
def test_the_places_of_the_dots_do_not_tell_the_label(shortest: int | None) -> None:
    """A linear model of 8 x 8 places is at chance on other scenes; so is each end's share."""
    scenes = [
        draw_scene(number, contour=9, shortest=shortest, distractors=0) for number in range(6000)
    ]
    by_label = np.array([scene.dots for scene in scenes]).swapaxes(0, 1)  # [labels, scenes, 2, 2]
    cells = (by_label * 8).astype(int) @ [8, 1]
    counts = (cells[..., None] == np.arange(64)).sum(2)
    signs = np.broadcast_to(np.array([-1, 1])[:, None], counts.shape[:2])
    half = len(scenes) // 2
    rows, answers = counts[:, :half].reshape(-1, 64), signs[:, :half].ravel()
    weights = np.linalg.solve(rows.T @ rows + 30 * np.eye(64), rows.T @ answers)
    right = ((counts[:, half:] @ weights > 0) == (signs[:, half:] > 0)).mean()
    assert abs(right - 0.5) < 3 * 0.5 / np.sqrt(2 * half)
    ends = np.array([[contour[[0, -1]] for contour in scene.long] for scene in scenes])
    has_dot = (ends[None, :, :, :, None] == by_label[:, :, None, None]).all(-1).any(-1)
    assert np.abs(has_dot.mean(1) - 0.5).max() < 3.5 * 0.5 / np.sqrt(len(scenes))


def test_each_rank_draws_a_part_before_the_first_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two ranks make blocks in turn, which are the bytes that an image drawn alone has. A damaged
    block is drawn again.
    """
    monkeypatch.setattr(pathfinder_set, "_BLOCK", 16)

    def opened(*, cached: bool) -> VisionTask:
        data = VisionData.model_validate({**PATHS, "cached": cached})
        return VisionTask(VisionModel(), data, tmp_path)

    drawn = opened(cached=False)
    assert not hasattr(drawn, "prepare")
    task = opened(cached=True)
    assert task.fingerprint() == drawn.fingerprint()
    assert not list(tmp_path.rglob("*.npy"))  # a plan draws no more than it looks at
    ranks = [task.prepare(None, Part(number, 2)) for number in (0, 1)]
    assert [next(rank) for rank in ranks] == [(0, 5), (0, 5)]
    steps = [next(rank) for rank in (*ranks, *ranks)]  # 3 blocks to train on, 1 held out, 1 to test
    assert steps == [(1, 5), (1, 5), (2, 5), (2, 5)]
    assert list(ranks[0])[-1] == list(ranks[1])[-1] == (5, 5)
    assert not list(task.prepare(None, Part(0, 1)))
    files = sorted(tmp_path.rglob("pixels.npy"))
    assert len(files) == 5
    for one, other in (
        (task.images.train, drawn.images.train),
        (task.images.validation, drawn.images.validation),
        (task.images.test, drawn.images.test),
    ):
        for name, array in every(one).items():
            np.testing.assert_array_equal(array, every(other)[name])
    assert (every(task.images.validation)["pixels"] != every(task.images.test)["pixels"]).any()
    before = files[0].read_bytes()
    files[0].write_bytes(before[:-1] + b"\7")
    assert list(opened(cached=True).prepare(None, Part(0, 1)))[-1] == (5, 5)
    assert files[0].read_bytes() == before


@pytest.mark.parametrize("engine", ["torch", pytest.param("jax", marks=pytest.mark.long)])
def test_images_are_drawn_by_the_ranks_of_a_run(
    engine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = tmp_path / "cache"
    monkeypatch.setenv("SAMECURVE_CACHE", str(cache))
    model = "model={cssm: gated, width: 8, depth: 1, patch: 8}"
    data = "data={source: pathfinder, samples: 60, validation: 0.1}"
    line = ("--set", "task=vision", "--set", model, "--set", data, "--engine", engine)
    more = ("--global-batch", 20, "--max-steps", 2, "--devices", "cpu:2")
    planned = samecurve("plan", *line, *more, cwd=tmp_path).stdout
    assert "60 to train on; 6 held out; 6 to test on" in planned
    assert not list(cache.rglob("pixels.npy"))
    said = samecurve("train", *line, *more, "--save-dir", "run", cwd=tmp_path).stdout
    assert "ready  3 files of drawn images made in" in said
    assert len(list(cache.rglob("pixels.npy"))) == 3
    confusion = json.loads((tmp_path / "run/results.json").read_text())["test"]["confusion"]
    assert np.sum(confusion) == 6


def test_a_folder_of_pathfinder_images_with_a_sheet(tmp_path: Path) -> None:
    line = ("data", "pathfinder", "paths", "--count", 20, "--seed", 3)
    said = samecurve(*line, cwd=tmp_path).stdout
    assert "20 to train on and 2 to test on, of 32 x 32 pixels" in said
    paths = tmp_path / "paths"
    assert len(list(paths.glob("train/connected/*.png"))) == 10
    drawn, _ = draw_image(13, size=32, contour=9, distractors=4, seed=3)
    np.testing.assert_array_equal(np.asarray(Image.open(paths / "train/connected/13.png")), drawn)
    assert np.asarray(Image.open(paths / SHEET)).shape == (4 * 198, 6 * 198)
    assert "is not empty" in samecurve(*line, cwd=tmp_path, code=2).stderr
    small = samecurve("data", "pathfinder", "b", "--contour", 20, cwd=tmp_path, code=2).stderr
    assert "56 to 128 pixels a side" in small
    short = samecurve("data", "pathfinder", "b", "--shortest", 3, cwd=tmp_path, code=2).stderr
    assert "the shortest contour has 3 dashes, the longest 9" in short
    assert "4 to 9 dashes" in short


def test_a_run_is_measured_on_other_images(tmp_path: Path) -> None:
    """With its own numbers for the classes, and refused where there is a class that it lacks."""
    names = np.array(["cat", "dog", "owl"])
    np.savez(tmp_path / "set.npz", images=PIXELS[:, :4, :4], labels=names[LABELS])
    np.savez(tmp_path / "part.npz", images=PIXELS[:7, :4, :4], labels=names[1:][LABELS[:7] % 2])
    np.savez(tmp_path / "more.npz", images=PIXELS[:6, :4, :4], labels=np.array(["ant"] * 6))
    model = "model={width: 8, depth: 1, heads: 2, patch: 2}"
    more = ("--set", model, "--global-batch", 10, "--max-steps", 2, "--devices", "cpu:1")
    line = ("train", "--set", "task=vision", "-d", "set.npz", "--save-dir", "run", *more)
    samecurve(*line, cwd=tmp_path)
    scores = samecurve("eval", "run", "-d", "part.npz", "--json", cwd=tmp_path).stdout
    confusion = np.array(json.loads(scores)["confusion"])
    assert confusion.sum(1).tolist() == [0, 5, 2]
    refused = samecurve("eval", "run", "-d", "more.npz", cwd=tmp_path, code=2).stderr
    assert "class ant is none of the run's: cat, dog, owl" in refused


def test_a_plan_announces_a_long_drawing_and_not_a_short_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once, whatever the run trains on afterwards; an estimate from the images of the plan."""
    data = VisionData(source="pathfinder", samples=40_000, validation=0.05)
    ticks = iter((0.0, 0.028, 1.0, 1.028))  # the plan draws 4 images: 7 ms each
    clock = SimpleNamespace(perf_counter=lambda: next(ticks))
    monkeypatch.setattr(pathfinder_set, "time", clock)
    monkeypatch.setattr(pathfinder_set, "_MEASURED", 4)
    (about,) = read_pathfinder(data, tmp_path).lines[1:]
    assert about == (
        "44,000 images are drawn once, before the first step (about 5m08s on one core, shared among"
        " the ranks), and kept in the cache"
    )
    few = VisionData(source="pathfinder", samples=400, validation=0.05)
    assert not read_pathfinder(few, tmp_path).lines[1:]
