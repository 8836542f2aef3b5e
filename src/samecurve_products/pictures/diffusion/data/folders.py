"""The files of a folder of pictures: pictures, what describes them, their masks, and the rest.

Names decide; no file is opened. The order is that of the names below the folder, part by part and
character by character, whatever the locale and the file system.
"""

import hashlib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from samecurve.seam import UserError, counted, some, stamp_file
from samecurve_products.pictures.diffusion.sections import DiffusionData
from samecurve_products.pictures.files.picture_files import SUFFIXES, UNREADABLE
from samecurve_products.pictures.files.walk import check_is_file, files_below

METADATA = "metadata.jsonl"
MASK = "-masklabel"  # behind a picture's name, in that of its mask
_MASK_SUFFIX = ".png"
_SHOWN = 5  # names in a line


@dataclass(frozen=True)
class PictureFile:
    """A picture and the files beside it.

    name: below its folder, with slashes. caption, mask: None: there is no such file
    """

    path: Path
    name: str
    caption: Path | None
    mask: Path | None


@dataclass(frozen=True)
class FolderFiles:
    """The files of a folder of pictures.

    metadata: files that describe pictures line by line. unread: files of no use here
    """

    root: Path
    pictures: tuple[PictureFile, ...]
    metadata: tuple[Path, ...]
    unread: tuple[Path, ...]

    def all_read(self) -> Iterator[Path]:
        """Every file that samples are made from."""
        yield from self.metadata
        for picture in self.pictures:
            yield picture.path
            yield from (file for file in (picture.caption, picture.mask) if file is not None)


def list_folder(source: str, data: DiffusionData) -> FolderFiles:
    """Find the pictures below a folder, and the files that belong to each.

    UserError: there is no such folder, it holds no picture, or two pictures share a file.
    """
    root = _folder(source)
    by_suffix: dict[str, list[Path]] = defaultdict(list)
    for file in files_below(root):
        by_suffix[file.suffix.lower()].append(file)
    masks = {
        file.with_name(file.stem.removesuffix(MASK)): file
        for file in by_suffix[_MASK_SUFFIX]
        if file.stem.endswith(MASK)
    }
    found = [file for suffix in (*SUFFIXES, *UNREADABLE) for file in by_suffix[suffix]]
    paths = sorted(set(found) - set(masks.values()), key=lambda file: file.relative_to(root).parts)
    if not paths:
        raise _no_pictures(source, by_suffix)
    captions = {file.with_suffix(""): file for file in by_suffix[data.captions.extension.lower()]}
    stems = defaultdict(list)
    for path in paths:
        stems[path.with_suffix("")].append(path)
    _check_own_files(stems, captions, "captions.extension")
    if data.masks:
        _check_own_files(stems, masks, "masks")
    pictures = tuple(
        PictureFile(
            path=path,
            name=path.relative_to(root).as_posix(),
            caption=captions.get(path.with_suffix("")),
            mask=masks.get(path.with_suffix("")) if data.masks else None,
        )
        for path in paths
    )
    metadata = tuple(file for file in by_suffix[".jsonl"] if file.name == METADATA)
    read = set(FolderFiles(root, pictures, metadata, ()).all_read())
    for file in sorted(read):
        check_is_file(file)
    others = [file for files in by_suffix.values() for file in files if file not in read]
    return FolderFiles(root, pictures, metadata, tuple(sorted(others)))


def stamp_folders(data: DiffusionData) -> str:
    """A digest of names, sizes and times of all files that samples are made from.

    UserError: as list_folder().
    """
    digest = hashlib.sha256()
    for folder in data.folders:
        for file in list_folder(folder.source, data).all_read():
            digest.update(repr(stamp_file(file)).encode("utf-8", "surrogateescape"))
    return digest.hexdigest()


def _folder(source: str) -> Path:
    root = Path(source).expanduser()
    if root.is_dir():
        return root.resolve()
    nothing = "is a file" if root.exists() else "does not exist"
    raise UserError(
        f"{source} {nothing}, where a folder of pictures is needed",
        "a folder of pictures with captions beside them (a.jpg, a.txt); an archive is unpacked"
        " first; without data.source shapes are drawn",
        "data.source",
    )


def _no_pictures(source: str, by_suffix: Mapping[str, Sequence[Path]]) -> UserError:
    names = [file.name for files in by_suffix.values() for file in files]
    there = (
        f"{counted(len(names), 'other file')}: {some(names, _SHOWN)}" if names else "it is empty"
    )
    return UserError(
        f"{source} holds no picture ({there})",
        f"a folder with files that end in {', '.join(SUFFIXES)}",
        "data.source",
    )


def _check_own_files(
    stems: Mapping[Path, Sequence[Path]], files: Mapping[Path, Path], field: str
) -> None:
    """UserError: several pictures share one caption or mask, as a.jpg and a.png share a.txt."""
    shared = [
        f"{' and '.join(path.name for path in paths)} share {files[stem].name}"
        for stem, paths in stems.items()
        if len(paths) > 1 and stem in files
    ]
    if shared:
        raise UserError(
            some(shared, _SHOWN),
            "rename all but one of the pictures, each with its own file beside it, or remove those"
            f" that are the same picture; captions may also stand in a {METADATA}",
            f"data.{field}",
        )


def unread_lines(folders: Iterable[FolderFiles]) -> list[str]:
    """A line for the user about each folder with files that are not read."""
    return [
        f"{folder.root}: {counted(len(folder.unread), 'file')} not read:"
        f" {some([file.relative_to(folder.root).as_posix() for file in folder.unread], _SHOWN)}"
        for folder in folders
        if folder.unread
    ]
