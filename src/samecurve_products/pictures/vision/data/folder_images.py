"""Pictures in a folder for each class as the images of a run.

Every file is decoded once, before the run, and what is found is kept in the cache
(pictures/scan_cache.py); a picture that can't be read is refused or left out, as the config says.
"""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from samecurve.seam import UserError, counted, show_progress, some, stamp_file
from samecurve_products.pictures.files.held_out import held_out
from samecurve_products.pictures.files.picture_files import BrokenPictureError, check_pillow, decode
from samecurve_products.pictures.files.scan_cache import Scanned, scan_files
from samecurve_products.pictures.files.stored import StoredPicture, read_content, unreadable
from samecurve_products.pictures.vision.data.class_folders import (
    ClassFile,
    ClassFolders,
    absent,
    list_classes,
    unread_line,
)
from samecurve_products.pictures.vision.data.image_sets import ImageSets
from samecurve_products.pictures.vision.data.views import MiddleRows, OpenImage, Size
from samecurve_products.pictures.vision.sections import VisionData

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from PIL import Image as Pillow

CHANNELS = 3
FOLDER_SIZE = 224  # pixels a side, where data.resolution names none
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # ImageNet's, of red, green and blue
_FORMAT = 1  # of a row: another number is other data
_SHOWN = 5  # names in a line


class FolderViews:
    """Pictures by number: those of the files given, in their order."""

    def __init__(self, files: Sequence[StoredPicture], labels: Sequence[int]) -> None:
        self._files = tuple(files)
        self.labels: NDArray[np.int64] = np.array(labels, np.int64)

    def __len__(self) -> int:
        return len(self._files)

    def open(self, number: int) -> OpenImage:
        file = self._files[number]

        def read(least: Size) -> "Pillow.Image":
            try:
                return decode(read_content(file), file.facts.orientation, least)
            except BrokenPictureError as error:
                raise unreadable(file, error) from None

        return OpenImage((file.facts.width, file.facts.height), read)

    def name(self, number: int) -> str:
        """Folder and name of the file."""
        return "/".join(self._files[number].path.parts[-2:])

    def digest(self) -> str:
        """A digest of the pictures' content and their labels, wherever their files lie."""
        sha256 = hashlib.sha256()
        for file, label in zip(self._files, self.labels.tolist(), strict=True):
            sha256.update(f"{file.facts.sha256}/{label};".encode())
        return sha256.hexdigest()


def stamp_folder(data: VisionData) -> object:
    """A digest of names, sizes and times of all pictures. UserError: as list_classes()."""
    digest = hashlib.sha256()
    for files in list_classes(data.source).splits.values():
        for file in files:
            digest.update(repr(stamp_file(file.path)).encode("utf-8", "surrogateescape"))
    return digest.hexdigest()


def read_folder(
    data: VisionData,
    cache: Path,
    known: Sequence[str] | None = None,
    say: Callable[[str], None] = show_progress,
) -> ImageSets:
    """The images of a folder.

    known: classes of a run: all pictures are then of one split, which nothing is held out of

    UserError: a folder or a picture is not as it must be.
    """
    check_pillow()
    folders = list_classes(data.source, known)
    paths = [file.path for files in folders.splits.values() for file in files]
    scanned = scan_files(folders.root, paths, (), cache / "vision" / "scans", say)
    whole = _without_broken(folders, scanned, data)
    content = {file.path: _sha256(file, scanned) for file in all_files(whole)}
    if known is None:
        whole = with_validation(whole, content, data.validation)
    else:
        whole = replace(whole, splits={"train": all_files(whole)})
    side = data.resolution or FOLDER_SIZE
    rows = {}
    for split, files in whole.splits.items():
        views = FolderViews(
            [stored_picture(file.path, scanned) for file in files], [file.label for file in files]
        )
        rows[split] = MiddleRows(views, (side, side), data.shown)
    return image_sets_of(
        rows,
        classes=whole.classes,
        shown=data.shown,
        lines=_lines(whole, scanned, data, paths),
    )


def image_sets_of(
    rows: Mapping[str, MiddleRows],
    *,
    classes: Sequence[str],
    shown: float,
    lines: Sequence[str],
    frames: int | None = None,
) -> ImageSets:
    """Images that are decoded when they are read.

    rows: of the splits that there are, "train" among them
    frames: of a clip; None: the rows are single images
    """
    train = rows["train"]
    side = train.size[0]
    made_by = f"{_FORMAT}/Pillow {check_pillow()}/{side}/{shown}/{list(classes)}"
    made_from = "/".join([made_by, *(f"{name}/{rows[name].views.digest()}" for name in rows)])
    return ImageSets(
        train=train,
        validation=rows.get("validation"),
        test=rows.get("test"),
        classes=classes,
        shape=(side, side, CHANNELS),
        mean=MEAN,
        std=STD,
        sha256=hashlib.sha256(made_from.encode()).hexdigest(),
        counts=np.bincount(train.views.labels, minlength=len(classes)).tolist(),
        lines=lines,
        frames=frames,
    )


