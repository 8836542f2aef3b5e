"""Picture files as pixels: whatever a file holds becomes RGB with 8 bits, as a viewer shows it.

Turned pictures (EXIF) are put upright. Transparent ones are laid on white. Numbers of 16 bits are
scaled to 8, not cut. Colour profiles are left alone. Only stills are taken, and only the formats
that are named here, whatever a file's name says.
"""

import hashlib
import io
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np

from samecurve.seam import UserError, install_command

if TYPE_CHECKING:  # a start without pictures does not import Pillow
    from PIL import Image as Pillow

SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".tif", ".tiff", ".gif", ".avif")
UNREADABLE = (".heic", ".heif")  # found and named, as Pillow can't read them
_FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "TIFF", "GIF", "AVIF")
_HEIC = (b"heic", b"heix", b"heim", b"heis", b"hevc", b"hevx", b"mif1", b"msf1")
_HEIC_REASON = "HEIC, which is not read: convert it to JPEG or PNG"
_ORIENTATION = 0x0112  # of EXIF
_SRGB = (b"sRGB", "sRGB".encode("utf-16-be"))  # in the name of a colour profile
_DRAFT = 8  # a JPEG is decoded with so many times fewer pixels a side to see that it is whole
_SHOWN = 12  # bytes of a file that is no picture


class BrokenPictureError(Exception):
    """A file that can't be read as a picture; its text is the reason."""


@dataclass(frozen=True)
class FileFacts:
    """The facts of a picture file that was decoded whole once.

    sha256: of the file's bytes. width, height: as shown, upright. orientation: of EXIF, from 1.
    transparent: some of it is. profile: a colour profile other than sRGB lies in it. brightest:
    of a mask, its highest value; of other pictures 0. converted: what its numbers are, where they
    are not those of a screen: CMYK, or 16 bits of grey
    """

    sha256: str
    width: int
    height: int
    orientation: int = 1
    transparent: bool = False
    profile: bool = False
    brightest: int = 0
    converted: str = ""


def check_pillow() -> str:
    """Return Pillow's version. UserError: Pillow is not installed."""
    try:
        import PIL
    except ImportError:
        raise UserError(
            "pictures are read with Pillow, which is not installed",
            install_command("diffusion"),
            "task",
        ) from None
    return PIL.__version__


