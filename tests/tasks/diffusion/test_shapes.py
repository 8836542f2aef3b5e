"""Drawn shapes: the same bytes for the same options, captions that tell what is drawn."""

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from benchmarks.recognise_shapes import NOTHING, recognise, score
from click.testing import CliRunner
from picture_sets import data_of, opened, pictures_of, quietly
from PIL import Image

from commands import refused
from samecurve.cli.main import cli
from samecurve_products.pictures.diffusion.data import shapes
from samecurve_products.pictures.diffusion.data.picture_set import open_pictures, stamp_pictures
from samecurve_products.pictures.diffusion.data.shapes import (
    COLOURS,
    SHAPES,
    draw_shape,
    write_shapes,
)
from samecurve_products.pictures.diffusion.sections import DiffusionData

KINDS = [f"a {colour} {shape}" for colour in COLOURS for shape in SHAPES]


def content(home: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in home.iterdir()}


def test_the_same_options_give_the_same_bytes(tmp_path: Path) -> None:
    """Whatever was drawn before; another seed draws others, a longer set begins alike."""
    first, again, other, longer = (tmp_path / name for name in "abcd")
    write_shapes(first, count=24, size=16)
    (again).mkdir()
    write_shapes(again, count=24, size=16)
    write_shapes(other, count=24, size=16, seed=1)
    write_shapes(longer, count=36, size=16)
    assert content(first) == content(again)
    assert sorted(content(first)) == sorted(
        f"{number:02d}.{suffix}" for number in range(24) for suffix in ("png", "txt")
    )
    names = [f"{number:02d}.png" for number in range(24)]
    assert all(content(first)[name] != content(other)[name] for name in names)
    assert all(content(first)[name] == content(longer)[name] for name in names)
    assert len(set(content(first).values())) == 24 + len(KINDS)


def test_every_kind_is_drawn_equally_often() -> None:
    captions = Counter(draw_shape(number, 16)[1] for number in range(60))
    assert captions == dict.fromkeys(KINDS, 5)


@pytest.mark.parametrize(("size", "noise"), [(32, 0), (32, 30), (64, 15)])
def test_what_a_caption_says_is_what_can_be_seen(size: int, noise: int) -> None:
    """By a measure that does not know how shapes are drawn; also through noise."""
    random = np.random.default_rng(0)
    pictures, captions = [], []
    for number in range(120):
        image, caption = draw_shape(number, size, 3)
        pixels = np.asarray(image) + noise * random.standard_normal((size, size, 3))
        pictures.append(pixels.clip(0, 255).round().astype(np.uint8))
        captions.append(caption)
    colours, forms = score(pictures, captions)
    assert colours >= 0.99
    assert forms >= 0.98
    wrong = captions[1:] + captions[:1]  # the measure can tell what is wrong
    assert score(pictures, wrong)[1] < 0.05


def test_nothing_is_recognised_where_there_is_nothing() -> None:
    plain = np.full((32, 32, 3), 200, np.uint8)
    noisy = np.random.default_rng(0).integers(180, 220, (32, 32, 3)).astype(np.uint8)
    assert recognise(plain) == recognise(noisy) == (NOTHING, NOTHING)


def test_shapes_lie_within_their_picture() -> None:
    """On one ground, of one grey, all around."""
    for number in range(40):
        pixels = np.asarray(draw_shape(number, 32)[0]).astype(int)
        border = np.concatenate([pixels[0], pixels[-1], pixels[:, 0], pixels[:, -1]])
        grey = np.median(border)
        assert (abs(border - grey).max(1) <= 2).mean() > 0.75
        assert grey < 70 or grey > 200


def test_a_set_is_drawn_once_where_no_folder_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shapes, "COUNT", 48)
    data = data_of(None, resolution=32, bucket_step=8, validation=0.05)
    assert isinstance(data, DiffusionData)
    pictures = open_pictures(data, tmp_path, say=quietly)
    assert {text for each in pictures_of(pictures.train) for text in each.captions} == set(KINDS)
    assert pictures.lines[0] == "no data.source: drawn shapes, made once in the cache"
    monkeypatch.setattr(shapes, "draw_shape", None)
    again = open_pictures(data, tmp_path, say=quietly)
    assert again.train.fingerprint() == pictures.train.fingerprint()
    assert stamp_pictures(data) == ["shapes", shapes.VERSION]


def test_the_verb_draws_a_set_that_can_be_trained_on(
    tmp_path: Path,
    cache: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["data", "shapes", "my set", "--count", "12", "--size", "40", "--seed", "5"]
    shown = CliRunner().invoke(cli, words)
    assert shown.exit_code == 0
    assert "12 of 40 x 40 pixels, each with its caption beside it" in shown.output
    assert "wrote  my set; --set data.source='my set' trains on it" in shown.output
    pictures = pictures_of(opened(tmp_path / "my set", cache).train)
    assert [picture.captions for picture in pictures] == [
        (draw_shape(number, 40, 5)[1],) for number in range(12)
    ]
    drawn = np.asarray(Image.open(tmp_path / "my set" / "07.png"))
    np.testing.assert_array_equal(drawn, np.asarray(draw_shape(7, 40, 5)[0]))
    before = content(tmp_path / "my set")
    error = refused(monkeypatch, capsys, "data", "shapes", "my set", cwd=tmp_path)
    assert "my set is there already, and is not empty" in error
    assert content(tmp_path / "my set") == before
