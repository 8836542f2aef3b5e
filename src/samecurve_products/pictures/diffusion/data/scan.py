"""The pictures of a config's folders: what is known of each before any sample is made.

A picture that can't be read is refused or left out, as the config says; nothing is left out without
being counted and named.
"""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from samecurve.core.determinism.sample_keys import sample_rng
from samecurve.seam import UserError, some
from samecurve_products.pictures.diffusion.data.caption_files import Texts, read_captions
from samecurve_products.pictures.diffusion.data.folders import FolderFiles, PictureFile, list_folder
from samecurve_products.pictures.diffusion.sections import DiffusionData, ImageFolder
from samecurve_products.pictures.files.scan_cache import Scanned, scan_files
from samecurve_products.pictures.files.stored import StoredPicture

_SHOWN = 5  # names in a line


@dataclass(frozen=True, kw_only=True)
class Picture:
    """A picture with all that its samples follow from.

    name: below its folder; of several folders with the folder's own name before it. captions:
    none: it is trained without one. trigger: what its captions begin with; "" for nothing. folder:
    number of data.source's folder. repeats, weight: of it
    """

    file: StoredPicture
    mask: StoredPicture | None
    name: str
    captions: Texts
    trigger: str
    folder: int
    repeats: int
    weight: float

    @property
    def sha256(self) -> str:
        """The hash of the file's bytes."""
        return self.file.facts.sha256

    @property
    def width(self) -> int:
        return self.file.facts.width

    @property
    def height(self) -> int:
        return self.file.facts.height

    def draws(self, purpose: str, number: int, seed: int) -> np.random.Generator:
        """Random numbers that follow from the picture's content, and from nothing around it.

        purpose: numbers of one purpose don't depend on those of another. number: which use of the
        picture they are for
        """
        content = hashlib.sha256(f"{purpose}/{self.sha256}".encode()).digest()
        return sample_rng(int.from_bytes(content[:8], "big") >> 1, number, seed=seed)


@dataclass(frozen=True)
class Broken:
    """A picture that can't be read. place: its name, as a Picture has it"""

    place: str
    reason: str


@dataclass(frozen=True)
class FolderScan:
    """The pictures of all folders.

    without_caption: names of pictures that have none of their own. without_mask: how many
    pictures have no mask, where masks are read
    """

    folders: tuple[FolderFiles, ...]
    pictures: tuple[Picture, ...]
    broken: tuple[Broken, ...]
    without_caption: tuple[str, ...]
    without_mask: int


@dataclass(frozen=True)
class _Listed:
    """A folder whose files and captions are known, and whose pictures are not.

    missing: names of pictures without a caption. prefix: before names, where there are several
    folders
    """

    number: int
    folder: ImageFolder
    files: FolderFiles
    captions: Mapping[str, Texts]
    missing: set[str]
    prefix: str


def scan_folders(
    folders: Sequence[ImageFolder], data: DiffusionData, cache: Path, say: Callable[[str], None]
) -> FolderScan:
    """Find and check all pictures; their files are decoded whole, once.

    say: is told now and then how far it is
    UserError: a folder, a caption, a mask or a picture is not as it must be.
    """
    files = [list_folder(folder.source, data) for folder in folders]
    listed = [
        _Listed(
            number,
            folder,
            each,
            *read_captions(each, data.captions, folder.caption),
            _prefix(each, files),
        )
        for number, (folder, each) in enumerate(zip(folders, files, strict=True))
    ]
    pictures: list[Picture] = []
    broken: list[Broken] = []
    without_caption: list[str] = []
    for each in listed:
        beside = [picture.mask for picture in each.files.pictures if picture.mask is not None]
        paths = [picture.path for picture in each.files.pictures]
        scanned = scan_files(each.files.root, paths, beside, cache, say)
        reasons = _reasons(each.files, scanned)
        broken += [Broken(f"{each.prefix}{name}", reason) for name, reason in reasons.items()]
        whole = [picture for picture in each.files.pictures if picture.name not in reasons]
        pictures += [_picture(picture, each, scanned, data) for picture in whole]
        without = (picture.name for picture in whole if picture.name in each.missing)
        without_caption += [f"{each.prefix}{name}" for name in without]
    _check_broken(broken, len(pictures), data)
    _check_masks(pictures, data)
    return FolderScan(
        folders=tuple(files),
        pictures=tuple(pictures),
        broken=tuple(broken),
        without_caption=tuple(without_caption),
        without_mask=sum(picture.mask is None for picture in pictures) if data.masks else 0,
    )


