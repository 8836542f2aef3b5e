"""Captions: how they are read beside pictures, and what of them a sample is trained on."""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from picture_sets import data_of, noise, opened, pictures_of, quietly, refusal, write_folder

from samecurve.core.config.document import read_document
from samecurve.core.config.loading import load_document
from samecurve.tasks import Tasks
from samecurve_products.convert.tools import convert
from samecurve_products.pictures.diffusion.data.picture_set import open_pictures
from samecurve_products.pictures.diffusion.data.source import PixelRows
from samecurve_products.pictures.diffusion.data.views import Views
from samecurve_products.pictures.diffusion.sections import DiffusionData

RED = noise(16, 16, 1)


def read(home: Path, cache: Path, files: Mapping[str, bytes | str], **fields: Any) -> Any:
    """The captions of a.png beside these files."""
    folder = write_folder(home / "p", {"a.png": RED, **files})
    (picture,) = pictures_of(opened(folder, cache, **fields).train)
    return list(picture.captions)


def lines(*rows: Any) -> str:
    return "".join(f"{json.dumps(row)}\n" for row in rows)


def row(text: Any, name: str = "a.png", key: str = "text") -> dict[str, Any]:
    return {"file_name": name, key: text}


@pytest.mark.parametrize(
    ("files", "captions"),
    [
        ({"a.txt": "a red bird"}, ["a red bird"]),
        ({"a.txt": b"\xef\xbb\xbfa b\xc3\xa4r\r\n\r\n  a fish \r\n"}, ["a b\u00e4r", "a fish"]),
        ({"a.TXT": "one\rtwo"}, ["one", "two"]),
        ({"a.txt": "a\u2028b\x0cc"}, ["a\u2028b\x0cc"]),  # these end no line
        ({"metadata.jsonl": lines(row("one"))}, ["one"]),
        ({"metadata.jsonl": lines(row("one", key="caption"))}, ["one"]),
        ({"metadata.jsonl": "\ufeff\n" + lines(row(["one", "two"], key="prompt"))}, ["one", "two"]),
        ({"metadata.jsonl": lines(row("one\ntwo", "./a.png"))}, ["one", "two"]),
        ({"metadata.jsonl": lines(row("one")), "a.txt": "one\n"}, ["one"]),
        ({"metadata.jsonl": lines(row("half \ud83d"))}, ["half \ufffd"]),
    ],
)
def test_captions_beside_a_picture(
    files: Mapping[str, bytes | str], captions: Sequence[str], tmp_path: Path, cache: Path
) -> None:
    assert read(tmp_path, cache, files) == captions


@pytest.mark.parametrize("extension", ["", ".", "a/b", ".a.b", "a b"])
def test_an_extension_is_one_word(extension: str) -> None:
    with pytest.raises(ValueError, match="end of a file's name"):
        data_of("p", captions={"extension": extension})


def test_captions_of_pictures_in_folders_below(tmp_path: Path, cache: Path) -> None:
    """A metadata.jsonl names pictures below its own folder, also as Windows writes them."""
    folder = write_folder(
        tmp_path / "p",
        {
            "metadata.jsonl": lines(row("one", "x/a.png"), row("two", "x\\y\\b.png")),
            "x/a.png": noise(16, 16, 1),
            "x/y/b.png": noise(16, 16, 2),
            "z/metadata.jsonl": lines(row("three", "c.png")),
            "z/c.png": noise(16, 16, 3),
            "d.jpg": noise(16, 16, 4),
            "d.caption": "four",
        },
    )
    pictures = pictures_of(opened(folder, cache, captions={"extension": "caption"}).train)
    assert {picture.name: picture.captions for picture in pictures} == {
        "x/a.png": ("one",),
        "x/y/b.png": ("two",),
        "z/c.png": ("three",),
        "d.jpg": ("four",),
    }


