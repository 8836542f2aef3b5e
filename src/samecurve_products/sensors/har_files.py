"""The layout of the UCI HAR data set: a text file for each channel of each split.

DIR/activity_labels.txt                          1 WALKING
DIR/train/y_train.txt                            a label a window
DIR/train/subject_train.txt                      the subject of each window
DIR/train/Inertial Signals/body_acc_x_train.txt  a window a line: its 128 values
DIR/test/...                                     likewise

A file that breaks this layout is refused with the file and the line.
"""

import shlex
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from samecurve.seam import UserError, counted
from samecurve_products.sensors.windows import Numbers, Windows, WindowSet, check_apart

SIGNALS = "Inertial Signals"
LABELS = "activity_labels.txt"
CHANNELS = tuple(
    f"{signal}_{axis}" for signal in ("body_acc", "body_gyro", "total_acc") for axis in "xyz"
)
_WHOLE = "a copy of the whole directory, as the archive of the data set unpacks it"
_OWN = (
    "recordings of your own, whatever their channels, with or without subjects and a test set, are"
    " one .npz or .csv file: -d FILE (docs/timeseries.md)"
)


def is_one_split(home: Path) -> bool:
    """Whether a directory is only the train/ or the test/ of such a layout."""
    return (home / SIGNALS).is_dir()


def files_of(home: Path) -> list[Path]:
    """All files that are read from a directory.

    UserError: one of the files is missing.
    """
    if not home.is_dir():
        raise UserError(
            f"there is no directory {home}", "check the path of data.source", "data.source"
        )
    files = [_labels_file(home)]
    for folder, split in _splits(home):
        files += [
            folder / f"y_{split}.txt",
            folder / f"subject_{split}.txt",
            *(_channel_file(folder, split, channel) for channel in CHANNELS),
        ]
    for file in files:
        if not file.is_file():
            name = file.relative_to(files[0].parent)
            raise UserError(
                f"the data lacks the file {name} of the UCI HAR layout", _remedy(home), str(file)
            )
    return files


def _remedy(home: Path) -> str:
    """The remedy for a missing file: the data set may lie one directory further in."""
    inner = [place for place in sorted(home.glob("*/")) if (place / LABELS).is_file()]
    return f"-d {shlex.quote(str(inner[0]))}" if inner else f"{_WHOLE}; or {_OWN}"


def read_har(home: Path) -> WindowSet:
    """Read both splits; a directory that is a single split is read as `train`.

    UserError: a file is missing or damaged, a split is empty, or a subject is in both.
    """
    files_of(home)
    classes = _read_classes(_labels_file(home))
    splits = [_read_split(folder, split, classes) for folder, split in _splits(home)]
    file = home / "test/subject_test.txt"
    check_apart(splits, lambda place: f"{file}:{_line_of(file, place)}")
    return WindowSet.of(splits, CHANNELS, classes)


def _splits(home: Path) -> list[tuple[Path, str]]:
    """Folders and names of the splits."""
    if not is_one_split(home):
        return [(home / "train", "train"), (home / "test", "test")]
    names = sorted(file.stem.removeprefix("y_") for file in home.glob("y_*.txt"))
    return [(home, names[0] if len(names) == 1 else home.name)]


def _labels_file(home: Path) -> Path:
    return (home.parent if is_one_split(home) else home) / LABELS


def _channel_file(folder: Path, split: str, channel: str) -> Path:
    return folder / SIGNALS / f"{channel}_{split}.txt"


def _read_classes(file: Path) -> list[str]:
    """The names of the labels 1, 2, ... in their order."""
    classes: list[str] = []
    for number, line in _lines(file):
        parts = line.split()
        if len(parts) != 2 or parts[0] != str(len(classes) + 1):
            raise UserError(
                f"{file.name} has {line.strip()!r} where class {len(classes) + 1} is named",
                "a line for each class, in order: 1 WALKING, 2 WALKING_UPSTAIRS, ...",
                f"{file}:{number}",
            )
        classes.append(parts[1])
    if len(classes) < 2:
        raise UserError(f"{file.name} names {len(classes)} classes", _WHOLE, str(file))
    return classes


