"""Pixels of a sample: they follow from the picture, the epoch and the seed alone."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from picture_sets import (
    buckets_of,
    captioned,
    data_of,
    mixed,
    noise,
    opened,
    pictures_of,
    refusal,
    write_folder,
)
from PIL import Image

from samecurve_products.pictures.diffusion.data.picture_set import (
    PictureSet,
    open_pictures,
)
from samecurve_products.pictures.diffusion.data.pictures import (
    encoding_key,
    read_mask,
    read_pixels,
    sizes_of,
)
from samecurve_products.pictures.diffusion.data.source import PixelRows
from samecurve_products.pictures.diffusion.data.views import Views


def rows_of(pictures: PictureSet, data: Any, epoch: int = 0) -> dict[int, bytes]:
    """The pixels of all training samples, by id."""
    source = PixelRows(pictures.train, data)
    found: dict[int, bytes] = {}
    for ids in buckets_of(pictures.train):
        pixels = source.__getitem__(ids, epoch)["pixels"]
        assert pixels.dtype == np.uint8
        found |= dict(zip(ids.tolist(), [row.tobytes() for row in pixels], strict=True))
    return found


AUGMENTED = {"crop": "random", "flip": 0.5}


def test_pixels_follow_from_the_sample_and_the_epoch_alone(tmp_path: Path, cache: Path) -> None:
    """The same bits alone, among others, in another order, from another folder."""
    folder = mixed(tmp_path / "p")
    data = data_of(folder, **AUGMENTED)
    pictures = open_pictures(data, cache)
    rows = [rows_of(pictures, data, epoch) for epoch in range(3)]
    assert rows[0] != rows[1] != rows[2]
    source = PixelRows(pictures.train, data)
    for ids in buckets_of(pictures.train):
        for turned in (ids[::-1].copy(), ids[:1]):
            pixels = source.__getitem__(turned, 1)["pixels"]
            assert [row.tobytes() for row in pixels] == [rows[1][n] for n in turned.tolist()]
    moved = folder.rename(tmp_path / "elsewhere")
    elsewhere = data_of(moved, **AUGMENTED)
    assert rows_of(open_pictures(elsewhere, cache), elsewhere, 1) == rows[1]
    assert open_pictures(elsewhere, cache).train.fingerprint() == pictures.train.fingerprint()


READ = """
import sys
from pathlib import Path
import numpy as np
from samecurve_products.pictures.diffusion.data.picture_set import open_pictures
from samecurve_products.pictures.diffusion.data.source import PixelRows
from samecurve_products.pictures.diffusion.sections import DiffusionData

data = DiffusionData.model_validate_json(sys.argv[2])
train = open_pictures(data, Path(sys.argv[1])).train
rows = PixelRows(train, data)
for number in range(len(train)):
    print(rows.__getitem__(np.array([number]), int(sys.argv[3]))["pixels"].tobytes().hex())