@pytest.mark.parametrize(
    ("files", "cause", "where"),
    [
        ({"a.txt": b"a b\xe4r"}, "a.txt: the byte 0xe4 of line 1 is no UTF-8", "data.source"),
        ({"a.txt": "one".encode("utf-16")}, "the byte 0xff of line 1 is no UTF-8", "data.source"),
        ({"a.txt": " \r\n"}, "a.txt is blank", "data.captions.missing"),
        ({}, "there is no a.txt, and no metadata.jsonl", "data.captions.missing"),
        (
            {"metadata.jsonl": lines(row("one", "b.png"))},
            "there is no picture b.png beside metadata.jsonl",
            "metadata.jsonl:1",
        ),
        (
            {"metadata.jsonl": lines(row("one", "../p/a.png"))},
            "there is no picture ../p/a.png",
            "metadata.jsonl:1",
        ),
        (
            {"metadata.jsonl": lines(row("one"), row("two"))},
            "a.png has a caption in this line and in ",
            "metadata.jsonl:2",
        ),
        ({"metadata.jsonl": '{"file_name": "a.p\n'}, "not one JSON object", "metadata.jsonl:1"),
        ({"metadata.jsonl": lines(["a.png", "one"])}, "not one JSON object", "metadata.jsonl:1"),
        (
            {"metadata.jsonl": lines({"image": "a.png", "text": "one"})},
            "the line has no file_name; it has image, text",
            "metadata.jsonl:1",
        ),
        ({"metadata.jsonl": lines(row(3))}, '"text" is 3, and no text', "metadata.jsonl:1"),
        (
            {"metadata.jsonl": lines(row(None))},
            "there is no a.txt, and metadata.jsonl has none",
            "data.captions.missing",
        ),
        (
            {"metadata.jsonl": lines(row("one")), "a.txt": "two"},
            "a.png has one caption in a.txt and another in metadata.jsonl",
            "data.source",
        ),
    ],
)
def test_captions_that_can_t_be_read_are_refused_with_their_place(
    files: Mapping[str, bytes | str], cause: str, where: str, tmp_path: Path, cache: Path
) -> None:
    folder = write_folder(tmp_path / "p", {"a.png": RED, **files})
    error = refusal(folder, cache)
    assert cause in error.cause
    assert error.where.endswith(where)
    assert error.remedy


def test_missing_captions(tmp_path: Path, cache: Path) -> None:
    folder = write_folder(
        tmp_path / "p", {"a.png": RED, "sub/red bird.png": noise(16, 16, 2), "a.txt": "one"}
    )
    error = refusal(folder, cache)
    assert "(1 of 2 pictures of " in error.cause
    assert "sub/red bird.png has no caption: there is no red bird.txt" in error.cause
    for missing, caption in (("empty", ()), ("name", ("red bird",))):
        pictures = opened(folder, cache, captions={"missing": missing})
        captions = {p.name: p.captions for p in pictures_of(pictures.train)}
        assert captions == {"a.png": ("one",), "sub/red bird.png": caption}
        assert any("1 picture without a caption: " in line for line in pictures.lines)


KOHYA = """\
pretrained_model_name_or_path = "m"
train_data_dir = "pictures"
resolution = 64
"""


def test_a_picture_without_a_caption_has_its_kohya_folders_class_word(
    tmp_path: Path, cache: Path
) -> None:
    """As kohya trains it, where other pictures of the folder have captions. A file beside the
    picture wins, though it is blank.
    """
    folder = tmp_path / "pictures" / "10_bird"
    write_folder(folder, {f"{name}.png": noise(16, 16, n) for n, name in enumerate("abc", 1)})
    write_folder(folder, {"a.caption": "a blue bird", "b.caption": "\n"})
    file = tmp_path / "train.toml"
    file.write_text(KOHYA)
    converted = convert(read_document(file), tmp_path)
    assert converted is not None
    data = load_document(converted.document, Tasks()).config.data
    assert isinstance(data, DiffusionData)
    pictures = open_pictures(data, cache, say=quietly)
    assert {p.name: p.captions for p in pictures_of(pictures.train)} == {
        "a.png": ("a blue bird",),
        "b.png": (),
        "c.png": ("bird",),
    }
    assert any(
        "1 picture without a caption: trained without one (b.png)" in line
        for line in pictures.lines
    )
    assert any("10 times an epoch, caption bird" in line for line in pictures.lines)


