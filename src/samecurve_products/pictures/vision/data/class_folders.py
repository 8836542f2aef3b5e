"""Folders of pictures, one for each class: which files there are, and which split each is of.

Names decide; no file is opened. `train`, and `val` or `test` beside it, are splits; else the
folder's own subfolders are the classes. Classes are numbered by their names in order.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from samecurve.seam import UserError, counted, some, suggest
from samecurve_products.pictures.files.picture_files import SUFFIXES, UNREADABLE
from samecurve_products.pictures.files.walk import check_is_file, files_below

_SHOWN = 5  # names in a line
_SPLITS = {
    "train": ("train", "training"),
    "validation": ("val", "valid", "validation"),
    "test": ("test", "testing"),
}


@dataclass(frozen=True)
class ClassFile:
    """A picture file and the number of its class."""

    path: Path
    label: int


@dataclass(frozen=True)
class ClassFolders:
    """The files of classes.

    splits: files by "train", "validation" and "test"; without a folder for validation "train" has
        those that may be held out too
    homes: the folder of each split, in which the classes' folders lie
    unread: files of no use here
    """

    root: Path
    classes: tuple[str, ...]
    splits: Mapping[str, tuple[ClassFile, ...]]
    homes: Mapping[str, Path]
    unread: tuple[Path, ...]


def list_classes(source: str, known: Sequence[str] | None = None) -> ClassFolders:
    """The classes of a folder and their files.

    known: classes whose numbers are to be used, those of a run; None: the folder's own

    UserError: there is no such folder, it has no classes, a class without a picture, or a split
    has other classes than the one that is trained on.
    """
    root = _folder(source)
    folders = {
        split: folder
        for split, names in _SPLITS.items()
        for folder in _subfolders(root)
        if folder.name.lower() in names
    }
    if "train" not in folders:
        folders = {"train": root}
    files = {split: _files_by_class(folder) for split, folder in folders.items()}
    classes = tuple(sorted(files["train"]) if known is None else known)
    for split, by_class in files.items():
        _check_classes(folders[split], tuple(by_class), classes, is_known=known is not None)
    if known is None and len(classes) < 2:
        raise UserError(
            f"{folders['train']} has one class, {classes[0]}: there is nothing to tell apart",
            "a folder of pictures for each class",
            "data.source",
        )
    splits: dict[str, tuple[ClassFile, ...]] = {}
    unread: list[Path] = []
    for split, by_class in files.items():
        pictures = []
        for label, name in enumerate(classes):
            own, others = _pictures(by_class.get(name, ()))
            pictures += [ClassFile(path, label) for path in own]
            unread += others
            if not own and (split == "train" or name in by_class) and known is None:
                raise _empty_class(folders[split] / name, others)
        splits[split] = tuple(pictures)
        unread += [file for file in sorted(folders[split].iterdir()) if file.is_file()]
    return ClassFolders(root, classes, splits, folders, tuple(unread))


def absent(folders: ClassFolders, split: str) -> list[str]:
    """Names of classes that a held-out split has no picture of."""
    there = {file.label for file in folders.splits.get(split, ())}
    return [name for label, name in enumerate(folders.classes) if label not in there]


def unread_line(folders: ClassFolders) -> list[str]:
    """A line for the user about files that are not read."""
    if not folders.unread:
        return []
    names = [_below(file, folders.root) for file in folders.unread]
    return [f"{counted(len(names), 'file')} not read: {some(names, _SHOWN)}"]


def _below(file: Path, root: Path) -> str:
    return file.relative_to(root).as_posix()


def _folder(source: str) -> Path:
    root = Path(source).expanduser()
    if root.is_dir():
        return root.resolve()
    nothing = "is a file" if root.exists() else "does not exist"
    raise UserError(
        f"{source} {nothing}, where images are needed",
        "a folder with a folder of pictures for each class; an .npz file; shards (*.tar,"
        " *.parquet); digits or pathfinder",
        "data.source",
    )


def _subfolders(folder: Path) -> list[Path]:
    return sorted(
        path for path in folder.iterdir() if path.is_dir() and not path.name.startswith(".")
    )


def _files_by_class(folder: Path) -> dict[str, list[Path]]:
    classes = {path.name: list(files_below(path)) for path in _subfolders(folder)}
    if classes:
        return classes
    loose = [path.name for path in sorted(folder.iterdir()) if path.is_file()]
    there = f"{counted(len(loose), 'file')}: {some(loose, _SHOWN)}" if loose else "it is empty"
    raise UserError(
        f"{folder} has no folder that would be a class ({there})",
        "put the pictures of each class into a folder of its own: cat/1.jpg, dog/2.jpg",
        "data.source",
    )


def _pictures(files: Sequence[Path]) -> tuple[list[Path], list[Path]]:
    """The picture files among them, and the others."""
    is_picture = {file: file.suffix.lower() in (*SUFFIXES, *UNREADABLE) for file in files}
    pictures = [file for file in files if is_picture[file]]
    for file in pictures:
        check_is_file(file)
    return pictures, [file for file in files if not is_picture[file]]


def _empty_class(folder: Path, others: Sequence[Path]) -> UserError:
    there = "it is empty"
    if others:
        names = [file.name for file in others]
        there = f"{counted(len(names), 'other file')}: {some(names, _SHOWN)}"
    return UserError(
        f"class {folder.name} has no picture in {folder} ({there})",
        f"pictures that end in {', '.join(SUFFIXES)}; or remove the folder",
        "data.source",
    )


def _check_classes(
    folder: Path, names: Sequence[str], classes: Sequence[str], *, is_known: bool
) -> None:
    """UserError: a split has a class that is not trained on."""
    unknown = [name for name in names if name not in classes]
    if not unknown:
        return
    near = suggest(unknown[0], classes)
    whose = "the run's classes" if is_known else "the classes that are trained on"
    raise UserError(
        f"{folder} has {'a class' if len(unknown) == 1 else 'classes'}"
        f" {some(unknown, _SHOWN)} that {whose} lack: {some(list(classes), _SHOWN)}",
        near or "name the folders alike in all splits, or remove those that are not trained on",
        "data.source",
    )
