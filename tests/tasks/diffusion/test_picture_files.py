"""What becomes of each kind of picture file, and how a broken one is named."""

import io
import json
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from picture_sets import encoded, noise, opened, refusal, rgb, write_folder
from PIL import Image
from PIL.Image import Transpose

from samecurve_products.pictures.files import scan_cache
from samecurve_products.pictures.files.picture_files import (
    BrokenPictureError,
    FileFacts,
    decode,
    decode_mask,
    inspect_file,
    only_errors,
)

STEPS = [noise(8, 8, number) for number in range(3)]


def png(width: int, height: int, bits: int, colour: int, rows: bytes) -> bytes:
    """A PNG written byte by byte."""

    def chunk(name: bytes, content: bytes) -> bytes:
        checksum = struct.pack(">I", zlib.crc32(name + content))
        return struct.pack(">I", len(content)) + name + content + checksum

    header = struct.pack(">IIBBBBB", width, height, bits, colour, 0, 0, 0)
    parts = (chunk(b"IHDR", header), chunk(b"IDAT", zlib.compress(rows)), chunk(b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


def png_of_16_bits(values: list[list[int]]) -> bytes:
    rows = b"".join(b"\0" + struct.pack(f">{len(row)}H", *row) for row in values)
    return png(len(values[0]), len(values), 16, 0, rows)


def shown(content: bytes) -> NDArray[np.uint8]:
    with only_errors():
        facts = inspect_file(content)
        image = decode(content, facts.orientation)
    assert (image.mode, image.size) == ("RGB", (facts.width, facts.height))
    return np.asarray(image)


def with_palette(colours: list[tuple[int, int, int]]) -> Image.Image:
    """Four pixels in a row with the numbers 0, 1, 2, 1 of these colours."""
    image = Image.new("P", (4, 1))
    image.putpalette([value for colour in colours for value in colour])
    image.putdata([0, 1, 2, 1])
    return image


def solid(mode: str, *values: int) -> Image.Image:
    return Image.new(mode, (16, 16), values if len(values) > 1 else values[0])


PALETTE = [(10, 20, 30), (200, 0, 0), (0, 90, 255)]
KINDS = {
    "grey": (encoded(solid("L", 77)), (77, 77, 77)),
    "one bit": (encoded(solid("1", 1)), (255, 255, 255)),
    "palette": (encoded(with_palette(PALETTE)), (10, 20, 30)),
    "GIF": (encoded(with_palette(PALETTE), "GIF"), (10, 20, 30)),
    "BMP": (encoded(solid("RGB", 1, 2, 3), "BMP"), (1, 2, 3)),
    "TIFF": (encoded(solid("RGB", 1, 2, 3), "TIFF"), (1, 2, 3)),
    "WebP": (encoded(solid("RGB", 1, 2, 3), "WEBP", lossless=True), (1, 2, 3)),
    "half transparent": (encoded(solid("RGBA", 255, 0, 0, 128)), (255, 127, 127)),
    "transparent": (encoded(solid("RGBA", 9, 9, 9, 0)), (255, 255, 255)),
    "grey with alpha": (encoded(solid("LA", 0, 51)), (204, 204, 204)),
    "one colour clear": (encoded(with_palette(PALETTE), transparency=0), (255, 255, 255)),
    "CMYK TIFF": (encoded(solid("CMYK", 0, 255, 255, 0), "TIFF"), (255, 0, 0)),
    "16 bits": (png_of_16_bits([[32896] * 4]), (128, 128, 128)),
    "16 bits, white": (png_of_16_bits([[65535] * 4]), (255, 255, 255)),
    "16 bits, dark": (png_of_16_bits([[300] * 4]), (1, 1, 1)),
}


@pytest.mark.parametrize(("content", "colour"), KINDS.values(), ids=KINDS)
def test_each_kind_of_picture_becomes_rgb_as_it_is_shown(
    content: bytes, colour: tuple[int, int, int]
) -> None:
    assert tuple(shown(content)[0, 0].tolist()) == colour


def test_a_cmyk_jpeg_is_not_inverted() -> None:
    pixels = shown(encoded(solid("CMYK", 0, 255, 255, 0), "JPEG", quality=95)).astype(int)
    assert abs(pixels - (255, 0, 0)).max() < 8


@pytest.mark.parametrize("form", ["PNG", "JPEG", "TIFF", "WEBP"])
def test_turned_pictures_stand_upright(form: str) -> None:
    """All eight ways in which EXIF says that a camera was held."""
    options: dict[str, dict[str, Any]] = {
        "JPEG": {"quality": 100, "subsampling": 0},
        "WEBP": {"lossless": True},
    }
    upright = noise(6, 4).resize((48, 32), Image.Resampling.BICUBIC)
    held: list[Transpose | None] = [
        None,
        Transpose.FLIP_LEFT_RIGHT,
        Transpose.ROTATE_180,
        Transpose.FLIP_TOP_BOTTOM,
        Transpose.TRANSPOSE,
        Transpose.ROTATE_90,
        Transpose.TRANSVERSE,
        Transpose.ROTATE_270,
    ]
    for orientation, way in enumerate(held, 1):
        raw = upright if way is None else upright.transpose(way)
        exif = Image.Exif()
        exif[0x0112] = orientation
        content = encoded(raw, form, exif=exif, **options.get(form, {}))
        pixels = shown(content)
        assert pixels.shape == (32, 48, 3)
        difference = abs(pixels.astype(int) - np.asarray(upright).astype(int)).max()
        assert difference <= (4 if form == "JPEG" else 0), orientation


def test_facts_tell_what_is_transparent_or_has_a_profile() -> None:
    profile = b"\0" * 128 + b"Display P3"
    cases: list[tuple[Image.Image, dict[str, Any], tuple[bool, bool]]] = [
        (solid("RGBA", 1, 2, 3, 255), {}, (False, False)),
        (solid("RGBA", 1, 2, 3, 254), {}, (True, False)),
        (solid("RGB", 1, 2, 3), {"icc_profile": profile}, (False, True)),
        (solid("RGB", 1, 2, 3), {"icc_profile": profile + b"sRGB IEC61966"}, (False, False)),
    ]
    for image, options, fact in cases:
        with only_errors():
            facts = inspect_file(encoded(image, **options))
        assert (facts.transparent, facts.profile) == fact


def test_the_facts_of_a_large_jpeg_are_those_of_its_whole_size() -> None:
    """It is decoded at an eighth of its size to see that it is whole."""
    content = encoded(noise(300, 200), "JPEG")
    with only_errors():
        assert inspect_file(content).width == 300
        np.testing.assert_array_equal(shown(content), rgb(content))


def test_a_mask_is_grey_and_what_is_clear_does_not_count() -> None:
    content = encoded(solid("RGBA", 255, 255, 255, 0))
    with only_errors():
        assert inspect_file(content, is_mask=True).brightest == 0
        assert np.asarray(decode_mask(encoded(solid("RGB", 255, 255, 255)), 1)).min() == 255
        assert np.asarray(decode_mask(png_of_16_bits([[65535, 0]]), 1)).tolist() == [[255, 0]]


def jpeg(share: float) -> bytes:
    content = encoded(noise(64, 64), "JPEG")
    return content[: int(len(content) * share)]


BROKEN: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "empty: 0 bytes"),
    "cut JPEG": (jpeg(0.6), "truncated"),
    "last byte of a JPEG": (jpeg(1)[:-1], "truncated"),
    "header of a JPEG": (jpeg(1)[:20], "truncated|known format"),
    "cut PNG": (encoded(noise(64, 64))[:-3000], "truncated"),
    "cut GIF": (encoded(noise(64, 64), "GIF")[:-2000], "truncated"),
    "cut WebP": (encoded(noise(64, 64), "WEBP")[:-500], "truncated|WEBP|WebP|decode"),
    "web page": (b"<html>404</html>", r"no picture of a known format: it begins with '<html>404"),
    "HEIC": (b"\0\0\0\x18ftypheic\0\0\0\0mif1heic", "HEIC, which is not read"),
    "bomb": (png(30_000, 30_000, 8, 2, bytes(99)), "more than 89,478,485 pixels"),
    "large": (png(10_000, 10_000, 8, 2, bytes(99)), "more than 89,478,485 pixels"),
    "postscript": (b"%!PS-Adobe-3.0 EPSF-3.0\n", "no picture of a known format"),
    "animated GIF": (
        encoded(STEPS[0], "GIF", save_all=True, append_images=STEPS[1:]),
        "3 pictures in one file",
    ),
    "animated PNG": (
        encoded(STEPS[0], "PNG", save_all=True, append_images=STEPS[1:]),
        "3 pictures in one file",
    ),
    "animated WebP": (
        encoded(STEPS[0], "WEBP", save_all=True, append_images=STEPS[1:]),
        "3 pictures in one file",
    ),
    "pages": (
        encoded(STEPS[0], "TIFF", save_all=True, append_images=STEPS[1:]),
        "3 pictures in one file",
    ),
    "32 bits": (encoded(Image.new("F", (8, 8), 0.5), "TIFF"), "numbers of 32 bits"),
}


