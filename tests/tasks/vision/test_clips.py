"""Short videos as samples of task vision: one curve on any devices, frames in their order, one
augmentation for a clip, and what is refused.
"""

import io
import tarfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx
from moving_squares import CLASSES, clip, write_folders, write_npz

from one_curve import check_one_curve
from samecurve.errors import UserError
from samecurve.jax_engine.model import named_values
from samecurve_products.pictures.vision.augment_section import Augment
from samecurve_products.pictures.vision.data.augmentation import with_recipe
from samecurve_products.pictures.vision.data.image_sets import ImageRows, ImageSets
from samecurve_products.pictures.vision.data.sources import open_images
from samecurve_products.pictures.vision.data.views import MiddleRows
from samecurve_products.pictures.vision.flax_model import Classifier as FlaxClassifier
from samecurve_products.pictures.vision.jax_task import JaxVision
from samecurve_products.pictures.vision.layout import Grid
from samecurve_products.pictures.vision.sections import TORCH_BLOCKS, VisionData, VisionModel
from samecurve_products.pictures.vision.task import VisionTask
from samecurve_products.pictures.vision.torch_model import Classifier as TorchClassifier
from samecurve_products.pictures.vision.torch_task import TorchVision
from samecurve_products.preview.about import AboutData
from samecurve_products.preview.parts import Picture, Value, parts_of
from tiny import config_of
from worlds import Pool

MIXERS: Mapping[str, Mapping[str, Any]] = {
    "gated": {"cssm": "gated", "steps": 4, "kernel_size": 3},
    "no_gate": {"cssm": "no_gate", "kernel_size": 3},
    "hgru_bi": {"cssm": "hgru_bi", "kernel_size": 3},
    "attention": {"cssm": "attention", "heads": 2},
    "no_fft": {"cssm": "no_fft"},
}
RECIPE = Augment(crop=0.4, flip=0.5, color=0.3, operations=2, erase=0.5)


@pytest.fixture(scope="module")
def squares(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_npz(tmp_path_factory.mktemp("clips") / "squares.npz", 60)


def values(source: Path, model: Mapping[str, Any], **data: Any) -> dict[str, Any]:
    """A config's values: clips of 4 frames on 3 x 3 patches; 10 clips a step leave short tails."""
    return {
        "task": "vision",
        "engine": "jax",
        "model": {"width": 8, "depth": 2, "patch": 4, **model},
        "data": {"source": str(source), "eval_samples": 6, **data},
        "batch": {"samples": 10},
        "optimizer": {"lr": 1e-2},
        "train": {"steps": 6, "precision": "f64"},
        "devices": {"use": "cpu"},
    }


@pytest.mark.long
def test_one_curve_of_clips(squares: Path, pool: Pool, tmp_path: Path) -> None:
    """The run begins with torch on two ranks and goes on with jax on three devices."""
    config = config_of({**values(squares, MIXERS["gated"]), "engine": "torch"})
    check_one_curve(config, ["ddp:2..jax:3"], pool, tmp_path, steps=6, near=1e-10)


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "layouts"),
    [
        ("no_gate", ["jax:2", "jax:3", "jax:2/3"]),
        ("hgru_bi", ["jax:2", "jax:3", "jax:2/3"]),
        ("gated", ["jax:1", "jax:3"]),
        ("gated", ["ddp:2", "ddp:3", "fsdp:2"]),
        ("attention", ["jax:1", "jax-fsdp:3"]),
        ("attention", ["ddp:2", "ddp:3"]),
        ("no_fft", ["jax:2", "ddp:3"]),
    ],
)
def test_one_curve_of_clips_with_each_mixer(
    name: str, layouts: list[str], squares: Path, pool: Pool, tmp_path: Path
) -> None:
    """Worlds 1, 2 and 3, with a recipe; one device of the engine is what all are compared with."""
    augment = {"flip": 0.5, "crop": 0.5, "mixup": 0.2, "cutmix": 1.0}
    config = values(squares, MIXERS[name], augment=augment)
    config["engine"] = "torch" if name in TORCH_BLOCKS else "jax"
    check_one_curve(config_of(config), layouts, pool, tmp_path, steps=6, near=1e-10)


