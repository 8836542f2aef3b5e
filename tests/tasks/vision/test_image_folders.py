"""Pictures in a folder for each class: their splits, their pixels, and what is refused."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from class_pictures import draw, make_folder
from PIL import Image

from samecurve.errors import UserError
from samecurve.tasks.vision.data.folder_images import FolderViews, read_folder, stamp_folder
from samecurve.tasks.vision.data.image_sets import ImageSets
from samecurve.tasks.vision.data.views import Box, MiddleRows
from samecurve.tasks.vision.sections import VisionData

COUNTS = {"disc": 6, "ring": 5, "square": 7}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_folder(tmp_path / "set", COUNTS)


def opened(root: Path, **fields: Any) -> ImageSets:
    data = VisionData(source=str(root), resolution=24, **fields)
    return read_folder(data, root.parent / "cache", say=lambda _: None)


def files_of(rows: Any) -> list[str]:
    views = rows.views
    assert isinstance(views, FolderViews)
    return [views.name(number) for number in range(len(views))]


def test_each_class_is_split_by_content_wherever_its_files_lie(folder: Path) -> None:
    images = opened(folder, validation=0.3)
    assert images.classes == ("disc", "ring", "square")
    assert images.test is None
    held, trained = files_of(images.validation), files_of(images.train)
    assert not set(held) & set(trained)
    assert sorted(held + trained) == sorted(
        path.relative_to(folder).as_posix() for path in folder.rglob("*.*")
    )
    assert {name.split("/")[0] for name in held} == set(COUNTS)
    assert images.counts == [sum(n.startswith(c) for n in trained) for c in images.classes]
    rows = images.train[np.array([0, len(images.train) - 1])]
    assert rows["pixels"].shape == (2, 24, 24, 3)
    assert rows["pixels"].dtype == np.uint8
    assert rows["labels"].tolist() == [0, 2]
    again = shutil.move(folder, folder.with_name("elsewhere"))
    moved = opened(Path(again), validation=0.3)
    assert moved.sha256 == images.sha256
    assert files_of(moved.validation) == held
    draw("disc", 99).save(Path(again) / "disc" / "new.png")
    more = opened(Path(again), validation=0.3)
    assert more.sha256 != images.sha256
    others = [name for name in held if not name.startswith("disc")]
    assert [name for name in files_of(more.validation) if not name.startswith("disc")] == others


def test_folders_of_splits_are_taken_as_they_are(tmp_path: Path) -> None:
    root = tmp_path / "set"
    make_folder(root / "train", COUNTS)
    make_folder(root / "val", {"disc": 2, "ring": 2}, first=100)
    make_folder(root / "test", {"square": 3}, first=200)
    (root / "train" / "readme.txt").write_text("hello")
    images = opened(root)
    assert images.validation is not None
    assert images.test is not None
    sizes = len(images.train), len(images.validation), len(images.test)
    assert sizes == (18, 4, 3)
    assert images.test[np.arange(3)]["labels"].tolist() == [2, 2, 2]
    assert "no picture for validation of square" in images.lines
    assert "1 file not read: train/readme.txt" in images.lines
    before = stamp_folder(VisionData(source=str(root)))
    (root / "val" / "disc" / "0100.jpg").touch()
    assert stamp_folder(VisionData(source=str(root))) != before


def test_a_large_jpeg_is_decoded_with_fewer_pixels_and_looks_the_same(tmp_path: Path) -> None:
    root = make_folder(tmp_path / "set", {"disc": 2, "ring": 2}, side=400, suffixes=[".jpg"])
    views = opened(root, validation=0).train
    assert isinstance(views, MiddleRows)
    for path, number in ((root / "disc" / "0000.jpg", 0), (root / "ring" / "0001.jpg", 3)):
        image = views.views.open(number)
        width, height = image.size
        box = Box(width * 0.1, height * 0.2, width * 0.9, height)
        seen = np.asarray(image.view(box, (48, 40))).astype(int)
        with Image.open(path) as whole:
            best = whole.resize((48, 40), Image.Resampling.BICUBIC, box=box)
        assert np.abs(seen - np.asarray(best).astype(int)).mean() < 4


def test_odd_pictures_are_served_and_said(folder: Path) -> None:
    picture = draw("disc", 50)
    picture.convert("CMYK").save(folder / "disc" / "print.jpg")
    grey = np.asarray(picture.convert("L")).astype(np.uint16) * 257
    Image.fromarray(grey).save(folder / "disc" / "deep.png")
    clear = picture.convert("RGBA")
    clear.putalpha(picture.convert("L"))
    clear.save(folder / "ring" / "clear.webp", lossless=True)
    shutil.copy(folder / "disc" / "0000.jpg", folder / "ring" / "again.jpg")
    turned = Image.Exif()
    turned[0x0112] = 6
    picture.save(folder / "disc" / "turned.jpg", exif=turned)
    images = opened(folder, validation=0)
    text = "\n".join(images.lines)
    assert "1 picture of CMYK: converted to RGB of 8 bits (disc/print.jpg)" in text
    assert "1 picture of 16 bits: converted to RGB of 8 bits (disc/deep.png)" in text
    assert "1 picture transparent in places: laid on white (ring/clear.webp)" in text
    assert "1 picture in more than one class: disc/0000.jpg = ring/again.jpg" in text
    names = files_of(images.train)
    grey_row, turned_row = (
        images.train[np.array([names.index(f"disc/{name}")])]["pixels"][0]
        for name in ("deep.png", "turned.jpg")
    )
    assert (grey_row == grey_row[:, :, :1]).all()
    upright = picture.rotate(-90, expand=True)
    side = min(upright.size) * 0.875
    left, top = (upright.width - side) / 2, (upright.height - side) / 2
    best = upright.resize((24, 24), Image.Resampling.BICUBIC, (left, top, left + side, top + side))
    assert np.abs(turned_row.astype(int) - np.asarray(best).astype(int)).mean() < 12


def cut_short(root: Path) -> None:
    path = root / "disc" / "0000.jpg"
    path.write_bytes(path.read_bytes()[:-200])


def animate(root: Path) -> None:
    frames = [draw("disc", number).resize((30, 30)) for number in range(3)]
    frames[0].save(root / "disc" / "0000.gif", save_all=True, append_images=frames[1:])


def split(root: Path, held_out: str, name: str) -> None:
    shutil.copytree(root, root.parent / "kept")
    shutil.rmtree(root)
    shutil.move(root.parent / "kept", root / "train")
    make_folder(root / held_out, {name: 1})


def remove(root: Path, *names: str) -> None:
    for name in names:
        shutil.rmtree(root / name)


WRONG: dict[str, tuple[Callable[[Path], Any], str]] = {
    "truncated": (cut_short, r"disc/0000\.jpg can't be read: truncated"),
    "animated": (animate, r"disc/0000\.gif can't be read: 3 pictures in one file"),
    "no picture": (
        lambda root: (root / "disc" / "0000.jpg").write_text("hello"),
        r"no picture of a known format: it begins with 'hello'",
    ),
    "empty class": (
        lambda root: (root / "cross").mkdir(),
        r"class cross has no picture in .*cross \(it is empty\)",
    ),
    "class of other files": (
        lambda root: (root / "x").mkdir() or (root / "x" / "a.txt").write_text(""),
        r"class x has no picture in .* \(1 other file: a.txt\)",
    ),
    "one class": (lambda root: remove(root, "disc", "ring"), r"has one class, square"),
    "no class": (
        lambda root: remove(root, *COUNTS) or draw("disc", 1).save(root / "a.png"),
        r"has no folder that would be a class \(1 file: a.png\)",
    ),
    "empty": (lambda root: remove(root, *COUNTS), r"has no folder .* \(it is empty\)"),
    "other labels": (
        lambda root: split(root, "test", "rings"),
        r"/test has a class rings that the classes that are trained on lack: disc, ring, square",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_cant_be_trained_on_is_refused_with_its_file(folder: Path, case: str) -> None:
    spoil, words = WRONG[case]
    spoil(folder)
    with pytest.raises(UserError, match=words) as caught:
        opened(folder)
    assert caught.value.remedy
    if case == "other labels":
        assert caught.value.remedy == "did you mean ring?"
    if case in {"truncated", "animated", "no picture"}:
        images = opened(folder, broken="skip", validation=0)
        assert any("1 picture left out: disc/0000." in line for line in images.lines)
        assert len(images.train) == 18 - (case != "animated")


def test_a_file_that_changes_during_a_run_is_named(folder: Path) -> None:
    images = opened(folder, validation=0)
    draw("ring", 7).save(folder / "disc" / "0001.png")
    with pytest.raises(UserError, match=r"disc/0001\.png has changed since the run began"):
        images.train[np.array([1])]
