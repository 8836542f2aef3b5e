"""Folders of pictures as samples: found, split, sorted into buckets, and told to the user."""

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from picture_sets import (
    buckets_of,
    captioned,
    data_of,
    encoded,
    mixed,
    noise,
    opened,
    pictures_of,
    refusal,
    write_folder,
)
from PIL import Image

from samecurve_products.pictures.diffusion.data.about import about_pictures
from samecurve_products.pictures.diffusion.data.picture_set import (
    PictureSet,
    open_pictures,
    stamp_pictures,
)
from samecurve_products.pictures.files.held_out import held_out


def test_no_picture_is_dropped_or_repeated(tmp_path: Path, cache: Path) -> None:
    """Ids of a bucket are neighbours, and each picture is read as often as its folder says."""
    one, two = mixed(tmp_path / "one"), captioned(tmp_path / "two", 5, first=50)
    pictures = opened(
        [str(one), {"source": str(two), "repeats": 3, "weight": 0.5, "trigger": "sks"}], cache
    )
    train = pictures.train
    assert len(train) == 14 + 3 * 5 == sum(train.bucket_sizes)
    read = [train.picture(sample) for sample in range(len(train))]
    counts = {picture.name: 0 for picture, _ in read}
    for picture, _ in read:
        counts[picture.name] += 1
    assert counts == {
        **{f"one/{n:02d}.png": 1 for n in range(14)},
        **{f"two/05{n}.png": 3 for n in range(5)},
    }
    for ids, shape in zip(buckets_of(train), train.bucket_shapes, strict=True):
        assert {train.picture(sample)[1] for sample in ids.tolist()} == {shape}
        assert train.shape(ids) == shape
    with pytest.raises(ValueError, match="several buckets"):
        train.shape(np.arange(len(train)))
    weights = dict(
        zip((picture.name for picture, _ in read), train.weights(np.arange(29)), strict=True)
    )
    assert (weights["one/00.png"], weights["two/050.png"]) == (1.0, 0.5)
    triggers = {picture.name: picture.trigger for picture, _ in read}
    assert (triggers["one/00.png"], triggers["two/050.png"]) == ("", "sks")
    assert any(
        line.endswith("two: 5 pictures, 3 times an epoch, weight 0.5, trigger sks")
        for line in pictures.lines
    )


def test_the_order_is_that_of_names_whatever_the_file_system(tmp_path: Path, cache: Path) -> None:
    """Hidden files, masks, and runs within the folder are no pictures."""
    names = ["b.png", "B.PNG", "a/z.jpg", "a.b.png", "\u00e4.png", "10.png", "9.png"]
    files: dict[str, Any] = {name: noise(16, 16, n) for n, name in enumerate(names)}
    others = [".x.png", ".git/y.png", "b-masklabel.png", "run/samples/s.png"]
    files |= {name: noise(16, 16) for name in others}
    folder = write_folder(tmp_path / "p", {**files, "run/plan.json": "{}", "notes.md": "x"})
    (folder / "run/checkpoints").mkdir()
    (folder / "loop").symlink_to(folder)
    pictures = opened(folder, cache, captions={"missing": "name"})
    listed = [picture.name for picture in pictures_of(pictures.train)]
    assert listed == ["10.png", "9.png", "B.PNG", "a/z.jpg", "a.b.png", "b.png", "\u00e4.png"]
    about = about_pictures(pictures, data_of(folder))
    assert any("2 files not read: b-masklabel.png, notes.md" in line for line in about.lines)


def test_a_link_to_a_folder_is_followed(tmp_path: Path, cache: Path) -> None:
    captioned(tmp_path / "far", 3)
    folder = captioned(tmp_path / "p", 2, first=10)
    (folder / "near").symlink_to(tmp_path / "far")
    assert len(opened(folder, cache).train) == 5


def held_names(pictures: PictureSet) -> set[str]:
    return {picture.sha256 for picture in pictures_of(pictures.held_out)}


def test_another_picture_moves_none_across_the_split(tmp_path: Path, cache: Path) -> None:
    """Nor does another name, another order, or another picture less."""
    folder = captioned(tmp_path / "p", 60, (4, 4))
    before = opened(folder, cache, validation=0.2)
    held = held_names(before)
    assert 4 <= len(held) <= 24
    captioned(folder, 60, (4, 4), first=60)
    (folder / "000.png").rename(folder / "zzz.png")
    (folder / "000.txt").rename(folder / "zzz.txt")
    after = opened(folder, cache, validation=0.2)
    trained = {picture.sha256 for picture in pictures_of(after.train)}
    assert held <= held_names(after)
    assert {p.sha256 for p in pictures_of(before.train)} <= trained
    assert not trained & held_names(after)
    assert len(trained) + len(held_names(after)) == 120


def test_the_share_that_is_held_out() -> None:
    contents = {f"{number:064x}" for number in range(4000)}
    assert abs(len(held_out(contents, 0.05)) - 200) < 45
    assert held_out(contents, 0.05) < held_out(contents, 0.2)
    assert held_out(contents, 0.0) == set()
    for count in range(1, 60):
        few = {f"{number:064x}" for number in range(count)}
        held = held_out(few, 0.05)
        assert bool(held) == (count >= 20)
        for share in (0.5, 0.999):
            assert bool(held_out(few, share)) == (count * share >= 1)
            assert len(held_out(few, share)) < count