def fields(name: str, **more: Any) -> VisionModel:
    model = {"width": 4, "depth": 2, "patch": 2, "steps": 3, **MIXERS[name], **more}
    if name in {"attention", "no_fft"}:
        del model["steps"]
        return VisionModel.model_validate(model).model_copy(update={"steps": 3})
    return VisionModel.model_validate({**model, "steps": 3})


def filled(module: nnx.Module, seed: int = 0) -> dict[str, Any]:
    """Draw values for a module's parameters; returns them by name."""
    random = np.random.default_rng(seed)
    drawn = {
        name: random.normal(0, 0.4, value.shape) for name, value in named_values(module).items()
    }
    flat = nnx.to_flat_state(nnx.state(module, nnx.Param))
    with_values = {path: leaf.replace(drawn[".".join(map(str, path))]) for path, leaf in flat}
    nnx.update(module, nnx.from_flat_state(with_values))
    return drawn


def answer(model: nnx.Module, pixels: Any) -> Any:
    """The logits, by one compiled program."""

    @nnx.jit
    def logits(model: Any, pixels: jax.Array) -> Any:
        return model(pixels)

    return logits(model, jnp.asarray(pixels))


@pytest.mark.parametrize(
    ("name", "more"),
    [("gated", {}), ("attention", {}), ("no_fft", {"stem": "conv", "pool": "max"})],
)
def test_the_engines_have_one_model_of_clips(name: str, more: dict[str, Any]) -> None:
    """The weights of one engine's model give the same logits in the other's."""
    grid, chosen = Grid(4, 6), fields(name).model_copy(update=more)
    clips = np.random.default_rng(2).normal(size=(2, 3, 8, 12, 1))
    with jax.enable_x64(True):
        of_flax: Any = FlaxClassifier(chosen, grid, channels=1, classes=5)
        of_torch = TorchClassifier(chosen, grid, channels=1, classes=5).double()
        drawn = filled(of_flax)
        of_torch.load_state_dict({key: torch.from_numpy(value) for key, value in drawn.items()})
        logits = of_torch(torch.from_numpy(clips)).detach()
        np.testing.assert_allclose(answer(of_flax, clips), logits, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("name", ["gated", "no_gate", "hgru_bi"])
def test_the_frames_are_the_steps_of_the_recurrence(name: str) -> None:
    """A clip of equal frames is what a single image is in as many steps. Turned round, a clip gives
    another answer, so the order of its frames counts.

    The blocks themselves, with another input in each step, are compared with a plain loop over the
    steps in test_vision_models.py.
    """
    grid = Grid(4, 6)
    with jax.enable_x64(True):
        model: Any = FlaxClassifier(fields(name, depth=1), grid, channels=1, classes=5)
        filled(model)
        images = jnp.asarray(np.random.default_rng(2).normal(size=(2, 8, 12, 1)))
        equal = jnp.repeat(images[:, None], 3, axis=1)
        np.testing.assert_allclose(model(equal), model(images), rtol=1e-12)
        moving = jnp.asarray(np.random.default_rng(3).normal(size=(2, 3, 8, 12, 1)))
        assert abs(model(moving) - model(moving[:, ::-1])).max() > 1e-3


def rows(count: int, channels: int = 3) -> ImageRows:
    random = np.random.default_rng(0)
    still = random.integers(0, 256, (count, 1, 10, 12, channels)).astype(np.uint8)
    return ImageRows(still.repeat(5, 1), np.arange(count))


@pytest.mark.parametrize("channels", [1, 3])
def test_all_frames_of_a_clip_are_changed_in_the_same_way(channels: int) -> None:
    """A clip of equal frames stays one, in each epoch another; neighbours in a batch do not
    matter.
    """
    source: Any = with_recipe(rows(6, channels), RECIPE, seed=3)
    ids = np.arange(6)
    first, second = source.__getitem__(ids, 0)["pixels"], source.__getitem__(ids, 1)["pixels"]
    assert first.shape == (6, 5, 10, 12, channels)
    assert (first == first[:, :1]).all()
    assert (first != second).any((1, 2, 3, 4)).all()
    np.testing.assert_array_equal(source.__getitem__(ids[4:], 0)["pixels"], first[4:])


def test_two_clips_are_mixed_as_two_images_are() -> None:
    """What mixup and cutmix make of clips is what they make of their first frames."""
    for augment in (Augment(mixup=0.4), Augment(cutmix=1.0)):
        clips = rows(8)
        stills = ImageRows(clips[np.arange(8)]["pixels"][:, 0], clips.labels)
        of_clips: Any = with_recipe(clips, augment, seed=1)[np.arange(8)]
        of_stills: Any = with_recipe(stills, augment, seed=1)[np.arange(8)]
        np.testing.assert_array_equal(of_clips["pixels"][:, 2], of_stills["pixels"])
        np.testing.assert_array_equal(of_clips["mix"], of_stills["mix"])


def opened(source: str | Path, cache: Path, **more: Any) -> ImageSets:
    data = VisionData.model_validate(
        {"source": str(source), "resolution": 12, "shown": 1.0, **more}
    )
    return open_images(data, cache)


def first_frames(images: ImageSets, frames: int) -> Any:
    """The clips to train on, by label and then by their first pixel, and in grey."""
    assert isinstance(images.train, MiddleRows)
    assert images.frames == frames
    all_rows = images.train[np.arange(len(images.train))]
    return all_rows["labels"], all_rows["pixels"][..., :1]


def test_a_folder_for_each_clip(tmp_path: Path) -> None:
    """Frames are in the order of their numbers, 2 before 10; longer clips are read in part; a clip
    is held out as a whole.
    """
    root = write_folders(tmp_path / "set", range(8), frames=12)
    images = opened(root, tmp_path, frames=12, validation=0)
    assert images.classes == CLASSES
    labels, pixels = first_frames(images, 12)
    expected = [clip(number, frames=12) for number in (0, 2, 4, 6, 1, 3, 5, 7)]
    assert labels.tolist() == [0] * 4 + [1] * 4
    np.testing.assert_array_equal(pixels, expected)
    _, some = first_frames(opened(root, tmp_path, frames=4, validation=0), 4)
    np.testing.assert_array_equal(some, np.stack(expected)[:, [0, 4, 7, 11]])
    split = opened(root, tmp_path, frames=12, validation=0.25)
    assert split.validation is not None
    parts = (split.train, split.validation)
    sides = [part[np.arange(len(part))]["pixels"][..., :1] for part in parts]
    assert min(map(len, sides)) > 1
    found = [each.tobytes() for each in np.concatenate(sides)]
    assert sorted(found) == sorted(each.tobytes() for each in expected)
    assert split.sha256 != images.sha256


def write_tar(file: Path, numbers: Sequence[int]) -> None:
    with tarfile.open(file, "w") as archive:
        for number in numbers:
            members = {}
            for frame, pixels in enumerate(clip(number, frames=12), 1):
                content = io.BytesIO()
                np_image(pixels).save(content, "PNG")
                members[f"{number:03}.{frame}.png"] = content.getvalue()
            members[f"{number:03}.cls"] = CLASSES[number % 2].encode()
            for name, value in members.items():
                member = tarfile.TarInfo(name)
                member.size = len(value)
                archive.addfile(member, io.BytesIO(value))


def np_image(pixels: Any) -> Any:
    from PIL import Image

    return Image.fromarray(pixels[..., 0])


def write_parquet(file: Path, numbers: Sequence[int]) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    frames = []
    for number in numbers:
        contents = []
        for pixels in clip(number, frames=12):
            content = io.BytesIO()
            np_image(pixels).save(content, "PNG")
            contents.append({"bytes": content.getvalue(), "path": None})
        frames.append(contents)
    labels = [CLASSES[number % 2] for number in numbers]
    pq.write_table(pa.table({"frames": frames, "label": labels}), file)


@pytest.mark.parametrize("suffix", ["tar", "parquet"])
def test_clips_in_shards_are_those_in_folders(suffix: str, tmp_path: Path) -> None:
    file = tmp_path / f"clips.{suffix}"
    (write_tar if suffix == "tar" else write_parquet)(file, range(4))
    labels, pixels = first_frames(opened(file, tmp_path, frames=12, validation=0), 12)
    assert labels.tolist() == [0, 1, 0, 1]
    np.testing.assert_array_equal(pixels, [clip(number, frames=12) for number in range(4)])
    images = opened(file, tmp_path, frames=13, validation=0)
    with pytest.raises(UserError, match="has 12 pictures, and data"):
        images.train[np.arange(1)]


def loose(root: Path) -> None:
    (root / "left/clip-000/1.png").rename(root / "left/1.png")


def short(root: Path) -> None:
    (root / "left/clip-000/1.png").unlink()


def of_another_size(root: Path) -> None:
    np_image(clip(0, side=13)[0]).save(root / "left/clip-000/3.png")


def cut_off(root: Path) -> None:
    file = root / "right/clip-001/2.png"
    file.write_bytes(file.read_bytes()[:60])


@pytest.mark.parametrize(
    ("break_it", "says", "remedy"),
    [
        (loose, "left/1.png lies beside the folders of clips", "a folder for each clip"),
        (short, "clip-000 has 3 pictures, and data.frames is 4", "--set data.frames=3"),
        (of_another_size, "1.png has 12 x 12 and 3.png has 13 x 13 pixels", "frames of one size"),
        (cut_off, "clip-001/2.png can't be read", "data.broken=skip leaves its clip out"),
    ],
)
def test_clips_that_cant_be_trained_on(
    break_it: Callable[[Path], None], says: str, remedy: str, tmp_path: Path
) -> None:
    root = write_folders(tmp_path / "set", range(6))
    break_it(root)
    with pytest.raises(UserError) as caught:
        opened(root, tmp_path, frames=4)
    assert says in caught.value.cause
    assert remedy in caught.value.remedy
    if break_it is cut_off:
        images = opened(root, tmp_path, frames=4, validation=0, broken="skip")
        assert len(images.train) == 5
        assert any("1 clip left out: clip-001" in line for line in images.lines)


@pytest.mark.parametrize(
    ("model", "data", "says"),
    [
        ({"backbone": "resnet18"}, {}, "model.backbone resnet18 takes single images"),
        ({"cssm": "gated", "steps": 3}, {}, "the steps of a clip are its frames, 4 here"),
        ({"cssm": "gated"}, {}, "--set model.steps=4 --set model.kernel_size=3"),
        ({}, {"frames": 4}, "data.frames is of pictures in files"),
    ],
)
def test_what_clips_do_not_serve_is_refused(
    model: Mapping[str, Any], data: Mapping[str, Any], says: str, squares: Path, cache: Path
) -> None:
    task = TorchVision(
        VisionModel.model_validate({"patch": 4, **model} if "cssm" in model else model),
        VisionData.model_validate({"source": str(squares), **data}),
        cache,
    )
    with pytest.raises(UserError) as caught:
        task.model()
    assert says in f"{caught.value.cause} {caught.value.remedy}"


def test_a_run_keeps_the_frames_of_its_clips(squares: Path, cache: Path) -> None:
    """The file that a run keeps says that samples are clips; of images it is as it was."""
    data = VisionData(source=str(squares))
    task = JaxVision(VisionModel(patch=4, width=8, heads=2), data, cache, engine="jax")
    assert task.format.sample_shape == (4, 12, 12, 1)
    assert task.facts()["bytes_per_sample"] > 0
    kept = VisionTask(task._model, data, cache, assets=next(iter(task.assets().values())).parent)
    assert kept.format == task.format
    assert kept.fields.num_steps == 4
    digits = VisionTask(VisionModel(), VisionData(), cache)
    assert "frames" not in digits.format.to_json()
    assert any("clips of 4 frames of 12 x 12 pixels" in line for line in task.notes())
    stills = {"source": "digits", "like_run": str(next(iter(task.assets().values())))}
    other = VisionTask(task._model, VisionData.model_validate(stills), cache)
    with pytest.raises(UserError, match="the run's are clips of 4 frames of 12 x 12 x 1"):
        other.train_data()


@pytest.mark.parametrize("channels", [1, 3])
def test_data_show_has_frames_side_by_side(channels: int) -> None:
    about = AboutData(classes=CLASSES, class_counts=[1, 1], lines=[], left_out=())
    row = {"pixels": rows(1, channels)[np.arange(1)]["pixels"][0], "labels": np.int64(1)}
    picture, label = parts_of(row, None, about)
    assert isinstance(picture, Picture)
    assert picture.pixels.shape[:2] == (10, 4 * 12)
    assert label == Value("labels", "right")