@pytest.mark.parametrize(("content", "reason"), BROKEN.values(), ids=BROKEN)
def test_a_broken_file_has_its_reason(content: bytes, reason: str) -> None:
    with only_errors(), pytest.raises(BrokenPictureError, match=reason):
        inspect_file(content)


def test_a_phone_s_jpeg_with_a_second_picture_is_a_still() -> None:
    file = io.BytesIO()
    noise(32, 32).save(file, "MPO", save_all=True, append_images=[noise(8, 8)])
    assert shown(file.getvalue()).shape == (32, 32, 3)


def test_broken_pictures_are_refused_or_skipped_and_named(tmp_path: Path, cache: Path) -> None:
    folder = write_folder(tmp_path / "p", {f"{name}.txt": "a word" for name in "abcdefgh"})
    write_folder(folder, {"a.jpg": jpeg(0.5), "b.png": b"", "h.png": noise(16, 16)})
    write_folder(folder, {f"{name}.png": b"" for name in "cdefg"})
    error = refusal(folder, cache)
    assert error.cause == "a.jpg can't be read: truncated, and 6 more pictures"
    assert "data.broken=skip trains on the other 1" in error.remedy
    assert error.where == "data.source"
    (folder / "b.txt").unlink()
    captions = {"missing": "empty"}  # of a picture that is skipped nobody asks for one
    pictures = opened(folder, cache, broken="skip", captions=captions)
    assert len(pictures.train) == 1
    assert pictures.scan.without_caption == ()
    (line,) = (line for line in pictures.lines if "skipped" in line)
    assert line.startswith("7 pictures skipped: a.jpg (truncated), b.png (empty: 0 bytes), c.png")
    assert line.endswith("e.png (empty: 0 bytes) and 2 more")
    (folder / "h.png").unlink()
    (folder / "h.txt").unlink()
    assert (
        "none of 7 pictures can be read"
        in refusal(folder, cache, broken="skip", captions=captions).cause
    )