def test_equal_pictures_are_on_one_side(tmp_path: Path, cache: Path) -> None:
    """In whatever folder; repeats are of training alone."""
    one = captioned(tmp_path / "one", 40, (4, 4))
    two = captioned(tmp_path / "two", 40, (4, 4))
    pictures = opened([str(one), {"source": str(two), "repeats": 4}], cache, validation=0.3)
    assert pictures.held_out is not None
    held = [picture.sha256 for picture in pictures_of(pictures.held_out)]
    assert len(pictures.held_out) == len(held) == 2 * len(set(held))
    assert not set(held) & {picture.sha256 for picture in pictures_of(pictures.train)}
    assert len(pictures.train) == 5 * (40 - len(set(held)))
    assert any("40 pictures equal to another one" in line for line in pictures.lines)


def nothing(home: Path) -> Path:
    return home / "nothing"


def only_texts(home: Path) -> Path:
    return write_folder(home / "texts", {"a.txt": "a", "b.md": "b"})


def a_file(home: Path) -> Path:
    return write_folder(home, {"set.zip": "PK"}) / "set.zip"


@pytest.mark.parametrize(
    ("make", "cause"),
    [
        (nothing, "nothing does not exist, where a folder of pictures is needed"),
        (only_texts, r"texts holds no picture \(2 other files: a.txt, b.md\)"),
        (a_file, r"set.zip is a file, where a folder of pictures is needed"),
    ],
)
def test_a_source_without_pictures_is_refused(
    make: Callable[[Path], Path], cause: str, tmp_path: Path, cache: Path
) -> None:
    source = make(tmp_path)
    error = refusal(source, cache)
    assert re.search(cause, error.cause)
    assert error.where == "data.source"
    with pytest.raises(type(error), match=cause):
        stamp_pictures(data_of(source))


def test_small_pictures_are_refused_where_none_is_enlarged(tmp_path: Path, cache: Path) -> None:
    folder = captioned(tmp_path / "p", 3, (15, 16))
    captioned(folder, 2, (16, 16), first=10)
    error = refusal(folder, cache, enlarge=False)
    assert error.where == "data.enlarge"
    assert "000.png has 15x16 pixels for a bucket of 16x16 and 2 more" in error.cause
    assert any(
        "3 pictures smaller than the bucket: enlarged" in line
        for line in opened(folder, cache).lines
    )


def test_what_is_cut_off_or_laid_on_white_is_said(tmp_path: Path, cache: Path) -> None:
    clear = Image.new("RGBA", (16, 16), (1, 2, 3, 9))
    files: dict[str, Any] = {"long.png": noise(90, 16), "clear.png": clear}
    files |= {"print.jpg": encoded(noise(16, 16).convert("CMYK"), "JPEG")}
    files |= {"deep.png": encoded(Image.new("I;16", (16, 16), 900))}
    captions = {f"{Path(name).stem}.txt": "a" for name in files}
    folder = write_folder(tmp_path / "p", {**files, **captions})
    lines = opened(folder, cache).lines
    for line in ("of CMYK: converted to RGB of 8 bits (print.jpg)", "of 16 bits: converted to"):
        assert any(line in each for each in lines)
    assert any("less than 75% is left: the rest is cut off (long.png)" in line for line in lines)
    assert any("transparent in places: laid on white (clear.png)" in line for line in lines)


def test_what_is_no_file_is_refused_and_not_waited_for(tmp_path: Path, cache: Path) -> None:
    for name in ("000.png", "000.txt"):
        folder = captioned(tmp_path / name / "p", 3)
        (folder / name).unlink()
        os.mkfifo(folder / name)
        assert f"{name} is a pipe, a socket or a device" in refusal(folder, cache).cause


def test_a_stamp_changes_with_any_file(tmp_path: Path) -> None:
    folder = captioned(tmp_path / "p", 3)
    stamps = [stamp_pictures(data_of(folder))]
    for change in (
        lambda: (folder / "001.txt").write_text("longer than it was"),
        lambda: noise(9, 9).save(folder / "002.png"),
        lambda: write_folder(folder, {"x.png": noise(9, 9)}),
        lambda: write_folder(folder, {"metadata.jsonl": ""}),
        (folder / "x.png").unlink,
    ):
        change()
        stamps.append(stamp_pictures(data_of(folder)))
    assert len({str(stamp) for stamp in stamps}) == 6


def test_the_facts_of_a_folder_for_a_reader(tmp_path: Path, cache: Path) -> None:
    folder = mixed(tmp_path / "p")
    write_folder(folder, {"x.png": b"", "y.png": b"", "x.txt": "x", "y.txt": "y"})
    data = data_of([{"source": str(folder), "repeats": 2}], broken="skip")
    pictures = open_pictures(data, cache)
    about = about_pictures(pictures, data, variants=2)
    assert [(each.name, each.pictures, each.samples) for each in about.buckets] == [
        ("12x20", 6, 12),
        ("16x16", 4, 8),
        ("20x12", 4, 8),
    ]
    assert about.left_out is not None
    (left_out,) = about.left_out
    assert (left_out.reason, left_out.rows) == ("can't be read: empty: 0 bytes", 2)
    assert left_out.places == ["x.png", "y.png"]
    beside = about.beside_rows["train"](np.array([12, 13]))
    assert list(beside["caption"]) == ["number 0", "number 0"]
    assert about.sources["train"][np.array([12, 13])]["pixels"].shape == (2, 3, 16, 16)
    assert "captions: 14, of which 14 are different; 2 to 2 words, 2 in the middle" in about.lines