def test_a_folders_caption_is_that_of_pictures_without_one(tmp_path: Path, cache: Path) -> None:
    """In each folder its own; a metadata.jsonl has captions too. A blank one is refused still."""
    one = write_folder(tmp_path / "one", {"a.png": RED, "b.png": noise(16, 16, 2), "a.txt": "one"})
    two = write_folder(
        tmp_path / "two",
        {
            "c.png": noise(16, 16, 3),
            "d.png": noise(16, 16, 4),
            "metadata.jsonl": lines(row("three", "c.png")),
        },
    )
    source = [{"source": str(one), "caption": "a bird"}, {"source": str(two), "caption": "fish"}]
    pictures = opened(source, cache)
    assert {p.name: p.captions for p in pictures_of(pictures.train)} == {
        "one/a.png": ("one",),
        "one/b.png": ("a bird",),
        "two/c.png": ("three",),
        "two/d.png": ("fish",),
    }
    write_folder(one, {"b.txt": " "})
    assert "b.txt is blank" in refusal(source, cache).cause


def test_two_pictures_that_share_a_caption_are_refused(tmp_path: Path, cache: Path) -> None:
    """Each line of a metadata.jsonl names one of them."""
    files = {"a.png": RED, "a.jpg": noise(16, 16, 2)}
    folder = write_folder(tmp_path / "p", {**files, "a.txt": "one"})
    assert "a.jpg and a.png share a.txt" in refusal(folder, cache).cause
    (folder / "a.txt").unlink()
    write_folder(folder, {"metadata.jsonl": lines(row("one"), row("two", "a.jpg"))})
    assert len(opened(folder, cache).train) == 2


def words(
    home: Path,
    cache: Path,
    caption: str,
    *,
    count: int = 40,
    variants: int | None = None,
    **captions: Any,
) -> Views:
    """The captions of pictures that all have the same words beside them."""
    files: dict[str, Any] = {}
    for number in range(count):
        files |= {f"{number}.png": noise(16, 16, number), f"{number}.txt": caption}
    data = data_of(write_folder(home / "p", files), captions=captions)
    samples = open_pictures(data, cache, say=quietly).train
    return Views(samples=samples, data=data, variants=variants)


IDS = np.arange(40)


def seen_in(views: Views) -> set[str]:
    """The captions of nine epochs."""
    ids = np.arange(len(views.samples))
    return {text for epoch in range(9) for text in views.captions(ids, epoch)}


def test_parts_behind_the_kept_ones_are_shuffled(tmp_path: Path, cache: Path) -> None:
    views = words(tmp_path, cache, "sks, a dog,red ,  sea, sand,", shuffle=True, keep=2)
    seen = Counter(text for epoch in range(9) for text in views.captions(IDS, epoch))
    assert all(text.startswith("sks, a dog, ") for text in seen)
    assert len(seen) == 6  # every order of three parts
    assert min(seen.values()) > 30
    assert all(sorted(text.split(", ")) == ["a dog", "red", "sand", "sea", "sks"] for text in seen)


def test_a_trigger_stands_before_every_caption_once(tmp_path: Path, cache: Path) -> None:
    for number, (caption, expected) in enumerate(
        {
            "a dog": {"sks, a dog"},
            "sks": {"sks"},
            "sks dog": {"sks dog"},
            "sksual": {"sks, sksual"},
            "dog, sks": {"sks, dog, sks"},
        }.items()
    ):
        views = words(tmp_path / str(number), cache, caption, count=4, trigger="sks")
        assert seen_in(views) == expected
    shuffled = words(tmp_path / "s", cache, "red, sks, sea", trigger="sks", shuffle=True, count=4)
    assert seen_in(shuffled) == {
        "sks, red, sea",
        "sks, sea, red",
    }
    empty = words(tmp_path / "e", cache, " ", trigger="sks", missing="empty", count=4)
    assert seen_in(empty) == {"sks"}


