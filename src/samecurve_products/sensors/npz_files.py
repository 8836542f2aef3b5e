"""A user's windows as arrays in an .npz file.

x [windows, channels, time] (or, where data.order says so, [windows, time, channels]); label
[windows], numbers or names; subject [windows], if known; channels and classes: names, optional.
x_test, label_test and subject_test: a test split.
"""

import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from samecurve.seam import UserError, counted
from samecurve_products.sensors.sections import Order
from samecurve_products.sensors.windows import (
    Numbers,
    Windows,
    WindowSet,
    check_apart,
    number_labels,
)

Array = NDArray[Any]
_NEEDED = ("x", "label")


def read_npz(file: Path, order: Order | None = None) -> WindowSet:
    """Read the windows of an .npz file.

    order: of the axes of x; None: as it stands, if its shape leaves no doubt.
    UserError: an array is missing, or has a wrong form, or the order of x is in doubt.
    """
    try:
        with zipfile.ZipFile(file) as archive:
            archive.testzip()
        with np.load(file, allow_pickle=False) as stored:
            arrays = {name: stored[name] for name in stored.files}
    except (OSError, ValueError, zipfile.BadZipFile) as error:
        raise UserError(
            f"{file} can't be read as an .npz file: {error}",
            "np.savez(FILE, x=..., label=..., subject=...), of plain arrays",
            str(file),
        ) from None
    for name in _NEEDED:
        if name not in arrays:
            raise UserError(
                f"{file.name} has no array {name}; it has {', '.join(sorted(arrays)) or 'none'}",
                "x [windows, channels, time] and label [windows], and subject [windows] if known",
                str(file),
            )
    suffixes = ["", "_test"] if "x_test" in arrays else [""]
    parts = [_Part(arrays, suffix, file, order) for suffix in suffixes]
    if order is None and "channels" not in arrays:
        _check_order(parts[0].values, file)
    channels = _names(arrays, "channels", parts[0].values.shape[1], file)
    named = [str(name) for name in arrays["classes"]] if "classes" in arrays else None
    classes, labels = number_labels([part.labels for part in parts], named, f"{file}:label")
    splits = [
        Windows(values=part.values, labels=numbers, subjects=part.subjects)
        for part, numbers in zip(parts, labels, strict=True)
    ]
    shapes = [split.values.shape[1:] for split in splits]
    if shapes[-1] != shapes[0]:
        raise UserError(
            f"x_test has windows of shape {shapes[-1]}, and x of {shapes[0]}",
            "windows of the same channels and time steps in both",
            f"{file}:x_test",
        )
    check_apart(splits, lambda place: f"{file}:subject_test[{place}]")
    return WindowSet.of(splits, channels, classes)


def _check_order(x: Array, file: Path) -> None:
    """UserError: x has more channels than time steps, as if its axes were the other way round."""
    _, channels, length = x.shape
    if length < channels:
        raise UserError(
            f"x has shape {x.shape}: read as [windows, channels, time], that is {channels} channels"
            f" of {counted(length, 'time step')}",
            f"--set data.order=time_first, if it is {channels} time steps of"
            f" {counted(length, 'channel')}; else --set data.order=channels_first",
            f"{file}:x",
        )


class _Part:
    """A split of an .npz file, with its arrays checked."""

    def __init__(
        self, arrays: Mapping[str, Array], suffix: str, file: Path, order: Order | None
    ) -> None:
        x = arrays[f"x{suffix}"]
        if x.ndim != 3 or x.dtype.kind not in "iuf" or 0 in x.shape:
            raise UserError(
                f"x{suffix} has shape {x.shape} and type {x.dtype}",
                "numbers [windows, channels, time], one of each at least",
                f"{file}:x{suffix}",
            )
        if order == "time_first":
            x = x.transpose(0, 2, 1)
        with np.errstate(over="ignore"):
            self.values = np.ascontiguousarray(x, np.float32)
        if not np.isfinite(self.values).all():
            window, channel, step = map(int, np.argwhere(~np.isfinite(self.values))[0])
            raise UserError(
                f"x{suffix} has {self.values[window, channel, step]} in window {window}, channel"
                f" {channel}, time step {step}",
                "finite numbers; leave the window out, or fill it in",
                f"{file}:x{suffix}[{window}, {channel}, {step}]",
            )
        self.labels = _column(arrays, f"label{suffix}", len(x), file)
        self.subjects: Numbers | None = None
        if f"subject{suffix}" in arrays or (suffix and "subject" in arrays):
            self.subjects = _column(arrays, f"subject{suffix}", len(x), file).astype(np.int64)


def _column(arrays: Mapping[str, Array], name: str, count: int, file: Path) -> Array:
    array = arrays.get(name)
    kinds = "iu" if name.startswith("subject") else "iuU"
    if array is None or array.shape != (count,) or array.dtype.kind not in kinds:
        there = "is not there" if array is None else f"has shape {array.shape}, type {array.dtype}"
        raise UserError(
            f"{name} {there}; x has {counted(count, 'window')}",
            f"{'whole numbers' if kinds == 'iu' else 'whole numbers or names'}, one a window",
            f"{file}:{name}",
        )
    return array


def _names(arrays: Mapping[str, Array], name: str, count: int, file: Path) -> list[str]:
    if name not in arrays:
        return [f"channel_{number}" for number in range(count)]
    if arrays[name].shape != (count,):
        raise UserError(
            f"{name} has shape {arrays[name].shape} for {count} of them",
            "a name for each",
            f"{file}:{name}",
        )
    return [str(one) for one in arrays[name]]