def _prefix(files: FolderFiles, every: Sequence[FolderFiles]) -> str:
    return f"{files.root.name}/" if len(every) > 1 else ""


def _picture(
    picture: PictureFile, listed: _Listed, scanned: Mapping[Path, Scanned], data: DiffusionData
) -> Picture:
    """What is known of a picture that was found whole."""
    folder = listed.folder
    trigger = data.captions.trigger if folder.trigger is None else folder.trigger
    return Picture(
        file=_stored(picture.path, scanned),
        mask=None if picture.mask is None else _stored(picture.mask, scanned),
        name=f"{listed.prefix}{picture.name}",
        captions=listed.captions[picture.name],
        trigger=trigger or "",
        folder=listed.number,
        repeats=folder.repeats,
        weight=folder.weight,
    )


def _stored(path: Path, scanned: Mapping[Path, Scanned]) -> StoredPicture:
    facts = scanned[path].facts
    assert facts is not None
    return StoredPicture(path, scanned[path].stamp, facts)


def _reasons(files: FolderFiles, scanned: Mapping[Path, Scanned]) -> dict[str, str]:
    """Why pictures can't be read, or their masks can't be, by name."""
    reasons = {}
    for picture in files.pictures:
        if scanned[picture.path].facts is None:
            reasons[picture.name] = scanned[picture.path].reason
        elif picture.mask is not None and scanned[picture.mask].facts is None:
            reason = scanned[picture.mask].reason
            reasons[picture.name] = f"its mask {picture.mask.name}: {reason}"
    return reasons


def name_broken(broken: Sequence[Broken]) -> str:
    """The first broken pictures, each with the reason."""
    return some([f"{each.place} ({each.reason})" for each in broken], _SHOWN)


def _check_broken(broken: Sequence[Broken], whole: int, data: DiffusionData) -> None:
    if broken and data.broken == "refuse":
        more = f", and {len(broken) - 1:,} more pictures" if len(broken) > 1 else ""
        raise UserError(
            f"{broken[0].place} can't be read: {broken[0].reason}{more}",
            "copy, convert or remove what can't be read; or --set data.broken=skip trains on the"
            f" other {whole:,} and names what was left out",
            "data.source",
        )
    if broken and not whole:
        raise UserError(
            f"none of {len(broken):,} pictures can be read: {name_broken(broken)}",
            "copy them again, or convert them to JPEG or PNG",
            "data.source",
        )


def _check_masks(pictures: Sequence[Picture], data: DiffusionData) -> None:
    """UserError: a mask has other sides than its picture, or nothing of the picture counts."""
    masked = [(picture, picture.mask) for picture in pictures if picture.mask is not None]
    unlike = [
        f"{mask.path.name} has {mask.facts.width} x {mask.facts.height} pixels, and {picture.name}"
        f" {picture.width} x {picture.height}"
        for picture, mask in masked
        if (mask.facts.width, mask.facts.height) != (picture.width, picture.height)
    ]
    if unlike:
        raise UserError(
            some(unlike, _SHOWN),
            "masks of their pictures' own size, as these are shown upright",
            "data.masks",
        )
    black = [mask.path.name for _, mask in masked if not mask.facts.brightest]
    if black and not data.unmasked_weight:
        raise UserError(
            f"{some(black, _SHOWN)}: black everywhere, so that nothing of the picture counts",
            "white for what counts; or --set data.unmasked_weight=0.1 lets the rest count too; or"
            " remove these pictures",
            "data.masks",
        )