assert not {"torch", "diffusers"} & set(sys.modules)
"""


def test_another_process_reads_the_same_bits(tmp_path: Path, cache: Path) -> None:
    data = data_of(mixed(tmp_path / "p", 7), **AUGMENTED)
    here = rows_of(open_pictures(data, cache), data, 2)
    arguments = [str(tmp_path / "another cache"), data.model_dump_json(), "2"]
    there = subprocess.run(
        [sys.executable, "-c", READ, *arguments], capture_output=True, check=True, text=True
    )
    assert there.stdout.split() == [here[number].hex() for number in range(7)]


def test_a_picture_more_changes_no_other_s_pixels(tmp_path: Path, cache: Path) -> None:
    """Ids are places and move; what is drawn for a picture follows from its content."""
    data = data_of(mixed(tmp_path / "p", 7), **AUGMENTED)
    before = open_pictures(data, cache)
    write_folder(tmp_path / "p", {"000.png": noise(16, 16, 99), "000.txt": "first"})
    after = open_pictures(data, cache)
    names = [
        {name: rows[n] for n, name in enumerate(p.name for p in pictures_of(pictures.train))}
        for pictures, rows in ((before, rows_of(before, data, 1)), (after, rows_of(after, data, 1)))
    ]
    assert names[0].items() <= names[1].items()
    assert len(names[1]) == 8


def test_each_reading_of_an_epoch_has_its_own_cut(tmp_path: Path, cache: Path) -> None:
    folder = write_folder(tmp_path / "p", {"a.png": noise(64, 16), "a.txt": "a"})
    data = data_of([{"source": str(folder), "repeats": 6}], crop="random", longest=1.0)
    samples = open_pictures(data, cache).train
    assert len(samples) == 6
    views = Views(samples=samples, data=data)
    cuts = [cut for epoch in (0, 1) for cut in views.cuts(np.arange(6), epoch)]
    assert len({cut.left for cut in cuts}) > 7
    kept = Views(samples=samples, data=data, variants=4)
    numbers = [kept.variants_of(np.arange(6), epoch).tolist() for epoch in (0, 1)]
    assert numbers == [[0, 1, 2, 3, 0, 1], [2, 3, 0, 1, 2, 3]]
    encodings = kept.encodings()
    assert len(encodings) == 4
    keys = {each.key for each in encodings}
    assert {kept.encoding_of(n, epoch).key for n in range(6) for epoch in range(4)} == keys
    held = Views(samples=samples, data=data, augmented=False)
    assert len(held.encodings()) == 1


def gradient(width: int, height: int) -> Image.Image:
    """Red grows to the right and green downwards, one a pixel."""
    y, x = np.mgrid[:height, :width]
    return Image.fromarray(np.stack([x, y, np.zeros_like(x)], 2).astype(np.uint8))


def test_a_cut_shows_the_part_that_it_names(tmp_path: Path, cache: Path) -> None:
    """The corner and the size that a model may be told are those of the pixels."""
    folder = write_folder(tmp_path / "p", {"a.png": gradient(48, 16), "a.txt": "a"})
    data = data_of(folder, crop="random", flip=0.5, longest=1.0)
    samples = open_pictures(data, cache).train
    views = Views(samples=samples, data=data)
    picture, _ = samples.picture(0)
    seen = set()
    for epoch in range(60):
        (cut,) = views.cuts(np.array([0]), epoch)
        pixels = read_pixels(picture, cut)
        across = np.arange(cut.left, cut.left + 16)
        np.testing.assert_array_equal(pixels[0, 0], 47 - across if cut.mirrored else across)
        np.testing.assert_array_equal(pixels[1, :, 0], np.arange(16))
        assert sizes_of(picture, cut) == {
            "original": (16, 48),
            "corner": (0, cut.left),
            "size": (16, 16),
        }
        seen.add((cut.left, cut.mirrored))
    assert {mirrored for _, mirrored in seen} == {False, True}
    assert min(left for left, _ in seen) <= 2
    assert max(left for left, _ in seen) >= 30
    (middle,) = Views(samples=samples, data=data, augmented=False).cuts(np.array([0]), 5)
    assert (middle.left, middle.top, middle.mirrored) == (16, 0, False)


def test_keys_of_encodings_tell_pixels_apart(tmp_path: Path, cache: Path) -> None:
    data = data_of(mixed(tmp_path / "p", 7), **AUGMENTED)
    samples = open_pictures(data, cache).train
    by_key: dict[str, bytes] = {}
    for epoch in range(12):
        for number in range(len(samples)):
            each = Views(samples=samples, data=data).encoding_of(number, epoch)
            pixels = read_pixels(each.picture, each.cut)
            assert by_key.setdefault(each.key, pixels.tobytes()) == pixels.tobytes()
            assert each.key == encoding_key(each.picture, each.cut)
    assert len(set(by_key.values())) == len(by_key) > 30


def test_enlarged_reduced_and_turned_pictures_cover_their_bucket(
    tmp_path: Path, cache: Path
) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # held upright, stored lying
    folder = write_folder(tmp_path / "p", {"a.png": noise(5, 7), "b.png": noise(300, 199)})
    noise(60, 30).save(folder / "c.jpg", exif=exif)
    data = data_of(folder, captions={"missing": "empty"})
    pictures = open_pictures(data, cache)
    shapes = {picture.name: shape for picture, shape in pictures.train.pictures}
    assert shapes == {"a.png": (12, 20), "b.png": (20, 12), "c.jpg": (12, 20)}
    assert set(map(len, rows_of(pictures, data).values())) == {12 * 20 * 3}


def masked(home: Path, mask: Image.Image | bytes) -> Path:
    files: dict[str, Any] = {"a.png": gradient(48, 16), "b.png": noise(16, 16)}
    return write_folder(home, {**files, "a-masklabel.png": mask, "a.txt": "a", "b.txt": "b"})


def test_masks_follow_their_pictures(tmp_path: Path, cache: Path) -> None:
    half = Image.fromarray(
        np.where(np.arange(48) < 20, 255, 0)[None].repeat(16, 0).astype(np.uint8)
    )
    data = data_of(
        masked(tmp_path / "p", half), masks=True, unmasked_weight=0.25, longest=1.0, **AUGMENTED
    )
    pictures = open_pictures(data, cache)
    assert "1 of 2 pictures have no mask: all of each counts" in pictures.lines
    samples, views = pictures.train, Views(samples=pictures.train, data=data)
    source = PixelRows(samples, data)
    for epoch in range(20):
        ids = np.arange(2)
        masks, pixels = (source.__getitem__(ids, epoch)[name] for name in ("mask", "pixels"))
        assert masks.dtype == np.float32
        assert (masks[1] == 1).all()
        expected = np.where(pixels[0, 0] < 20, 1.0, 0.25)
        np.testing.assert_array_equal(masks[0], expected)
        (cut,) = views.cuts(ids[:1], epoch)
        np.testing.assert_array_equal(read_mask(samples.picture(0)[0], cut, 0.25), masks[0])
    assert "mask" not in PixelRows(samples, data_of(tmp_path / "p"))[ids]


def test_masks_that_do_not_fit_are_refused(tmp_path: Path, cache: Path) -> None:
    other = masked(tmp_path / "other", noise(16, 16))
    assert (
        refusal(other, cache, masks=True).cause
        == "a-masklabel.png has 16 x 16 pixels, and a.png 48 x 16"
    )
    assert len(opened(other, cache).train) == 2  # a mask is no picture
    black = masked(tmp_path / "black", Image.new("L", (48, 16)))
    assert "black everywhere" in refusal(black, cache, masks=True).cause
    assert len(opened(black, cache, masks=True, unmasked_weight=0.1).train) == 2
    broken = masked(tmp_path / "broken", b"\x89PNG")
    error = refusal(broken, cache, masks=True)
    assert "a.png can't be read: its mask a-masklabel.png: no picture" in error.cause
    assert len(opened(broken, cache, masks=True, broken="skip").train) == 1
    shared = masked(tmp_path / "shared", Image.new("L", (48, 16), 255))
    write_folder(shared, {"a.jpg": noise(48, 16)})
    options = {"captions": {"extension": ".none", "missing": "empty"}}
    assert "share a-masklabel.png" in refusal(shared, cache, masks=True, **options).cause


def test_a_file_that_changes_while_the_run_goes_is_refused(tmp_path: Path, cache: Path) -> None:
    """One that is only touched is not."""
    folder = captioned(tmp_path / "p", 3)
    data = data_of(folder)
    pictures = open_pictures(data, cache)
    first = rows_of(pictures, data)
    (folder / "001.png").touch()
    assert rows_of(pictures, data) == first
    noise(16, 16, 9).save(folder / "001.png")
    with pytest.raises(Exception, match=r"001.png has changed since the run began"):
        rows_of(pictures, data)
    (folder / "001.png").unlink()
    with pytest.raises(Exception, match=r"001.png is missing"):
        rows_of(pictures, data)
