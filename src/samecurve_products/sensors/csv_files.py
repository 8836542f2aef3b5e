"""A user's windows as text: a .csv file with one line for each time step.

Columns: window, label, subject (if known), split (train or test; if there is one), and one for each
channel. A column time or timestamp is no channel. The lines of a window stand together, in the
order of time.
"""

import csv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from samecurve.seam import UserError, counted
from samecurve_products.sensors.windows import (
    Numbers,
    Windows,
    WindowSet,
    check_apart,
    number_labels,
)

_OF_WINDOW = ("window", "label", "subject", "split")  # columns that are no channels
_CLOCKS = ("time", "timestamp")  # when a line was taken, which is no measurement
_SPLITS = ("train", "test")


@dataclass
class _Recording:
    """A window of a .csv file, as its lines come."""

    window: str
    label: str
    subject: str
    split: str
    line: int  # the number of its first line
    rows: list[list[float]] = field(default_factory=list)


def read_csv(file: Path) -> WindowSet:
    """Read the windows of a .csv file.

    UserError: a column is missing, or a line differs from the first line of its window.
    """
    # bytes that are no text become a cell that is refused, with its line
    with open(file, newline="", encoding="utf-8-sig", errors="replace") as stream:
        lines = csv.reader(stream)
        header = [name.strip() for name in next(lines, [])]
        channels = [
            name for name in header if name not in _OF_WINDOW and name.lower() not in _CLOCKS
        ]
        missing = [name for name in ("window", "label") if name not in header]
        if missing or not channels or len(set(header)) != len(header):
            raise UserError(
                f"the columns are {', '.join(header) or 'none'}",
                "window, label, subject and split (if there are any), and one for each channel",
                f"{file}:1",
            )
        try:
            windows = _read_lines(lines, header, channels, file)
        except csv.Error as error:
            where = f"{file}:{lines.line_num}"
            raise UserError(
                f"this line is no CSV: {error}", "commas between cells", where
            ) from None
    _check_windows(windows, file)
    by_split = {name: [window for window in windows if window.split == name] for name in _SPLITS}
    parts = [part for part in by_split.values() if part]
    labels = [np.array([window.label for window in part]) for part in parts]
    classes, numbers = number_labels(labels, None, str(file))
    is_known = "subject" in header
    splits = [
        _as_windows(part, of_part, is_known=is_known)
        for part, of_part in zip(parts, numbers, strict=True)
    ]
    check_apart(splits, lambda place: f"{file}:{by_split['test'][place].line}")
    return WindowSet.of(splits, channels, classes)


def _check_windows(windows: Sequence[_Recording], file: Path) -> None:
    """UserError: there is no window to train on, or windows differ in length."""
    if not any(window.split == "train" for window in windows):
        raise UserError(
            f"{file.name} has no window to train on",
            "a line a time step below the header, of split train if there is such a column",
            str(file),
        )
    length = len(windows[0].rows)
    for window in windows:
        if len(window.rows) != length:
            raise UserError(
                f"window {window.window} has {len(window.rows)} time steps, and window"
                f" {windows[0].window} has {length}",
                "windows of one length",
                f"{file}:{window.line}",
            )


def _read_lines(
    lines: Any, header: Sequence[str], channels: Sequence[str], file: Path
) -> list[_Recording]:
    """Read all windows, in the order of the file."""
    windows: list[_Recording] = []
    begun: set[str] = set()
    for line in lines:
        where = f"{file}:{lines.line_num}"
        if not line:
            continue
        if len(line) != len(header):
            raise UserError(
                f"this line has {counted(len(line), 'column')}, and the header {len(header)}",
                "a value for each column",
                where,
            )
        cells = dict(zip(header, (cell.strip() for cell in line), strict=True))
        if not windows or windows[-1].window != cells["window"]:
            windows.append(_begin(cells, begun, lines.line_num, where))
        window = windows[-1]
        for name in ("label", "subject", "split"):
            if name in cells and cells[name] != getattr(window, name):
                raise UserError(
                    f"window {window.window} has {name} {cells[name]!r} here, and"
                    f" {getattr(window, name)!r} in its first line",
                    f"one {name} a window",
                    where,
                )
        window.rows.append([_number(cells[channel], channel, where) for channel in channels])
    return windows


def _begin(cells: Mapping[str, str], begun: set[str], line: int, where: str) -> _Recording:
    """Begin a window. UserError: the window came before, or its split or subject is not valid."""
    name = cells["window"]
    if name in begun:
        raise UserError(
            f"window {name} goes on here, after lines of another",
            "the lines of a window together, in the order of time",
            where,
        )
    begun.add(name)
    split, subject = cells.get("split", "train"), cells.get("subject", "")
    if split not in _SPLITS:
        raise UserError(f"split {split!r} is neither train nor test", "train, or test", where)
    if "subject" in cells and not subject.lstrip("-").isdigit():
        raise UserError(f"subject {subject!r} is no whole number", "a number a subject", where)
    return _Recording(name, cells["label"], subject, split, line)


def _number(cell: str, channel: str, where: str) -> float:
    try:
        value = float(cell)
    except ValueError:
        value = float("nan")
    if not abs(value) <= np.finfo(np.float32).max:
        raise UserError(f"column {channel} has {cell!r}", "a finite number", where)
    return value


def _as_windows(part: Sequence[_Recording], labels: Numbers, *, is_known: bool) -> Windows:
    values = np.array([window.rows for window in part], np.float32).transpose(0, 2, 1)
    subjects = np.array([int(window.subject) for window in part], np.int64) if is_known else None
    return Windows(values=np.ascontiguousarray(values), labels=labels, subjects=subjects)