def forbid(*_: object, **__: object) -> FileFacts:
    raise AssertionError("a picture was read")


def test_a_second_start_reads_no_picture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Broken ones are not read again either; a file that has changed is."""
    files = {f"{number}.png": noise(16, 16, number) for number in range(9)}
    folder = write_folder(tmp_path / "p", {**files, "broken.png": b"", "9.png": jpeg(1)})
    options = {"captions": {"missing": "name"}, "broken": "skip"}
    first = opened(folder, tmp_path / "cache", **options)
    monkeypatch.setattr(scan_cache, "inspect_file", forbid)
    again = opened(folder, tmp_path / "cache", **options)
    assert again.lines == first.lines
    assert again.train.fingerprint() == first.train.fingerprint()
    assert again.scan.broken == first.scan.broken
    monkeypatch.undo()

    noise(16, 16, 77).save(folder / "3.png")
    (folder / "4.png").unlink()
    read: list[bytes] = []

    def listen(content: bytes, *, is_mask: bool = False) -> FileFacts:
        read.append(content)
        return inspect_file(content, is_mask=is_mask)

    monkeypatch.setattr(scan_cache, "inspect_file", listen)
    changed = opened(folder, tmp_path / "cache", **options)
    assert read == [(folder / "3.png").read_bytes()]
    assert changed.train.fingerprint() != first.train.fingerprint()
    assert len(changed.train) == 9


def test_what_an_interrupted_scan_has_found_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = {f"{number}.png": noise(16, 16, number) for number in range(9)}
    folder = write_folder(tmp_path / "p", files)
    last = (folder / "8.png").read_bytes()

    def stop(content: bytes, *, is_mask: bool = False) -> FileFacts:
        if content == last:
            raise KeyboardInterrupt
        return inspect_file(content, is_mask=is_mask)

    monkeypatch.setattr(scan_cache, "inspect_file", stop)
    with pytest.raises(KeyboardInterrupt):
        opened(folder, tmp_path / "cache", captions={"missing": "name"})
    (kept,) = (tmp_path / "cache" / "diffusion" / "scans").glob("*.json")
    assert sorted(json.loads(kept.read_text())) == [f"{number}.png" for number in range(8)]
    monkeypatch.undo()
    assert len(opened(folder, tmp_path / "cache", captions={"missing": "name"}).train) == 9


@pytest.mark.parametrize(
    "spoil",
    [
        lambda file: file.write_text("{"),
        lambda file: file.write_text("[]"),
        lambda file: file.write_text(file.read_text().replace('"width": 16', '"width": "x"')),
    ],
)
def test_a_spoilt_cache_is_made_again(tmp_path: Path, spoil: Callable[[Path], object]) -> None:
    folder = write_folder(tmp_path / "p", {"a.png": noise(16, 16), "a.txt": "one"})
    first = opened(folder, tmp_path / "cache")
    (kept,) = (tmp_path / "cache" / "diffusion" / "scans").glob("*.json")
    spoil(kept)
    assert opened(folder, tmp_path / "cache").train.fingerprint() == first.train.fingerprint()