def inspect_file(content: bytes, *, is_mask: bool = False) -> FileFacts:
    """Decode a file whole. BrokenPictureError: it can't be read as one picture.

    Call it within only_errors().
    """
    image = _opened(content)
    width, height = image.size
    converted = "CMYK" if image.mode == "CMYK" else ""
    if image.mode.startswith("I;16"):
        converted = "16 bits"
    has_profile = any(image.info.get("icc_profile", b""))
    foreign = has_profile and not any(name in image.info["icc_profile"] for name in _SRGB)
    with _explained():
        _check_still(image)
        if image.format == "JPEG" and not is_mask:
            image.draft(None, (width // _DRAFT, height // _DRAFT))
        image.load()
        orientation = _orientation(image)
        brightest, transparent = 0, False
        if is_mask:
            brightest = int(_range(as_grey(image))[1])
        else:
            _check_mode(image)
            transparent = _is_transparent(image)
    if image.format != "JPEG":
        width, height = image.size  # a TIFF is turned when it is loaded
    if orientation >= 5:
        width, height = height, width
    return FileFacts(
        sha256=hashlib.sha256(content).hexdigest(),
        width=width,
        height=height,
        orientation=orientation,
        transparent=transparent,
        profile=foreign,
        brightest=brightest,
        converted="" if is_mask else converted,
    )


def upright_size(content: bytes) -> tuple[tuple[int, int], int]:
    """Width and height of a picture as shown, and how EXIF says that it is turned; its pixels are
    not decoded. BrokenPictureError: it is no picture, or several.
    """
    image = _opened(content)
    with _explained():
        _check_still(image)
        orientation = _orientation(image)
    width, height = image.size
    return ((width, height) if orientation < 5 else (height, width)), orientation


@contextmanager
def only_errors() -> Iterator[None]:
    """Within the block, Pillow's warnings about odd metadata are not shown, and a picture that is
    large enough to be an attack is an error.
    """
    from PIL import Image

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warnings.simplefilter("error", Image.DecompressionBombWarning)
        yield


def decode(
    content: bytes, orientation: int, least: tuple[int, int] | None = None
) -> "Pillow.Image":
    """The pixels of a file that inspect_file() has found whole: RGB, upright.

    least: a width and height that are enough: a JPEG is then decoded with 2, 4 or 8 times fewer
        pixels a side, if these are still as many
    """
    image = _opened(content)
    with _explained():
        if least is not None and image.format == "JPEG":
            image.draft(None, least if orientation < 5 else least[::-1])
        image.load()
        return _upright(as_rgb(image), orientation)


def decode_mask(content: bytes, orientation: int) -> "Pillow.Image":
    """The values of a mask file: grey, upright."""
    image = _opened(content)
    with _explained():
        image.load()
        return _upright(as_grey(image), orientation)


def as_rgb(image: "Pillow.Image") -> "Pillow.Image":
    """A picture of any mode as RGB. BrokenPictureError: its numbers have no known white."""
    from PIL import Image

    image = _of_8_bits(image)
    if image.has_transparency_data:
        below = Image.new("RGBA", image.size, "white")
        below.alpha_composite(image.convert("RGBA"))
        return below.convert("RGB")
    return image if image.mode == "RGB" else image.convert("RGB")


def as_grey(image: "Pillow.Image") -> "Pillow.Image":
    """A mask of any mode as grey; what is transparent is black: it does not count."""
    from PIL import Image

    image = _of_8_bits(image)
    if image.has_transparency_data:
        below = Image.new("RGBA", image.size, "black")
        below.alpha_composite(image.convert("RGBA"))
        image = below
    return image if image.mode == "L" else image.convert("L")


@cache
def _known_formats() -> tuple[str, ...]:
    """The formats that this copy of Pillow can open."""
    from PIL import Image

    Image.init()
    return tuple(name for name in _FORMATS if name in Image.OPEN)


def _opened(content: bytes) -> "Pillow.Image":
    """A file whose header was read. BrokenPictureError: it is no picture, or too large."""
    from PIL import Image, UnidentifiedImageError

    if not content:
        raise BrokenPictureError("empty: 0 bytes")
    try:
        return Image.open(io.BytesIO(content), formats=_known_formats())
    except (Image.DecompressionBombWarning, Image.DecompressionBombError):
        most = Image.MAX_IMAGE_PIXELS or 0
        raise BrokenPictureError(f"more than {most:,} pixels: make it smaller first") from None
    except UnidentifiedImageError:
        raise BrokenPictureError(_unknown(content)) from None
    except Exception as error:  # a plugin may raise anything about a broken header
        raise BrokenPictureError(_reason(error)) from None


def _unknown(content: bytes) -> str:
    if content[4:8] == b"ftyp" and content[8:12] in _HEIC:
        return _HEIC_REASON
    begin = content[:_SHOWN].decode("ascii", "replace").replace("\ufffd", "?")
    return f"no picture of a known format: it begins with {begin!r}"


@contextmanager
def _explained() -> Iterator[None]:
    """Any exception of a decoder becomes a BrokenPictureError."""
    try:
        yield
    except (BrokenPictureError, MemoryError):
        raise
    except Exception as error:  # whatever a decoder raises about bytes that it can't read
        raise BrokenPictureError(_reason(error)) from None


def _reason(error: Exception) -> str:
    text = str(error) or type(error).__name__
    return "truncated" if "truncated" in text.lower() else text


def _orientation(image: "Pillow.Image") -> int:
    """How EXIF says that the picture is turned, from 1 (upright) to 8."""
    try:
        value = image.getexif().get(_ORIENTATION, 1)
    except Exception:  # broken EXIF: viewers show such a picture as it lies there
        return 1
    return value if isinstance(value, int) and 1 <= value <= 8 else 1


def _upright(image: "Pillow.Image", orientation: int) -> "Pillow.Image":
    from PIL.Image import Transpose

    methods = {
        2: Transpose.FLIP_LEFT_RIGHT,
        3: Transpose.ROTATE_180,
        4: Transpose.FLIP_TOP_BOTTOM,
        5: Transpose.TRANSPOSE,
        6: Transpose.ROTATE_270,
        7: Transpose.TRANSVERSE,
        8: Transpose.ROTATE_90,
    }
    return image.transpose(methods[orientation]) if orientation in methods else image


def _check_still(image: "Pillow.Image") -> None:
    """BrokenPictureError: the file has several pictures. A phone's JPEG (MPO) may have others."""
    count = getattr(image, "n_frames", 1)
    if image.format != "MPO" and count > 1:
        raise BrokenPictureError(f"{count} pictures in one file")


def _check_mode(image: "Pillow.Image") -> None:
    """BrokenPictureError: the picture's mode can't be shown as RGB."""
    as_rgb(image.crop((0, 0, 1, 1)))


def _of_8_bits(image: "Pillow.Image") -> "Pillow.Image":
    """Grey of 16 bits as 8: 65535 becomes 255. Other pictures as they are."""
    from PIL import Image

    if image.mode in {"I", "F"}:
        raise BrokenPictureError("numbers of 32 bits, of which none is known to be white")
    if not image.mode.startswith("I;16"):
        return image
    values = np.asarray(image).astype(np.uint32)
    return Image.fromarray(((values + 128) // 257).astype(np.uint8))


def _is_transparent(image: "Pillow.Image") -> bool:
    if not image.has_transparency_data:
        return False
    return bool(_range(image.convert("RGBA").getchannel("A"))[0] < 255)


def _range(grey: "Pillow.Image") -> tuple[Any, Any]:
    """The lowest and the highest value."""
    low, high = grey.getextrema()
    return low, high
