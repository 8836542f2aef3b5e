"""Clips in a folder for each class: a folder for each clip, with its frames as picture files.

Frames are in the order of the numbers in their names. Of a longer clip, `data.frames` of them are
used, spread evenly. A clip is held out, or left out, as a whole.
"""

import hashlib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from samecurve.seam import UserError, counted, show_progress, some
from samecurve_products.pictures.files.picture_files import check_pillow
from samecurve_products.pictures.files.scan_cache import Scanned, scan_files
from samecurve_products.pictures.vision.data.class_folders import (
    ClassFile,
    ClassFolders,
    list_classes,
    unread_line,
)
from samecurve_products.pictures.vision.data.folder_images import (
    FOLDER_SIZE,
    FolderViews,
    all_files,
    image_sets_of,
    stored_picture,
    with_validation,
)
from samecurve_products.pictures.vision.data.image_sets import ImageSets
from samecurve_products.pictures.vision.data.views import MiddleRows, OpenImage
from samecurve_products.pictures.vision.sections import VisionData

_SHOWN = 5  # names in a line

Frames = Mapping[Path, Sequence[Path]]  # the files that are used of each clip, by its folder


class ClipViews:
    """Clips by number, each of `frames` pictures.

    pictures: the frames of all clips, one clip after the other
    """

    def __init__(self, pictures: FolderViews, frames: int) -> None:
        self._pictures, self._frames = pictures, frames
        self.labels = pictures.labels[::frames]

    def __len__(self) -> int:
        return len(self.labels)

    def open(self, number: int) -> tuple[OpenImage, ...]:
        first = number * self._frames
        return tuple(map(self._pictures.open, range(first, first + self._frames)))

    def digest(self) -> str:
        return f"{self._pictures.digest()}/{self._frames}"


def read_clips(
    data: VisionData,
    cache: Path,
    known: Sequence[str] | None = None,
    say: Callable[[str], None] = show_progress,
) -> ImageSets:
    """The clips of a folder.

    known: classes of a run: all clips are then of one split, which nothing is held out of

    UserError: a folder, a clip or a picture is not as it must be.
    """
    assert data.frames is not None
    check_pillow()
    folders = list_classes(data.source, known)
    clips, frames = _group(folders, data.frames)
    paths = [path for files in frames.values() for path in files]
    scanned = scan_files(folders.root, paths, (), cache / "vision" / "scans", say)
    whole, lost = _without_broken(clips, frames, scanned, data)
    _check_sizes(whole, frames, scanned)
    if known is None:
        content = {clip.path: _digest(frames[clip.path], scanned) for clip in all_files(whole)}
        whole = with_validation(whole, content, data.validation)
    else:
        whole = replace(whole, splits={"train": all_files(whole)})
    side = data.resolution or FOLDER_SIZE
    rows = {
        split: MiddleRows(_views(of_split, frames, scanned, data.frames), (side, side), data.shown)
        for split, of_split in whole.splits.items()
    }
    count = len(all_files(whole))
    lines = [f"{data.source}: {counted(count, 'clip')} of {len(whole.classes)} classes"]
    if lost:
        lines.append(f"{counted(len(lost), 'clip')} left out: {some(lost, _SHOWN)}")
    return image_sets_of(
        rows,
        classes=whole.classes,
        shown=data.shown,
        lines=[*lines, *unread_line(folders)],
        frames=data.frames,
    )


def in_order(name: str) -> list[tuple[int, str]]:
    """A key by which names are sorted: numbers by their size, 2 before 10."""
    parts = re.split(r"(\d+)", name)
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in parts]


def spread_frames(count: int, wanted: int) -> list[int]:
    """The places of frames that are used of a clip, from its first one to its last one."""
    places: list[int] = np.linspace(0, count - 1, wanted).round().astype(np.int64).tolist()
    return places