def _read_split(folder: Path, split: str, classes: Sequence[str]) -> Windows:
    label_file = folder / f"y_{split}.txt"
    labels = _read_labels(label_file, classes)
    subjects = _read_whole_numbers(folder / f"subject_{split}.txt")
    _check_count(len(subjects), len(labels), folder / f"subject_{split}.txt", label_file)
    values: NDArray[np.float32] | None = None
    for index, channel in enumerate(CHANNELS):
        file = _channel_file(folder, split, channel)
        rows = _read_signal(file, None if values is None else values.shape[2])
        _check_count(len(rows), len(labels), file, label_file)
        if values is None:
            values = np.empty((len(labels), len(CHANNELS), rows.shape[1]), np.float32)
        values[:, index] = rows
    assert values is not None
    return Windows(values=values, labels=labels - 1, subjects=subjects)


def _read_labels(file: Path, classes: Sequence[str]) -> Numbers:
    """UserError: a label is no class, or there are no labels."""
    labels = _read_whole_numbers(file)
    if not len(labels):
        raise UserError(f"{file.name} is empty: this split has no window", _WHOLE, str(file))
    wrong = np.flatnonzero((labels < 1) | (labels > len(classes)))
    if len(wrong):
        line = _line_of(file, int(wrong[0]))
        raise UserError(
            f"label {labels[wrong[0]]} is outside of 1..{len(classes)}, the classes of {LABELS}",
            f"labels from 1 to {len(classes)}, one a window",
            f"{file}:{line}",
        )
    return labels


def _read_whole_numbers(file: Path) -> Numbers:
    numbers = []
    for line_number, line in _lines(file):
        try:
            numbers.append(int(line))
        except ValueError:
            raise UserError(
                f"{file.name} has {line.strip()[:40]!r} where a whole number belongs",
                "one whole number a line",
                f"{file}:{line_number}",
            ) from None
    return np.array(numbers, np.int64)


def _read_signal(file: Path, length: int | None) -> NDArray[np.float32]:
    """Read one channel of all windows: [windows, time].

    length: time steps of the channels read before; None: this is the first channel.
    """
    rows = []
    for line_number, line in _lines(file):
        row = _numbers(line, file, line_number)
        length = length or len(row)
        if len(row) != length:
            raise UserError(
                f"this window has {counted(len(row), 'value')}, and others have {length}",
                f"a window a line, {length} values each",
                f"{file}:{line_number}",
            )
        rows.append(row)
    return np.stack(rows) if rows else np.empty((0, length or 0), np.float32)


def _numbers(line: str, file: Path, line_number: int) -> NDArray[np.float32]:
    """UserError: a value is no number, or is not finite."""
    try:
        # values beyond float32 become infinite, and are refused below
        with np.errstate(over="ignore"):
            row = np.array([float(word) for word in line.split()], np.float32)
    except ValueError as error:
        raise UserError(
            f"{file.name}: {error}", "numbers with blanks between", f"{file}:{line_number}"
        ) from None
    if not np.isfinite(row).all():
        place = int(np.flatnonzero(~np.isfinite(row))[0])
        raise UserError(
            f"value {place + 1} of this window is {row[place]}",
            "finite numbers; leave the window out of every file of the split, or fill it in",
            f"{file}:{line_number}",
        )
    return row


def _lines(file: Path) -> Iterable[tuple[int, str]]:
    """The lines that are not blank, with their numbers from 1. UserError: the file is no text."""
    try:
        text = file.read_text(encoding="ascii")
    except UnicodeDecodeError as error:
        line = file.read_bytes().count(b"\n", 0, error.start) + 1
        raise UserError(f"{file.name} is no plain text", _WHOLE, f"{file}:{line}") from None
    return ((number, line) for number, line in enumerate(text.split("\n"), 1) if line.strip())


def _line_of(file: Path, place: int) -> int:
    """The number of the line that holds the value at this index (from 0)."""
    return [number for number, _ in _lines(file)][place]


def _check_count(count: int, windows: int, file: Path, label_file: Path) -> None:
    if count != windows:
        raise UserError(
            f"{file.name} has {counted(count, 'line')}, and {label_file.name} has {windows}",
            f"a line a window in each file of the split; {_WHOLE}",
            f"{file}:{min(count, windows) + 1}",
        )
