"""The pictures of a config, opened: split into trained and held out, and sorted into buckets.

pictures = open_pictures(data, cache)
pictures.train, pictures.held_out         Samples by id (samples.py)
pictures.lines                            for the user: what was read, and what became of it
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from samecurve.seam import UserError, show_progress, some
from samecurve_products.pictures.diffusion.data.buckets import Buckets, Shape, show_shape
from samecurve_products.pictures.diffusion.data.folders import stamp_folders
from samecurve_products.pictures.diffusion.data.pictures import scale_to_cover
from samecurve_products.pictures.diffusion.data.samples import Samples
from samecurve_products.pictures.diffusion.data.scan import (
    FolderScan,
    Picture,
    name_broken,
    scan_folders,
)
from samecurve_products.pictures.diffusion.data.shapes import VERSION, ensure_shapes
from samecurve_products.pictures.diffusion.sections import DiffusionData, ImageFolder
from samecurve_products.pictures.files.held_out import held_out

_SHOWN = 5  # names in a line
_LEFT = 0.75  # share of a picture that its bucket leaves, below which a line says so


@dataclass(frozen=True)
class PictureSet:
    """The samples of a config.

    held_out: None: there are none. scan: what was found in the folders. lines: for the user
    """

    train: Samples
    held_out: Samples | None
    scan: FolderScan
    lines: tuple[str, ...]


def stamp_pictures(data: DiffusionData) -> object:
    """A stamp of all files that samples are made from; no file is opened.

    UserError: a folder can't be used.
    """
    return ["shapes", VERSION] if data.source is None else stamp_folders(data)


def open_pictures(
    data: DiffusionData, cache: Path, say: Callable[[str], None] = show_progress
) -> PictureSet:
    """Find, check and sort the pictures of a config; those that are new are decoded once.

    cache: where the facts of picture files, and drawn shapes, are kept. say: is told how far a
    long scan is
    UserError: a folder, a caption, a mask or a picture is not as it must be.
    """
    home = cache / "diffusion"
    buckets = Buckets.of(data)
    folders = data.folders or (ImageFolder(source=str(ensure_shapes(home))),)
    scan = scan_folders(folders, data, home / "scans", say)
    held = held_out({picture.sha256 for picture in scan.pictures}, data.validation)
    train = Samples([p for p in scan.pictures if p.sha256 not in held], buckets, repeated=True)
    rest = Samples([p for p in scan.pictures if p.sha256 in held], buckets, repeated=False)
    all_pictures = [*train.pictures, *rest.pictures]
    if not data.enlarge:
        _check_sizes(all_pictures, data)
    return PictureSet(
        train=train,
        held_out=rest if len(rest) else None,
        scan=scan,
        lines=(
            *_main_lines(scan, train, rest, data),
            *_picture_lines(scan, all_pictures, data),
        ),
    )


def _is_enlarged(picture: Picture, shape: Shape) -> bool:
    width, height = scale_to_cover(picture.width, picture.height, shape)
    return width > picture.width or height > picture.height


def _check_sizes(pictures: Sequence[tuple[Picture, Shape]], data: DiffusionData) -> None:
    """UserError: a picture is smaller than its bucket."""
    small = [
        f"{picture.name} has {show_shape((picture.width, picture.height))} pixels for a bucket of"
        f" {show_shape(shape)}"
        for picture, shape in pictures
        if _is_enlarged(picture, shape)
    ]
    if small:
        raise UserError(
            f"{some(small, 1)}: too small for data.resolution {data.resolution}, and data.enlarge"
            " is false",
            "larger pictures, a lower data.resolution, or --set data.enlarge=true",
            "data.enlarge",
        )


def _main_lines(scan: FolderScan, train: Samples, rest: Samples, data: DiffusionData) -> list[str]:
    """How many pictures there are, and what becomes of them."""
    shapes = sorted({*train.bucket_shapes, *rest.bucket_shapes}, key=lambda each: each[0] / each[1])
    words = f"{_count(len(scan.pictures), 'picture')} of {_count(len(scan.folders), 'folder')}"
    if len(shapes) > 1:
        words += f", {len(shapes)} buckets from {show_shape(shapes[0])} to {show_shape(shapes[-1])}"
    else:
        words += f", each cut to {show_shape(shapes[0])}"
    lines = [f"{words}; {len(rest) or 'none'} held out"]
    if data.source is None:
        lines.insert(0, "no data.source: drawn shapes, made once in the cache")
    if data.validation and not len(rest):
        lines[-1] += f", since {data.validation:g} of them is less than one"
    if scan.broken:
        lines.append(f"{_count(len(scan.broken), 'picture')} skipped: {name_broken(scan.broken)}")
    lines += _folder_lines(scan, data)
    return lines


def _folder_lines(scan: FolderScan, data: DiffusionData) -> list[str]:
    """A line about each folder, where there are several, or one counts otherwise."""
    plain = len(data.folders) < 2 and all(
        f.repeats == 1 and f.weight == 1 and not f.caption for f in data.folders
    )
    lines = []
    for number, folder in enumerate(() if plain else data.folders):
        count = sum(picture.folder == number for picture in scan.pictures)
        often = f", {folder.repeats} times an epoch" if folder.repeats > 1 else ""
        weight = f", weight {folder.weight:g}" if folder.weight != 1 else ""
        trigger = f", trigger {folder.trigger}" if folder.trigger else ""
        usual = f", caption {folder.caption} where there is none" if folder.caption else ""
        said = f"{often}{weight}{trigger}{usual}"
        lines.append(f"{folder.source}: {_count(count, 'picture')}{said}")
    return lines


def _picture_lines(
    scan: FolderScan, pictures: Sequence[tuple[Picture, Shape]], data: DiffusionData
) -> list[str]:
    """What is done to some pictures, and how many they are."""
    lines = []
    missing = scan.without_caption
    if missing:
        lines.append(_named(missing, "without a caption", _MISSING[data.captions.missing]))
    if scan.without_mask:
        share = f"{scan.without_mask:,} of {len(scan.pictures):,} pictures"
        lines.append(f"{share} have no mask: all of each counts")
    clear = [picture.name for picture in scan.pictures if picture.file.facts.transparent]
    if clear:
        lines.append(_named(clear, "transparent in places", "laid on white"))
    for kind in ("CMYK", "16 bits"):
        names = [pic.name for pic in scan.pictures if pic.file.facts.converted == kind]
        if names:
            lines.append(_named(names, f"of {kind}", "converted to RGB of 8 bits"))
    foreign = [picture.name for picture in scan.pictures if picture.file.facts.profile]
    if foreign:
        lines.append(_named(foreign, "with another colour profile than sRGB", "it is not applied"))
    again = len(scan.pictures) - len({picture.sha256 for picture in scan.pictures})
    if again:
        lines.append(f"{_count(again, 'picture')} equal to another one, byte by byte")
    small = [picture.name for picture, shape in pictures if _is_enlarged(picture, shape)]
    if small:
        lines.append(_named(small, "smaller than the bucket", "enlarged"))
    cut = [picture.name for picture, shape in pictures if _share_left(picture, shape) < _LEFT]
    if cut:
        lines.append(_named(cut, f"of which less than {_LEFT:.0%} is left", "the rest is cut off"))
    return lines


_MISSING = {"empty": "trained without one", "name": "the file's name is its caption", "refuse": ""}


def _named(names: Sequence[str], what: str, then: str) -> str:
    return f"{_count(len(names), 'picture')} {what}: {then} ({some(names, _SHOWN)})"


def _share_left(picture: Picture, shape: Shape) -> float:
    """The share of a picture's area that its bucket shows."""
    width, height = scale_to_cover(picture.width, picture.height, shape)
    return shape[0] * shape[1] / (width * height)


def _count(number: int, noun: str) -> str:
    """(1204, 'picture') -> '1,204 pictures'."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