def _group(folders: ClassFolders, wanted: int) -> tuple[ClassFolders, Frames]:
    """The clips, each a file of `splits` whose path is its folder; and the frames of each.

    UserError: a picture lies beside the clips, or a clip has too few.
    """
    frames: dict[Path, Sequence[Path]] = {}
    splits = {}
    for split, files in folders.splits.items():
        by_clip: dict[ClassFile, list[Path]] = {}
        for file in files:
            home = folders.homes[split] / folders.classes[file.label]
            if file.path.parent == home:
                raise UserError(
                    f"{file.path} lies beside the folders of clips",
                    "a folder for each clip, with its frames: left/clip-1/001.png; or leave"
                    " data.frames out, if the pictures are samples by themselves",
                    "data.frames",
                )
            by_clip.setdefault(ClassFile(file.path.parent, file.label), []).append(file.path)
        for clip, paths in by_clip.items():
            if len(paths) < wanted:
                raise UserError(
                    f"{clip.path} has {counted(len(paths), 'picture')}, and data.frames is"
                    f" {wanted}",
                    f"--set data.frames={max(2, len(paths))}; or remove the clip",
                    "data.frames",
                )
            ordered = sorted(paths, key=lambda path: in_order(path.name))
            frames[clip.path] = [ordered[place] for place in spread_frames(len(paths), wanted)]
        splits[split] = tuple(by_clip)
    return replace(folders, splits=splits), frames


def _without_broken(
    clips: ClassFolders, frames: Frames, scanned: Mapping[Path, Scanned], data: VisionData
) -> tuple[ClassFolders, list[str]]:
    """The clips that can be read, and words for those that can't be.

    UserError: some can't be, and none may be left out; or a class has no other one to train on.
    """
    broken = {
        folder: path
        for folder, paths in frames.items()
        for path in paths
        if scanned[path].facts is None
    }
    if broken and data.broken == "refuse":
        path = next(iter(broken.values()))
        raise UserError(
            f"{path} can't be read: {scanned[path].reason}",
            "copy, convert or remove what can't be read; or --set data.broken=skip leaves its clip"
            " out and names it",
            "data.source",
        )
    splits = {
        split: tuple(clip for clip in of_split if clip.path not in broken)
        for split, of_split in clips.splits.items()
    }
    trained_on = {clip.label for clip in splits["train"]}
    for label, name in enumerate(clips.classes):
        if broken and label not in trained_on:
            raise UserError(
                f"no clip of class {name} can be read whole",
                "copy the pictures again, or remove the class",
                "data.source",
            )
    words = [f"{folder.name} ({scanned[path].reason})" for folder, path in broken.items()]
    return replace(clips, splits=splits), words


def _check_sizes(clips: ClassFolders, frames: Frames, scanned: Mapping[Path, Scanned]) -> None:
    """UserError: two frames of a clip differ in size, so that no crop would be the same in both."""
    for clip in all_files(clips):
        sizes = {path: _size(path, scanned) for path in frames[clip.path]}
        first = frames[clip.path][0]
        for path, size in sizes.items():
            if size != sizes[first]:
                shown = " and ".join(
                    f"{one.name} has {width} x {height}"
                    for one, (width, height) in ((first, sizes[first]), (path, size))
                )
                raise UserError(
                    f"{clip.path}: {shown} pixels",
                    "frames of one size in a clip",
                    "data.source",
                )


def _size(path: Path, scanned: Mapping[Path, Scanned]) -> tuple[int, int]:
    facts = stored_picture(path, scanned).facts
    return facts.width, facts.height


def _digest(paths: Sequence[Path], scanned: Mapping[Path, Scanned]) -> str:
    """A digest of a clip's content."""
    content = "".join(stored_picture(path, scanned).facts.sha256 for path in paths)
    return hashlib.sha256(content.encode()).hexdigest()


def _views(
    clips: Sequence[ClassFile], frames: Frames, scanned: Mapping[Path, Scanned], count: int
) -> ClipViews:
    pictures = [
        (stored_picture(path, scanned), clip.label) for clip in clips for path in frames[clip.path]
    ]
    views = FolderViews([file for file, _ in pictures], [label for _, label in pictures])
    return ClipViews(views, count)