def all_files(folders: ClassFolders) -> tuple[ClassFile, ...]:
    """The files of all splits."""
    return tuple(file for files in folders.splits.values() for file in files)


def stored_picture(path: Path, scanned: Mapping[Path, Scanned]) -> StoredPicture:
    """A file that the scan has found whole."""
    each = scanned[path]
    assert each.facts is not None
    return StoredPicture(path, each.stamp, each.facts)


def _without_broken(
    folders: ClassFolders, scanned: Mapping[Path, Scanned], data: VisionData
) -> ClassFolders:
    """The files that can be read. UserError: some can't be, and none may be left out."""
    broken = [path for path, each in scanned.items() if each.facts is None]
    if broken and data.broken == "refuse":
        more = f", and {len(broken) - 1:,} more" if len(broken) > 1 else ""
        raise UserError(
            f"{broken[0]} can't be read: {scanned[broken[0]].reason}{more}",
            "copy, convert or remove what can't be read; or --set data.broken=skip trains on the"
            f" other {len(scanned) - len(broken):,} pictures and names what was left out",
            "data.source",
        )
    splits = {
        split: tuple(file for file in files if scanned[file.path].facts is not None)
        for split, files in folders.splits.items()
    }
    trained_on = {file.label for file in splits["train"]}
    lost = [name for label, name in enumerate(folders.classes) if label not in trained_on]
    if lost and len(broken) > 0:
        raise UserError(
            f"no picture of class {lost[0]} can be read, such as"
            f" {_first(broken, lost[0])}: {scanned[_first(broken, lost[0])].reason}",
            "copy the pictures again, or remove the class",
            "data.source",
        )
    return replace(folders, splits=splits)


def _first(paths: Sequence[Path], name: str) -> Path:
    return next((path for path in paths if name in path.parts), paths[0])


def with_validation(
    folders: ClassFolders, content: Mapping[Path, str], share: float
) -> ClassFolders:
    """The folders with pictures held out of each class, where there is no split for that.

    content: a digest of each file; two files of equal content are on the same side
    """
    if "validation" in folders.splits or not share:
        return folders
    held: set[tuple[int, str]] = set()
    for label in range(len(folders.classes)):
        of_class = {content[file.path] for file in folders.splits["train"] if file.label == label}
        held |= {(label, sha256) for sha256 in held_out(of_class, share)}
    train: list[ClassFile] = []
    rest: list[ClassFile] = []
    for file in folders.splits["train"]:
        (rest if (file.label, content[file.path]) in held else train).append(file)
    splits = {**folders.splits, "train": tuple(train)}
    if rest:
        splits["validation"] = tuple(rest)
    return replace(folders, splits=splits)


def _sha256(file: ClassFile, scanned: Mapping[Path, Scanned]) -> str:
    facts = scanned[file.path].facts
    assert facts is not None
    return facts.sha256


def _lines(
    folders: ClassFolders,
    scanned: Mapping[Path, Scanned],
    data: VisionData,
    paths: Sequence[Path],
) -> list[str]:
    """What was read, and what is done to some pictures."""
    kept = sum(map(len, folders.splits.values()))
    lines = [f"{data.source}: {counted(kept, 'picture')} of {len(folders.classes)} classes"]
    broken = [path for path in paths if scanned[path].facts is None]
    if broken:
        named = [f"{_name(path)} ({scanned[path].reason})" for path in broken]
        lines.append(f"{counted(len(broken), 'picture')} left out: {some(named, _SHOWN)}")
    whole = [(path, each.facts) for path, each in scanned.items() if each.facts is not None]
    for kind in ("CMYK", "16 bits"):
        names = [_name(path) for path, facts in whole if facts.converted == kind]
        lines += _named(names, f"of {kind}", "converted to RGB of 8 bits")
    names = [_name(path) for path, facts in whole if facts.transparent]
    lines += _named(names, "transparent in places", "laid on white")
    for split in ("validation", "test"):
        if split in folders.splits and (names := absent(folders, split)):
            lines.append(f"no picture for {split} of {some(names, _SHOWN)}")
    lines += _twice(folders, scanned)
    return [*lines, *unread_line(folders)]


def _twice(folders: ClassFolders, scanned: Mapping[Path, Scanned]) -> list[str]:
    """A line about equal files in several classes, which no model can tell apart."""
    labels: dict[str, dict[int, Path]] = {}
    for files in folders.splits.values():
        for file in files:
            labels.setdefault(_sha256(file, scanned), {}).setdefault(file.label, file.path)
    names = [
        " = ".join(map(_name, of_labels.values()))
        for of_labels in labels.values()
        if len(of_labels) > 1
    ]
    if not names:
        return []
    return [f"{counted(len(names), 'picture')} in more than one class: {some(names, _SHOWN)}"]


def _named(names: Sequence[str], what: str, then: str) -> list[str]:
    if not names:
        return []
    return [f"{counted(len(names), 'picture')} {what}: {then} ({some(names, _SHOWN)})"]


def _name(path: Path) -> str:
    return "/".join(path.parts[-2:])