def test_another_separator(tmp_path: Path, cache: Path) -> None:
    views = words(
        tmp_path, cache, "one; two, three", separator=";", shuffle=True, trigger="t", count=4
    )
    assert seen_in(views) == {
        "t; one; two, three",
        "t; two, three; one",
    }


def test_one_of_several_lines_is_chosen_anew_in_each_epoch(tmp_path: Path, cache: Path) -> None:
    views = words(tmp_path, cache, "one\ntwo\nthree")
    by_epoch = [views.captions(IDS, epoch) for epoch in range(9)]
    assert min(Counter(np.ravel(by_epoch).tolist()).values()) > 90
    assert len({tuple(captions) for captions in by_epoch}) == 9


def test_captions_follow_from_seed_epoch_and_sample(tmp_path: Path, cache: Path) -> None:
    """Whatever else is asked for, in whatever order."""
    views = words(tmp_path, cache, "one, two, three\nfour, five, six", shuffle=True, dropout=0.4)
    captions, dropped = views.captions(IDS, 3), views.dropped(IDS, 3)
    turned = IDS[::-1].copy()
    assert views.captions(turned, 3) == captions[::-1]
    assert [views.captions(IDS[place : place + 1], 3)[0] for place in range(40)] == captions
    assert views.dropped(turned, 3).tolist() == dropped.tolist()[::-1]
    other = Views(samples=views.samples, data=views.data, seed=1)
    assert other.captions(IDS, 3) != captions
    assert other.dropped(IDS, 3).tolist() != dropped.tolist()
    assert views.captions(IDS, 4) != captions


def test_dropped_captions_are_empty_as_often_as_asked(tmp_path: Path, cache: Path) -> None:
    views = words(tmp_path, cache, "one, two", trigger="sks", dropout=0.25)
    rows = PixelRows(views.samples, views.data)
    drops = np.array([views.dropped(IDS, epoch) for epoch in range(100)])
    assert 0.22 < drops.mean() < 0.28
    for epoch in (0, 7):
        expected = ["" if drop else "sks, one, two" for drop in drops[epoch]]
        assert rows.captions(IDS, epoch) == expected


def test_variants_are_counted_and_come_round(tmp_path: Path, cache: Path) -> None:
    """An encoder is given every caption that a sample has in any epoch, and no more."""
    options: dict[str, Any] = {"shuffle": True, "dropout": 0.5}
    views = words(tmp_path, cache, "1, 2, 3, 4, 5", variants=3, **options)
    by_epoch = [views.captions(IDS, epoch) for epoch in range(9)]
    assert by_epoch[:3] == by_epoch[3:6] == by_epoch[6:]
    assert len({tuple(captions) for captions in by_epoch}) == 3
    drops = {tuple(views.dropped(IDS, epoch).tolist()) for epoch in range(9)}
    assert len(drops) == 9  # a drop is no variant
    known = views.all_captions()
    assert set(known) == {text for captions in by_epoch for text in captions} | {""}
    assert len(set(known)) == len(known)


def test_held_out_captions_are_as_they_stand(tmp_path: Path, cache: Path) -> None:
    views = words(tmp_path, cache, "b, a, c\nd", shuffle=True, dropout=0.9, trigger="sks")
    held = Views(samples=views.samples, data=views.data, augmented=False)
    for epoch in range(3):
        assert set(held.captions(IDS, epoch)) == {"sks, b, a, c"}
        assert not held.dropped(IDS, epoch).any()
    assert held.all_captions() == ["sks, b, a, c"]
