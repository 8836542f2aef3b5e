"""Pictures in a folder for each class: their splits, their pixels, and what is refused."""

import io
import shutil
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from class_pictures import draw, make_folder
from PIL import Image

from samecurve.errors import UserError
from samecurve_products.pictures.vision.data.folder_images import (
    FolderViews,
    read_folder,
    stamp_folder,
)
from samecurve_products.pictures.vision.data.image_sets import ImageSets
from samecurve_products.pictures.vision.data.shard_images import read_shards
from samecurve_products.pictures.vision.data.views import Box, MiddleRows, OpenImage
from samecurve_products.pictures.vision.sections import VisionData

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
        assert isinstance(image, OpenImage)
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


def text_class(folder: Path) -> None:
    folder.mkdir()
    (folder / "a.txt").write_text("")


def loose_picture(root: Path) -> None:
    remove(root, *COUNTS)
    draw("disc", 1).save(root / "a.png")


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
        lambda root: text_class(root / "x"),
        r"class x has no picture in .* \(1 other file: a.txt\)",
    ),
    "one class": (lambda root: remove(root, "disc", "ring"), r"has one class, square"),
    "no class": (
        loose_picture,
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


def write_tar(file: Path, rows: list[tuple[str, bytes, str]]) -> None:
    with tarfile.open(file, "w") as archive:
        for key, content, label in rows:
            for name, part in ((f"{key}.jpg", content), (f"{key}.cls", label.encode())):
                member = tarfile.TarInfo(name)
                member.size = len(part)
                archive.addfile(member, io.BytesIO(part))


def jpeg(name: str, number: int) -> bytes:
    file = io.BytesIO()
    draw(name, number).save(file, "JPEG")
    return file.getvalue()


def test_shards_give_the_same_pixels_as_files(tmp_path: Path) -> None:
    """Tar in two shards, and Hugging Face's parquet, beside a folder with the same files."""
    import pyarrow
    from pyarrow import parquet

    names = ["disc", "ring", "square"] * 5
    rows = [(f"{n:04}", jpeg(name, n), name) for n, name in enumerate(names)]
    write_tar(tmp_path / "a-0.tar", rows[:8])
    write_tar(tmp_path / "a-1.tar", rows[8:])
    table = {
        "image": [{"bytes": content, "path": None} for _, content, _ in rows],
        "label": [sorted(set(names)).index(name) for *_, name in rows],
    }
    parquet.write_table(pyarrow.table(table), tmp_path / "b.parquet")
    for key, content, name in rows:
        (tmp_path / "set" / name).mkdir(parents=True, exist_ok=True)
        (tmp_path / "set" / name / f"{key}.jpg").write_bytes(content)
    folder = opened(tmp_path / "set", validation=0).train
    order = [path.stem for path in sorted((tmp_path / "set").rglob("*.jpg"))]
    expected = folder[np.argsort(order)]
    for source in ("a-*.tar", "b.parquet"):
        data = VisionData(source=str(tmp_path / source), resolution=24, validation=0)
        images = read_shards(data, tmp_path / "cache", say=lambda _: None)
        found = images.train[np.arange(len(rows))]
        np.testing.assert_array_equal(found["pixels"], expected["pixels"])
        np.testing.assert_array_equal(found["labels"], expected["labels"])
        split = data.model_copy(update={"validation": 0.2})
        images = read_shards(split, tmp_path / "cache", say=lambda _: None)
        assert images.validation is not None
        assert (len(images.train), len(images.validation)) == (12, 3)
    assert images.classes == ["0", "1", "2"]


def test_shards_that_cant_be_trained_on_are_refused(tmp_path: Path) -> None:
    def opened_shards(*rows: tuple[str, bytes, str]) -> ImageSets:
        write_tar(tmp_path / "x.tar", list(rows))
        data = VisionData(source=str(tmp_path / "x.tar"), resolution=24, validation=0)
        return read_shards(data, tmp_path / "cache", say=lambda _: None)

    whole = jpeg("disc", 0)
    images = opened_shards(("a", whole, "0"), ("b", whole[:-200], "1"), ("c", b"no", "1"))
    with pytest.raises(UserError, match=r"row 1 \(b\) of the shards can't be read .* truncated"):
        images.train[np.array([1])]
    with pytest.raises(UserError, match=r"row 2 \(c\) .* begins with 'no'"):
        images.train[np.array([0, 2])]
    with pytest.raises(UserError, match="row 1 has class -3"):
        opened_shards(("a", whole, "0"), ("b", whole, "-3"))
