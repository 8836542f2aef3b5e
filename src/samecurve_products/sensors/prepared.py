"""The windows of a source, read once into arrays in the cache, which every rank maps.

The arrays are found again by the names, sizes and times of the files they were read from.
"""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from samecurve.core.system import directory_made_once
from samecurve.seam import UserError, cache_entry, cache_key, show_progress, stamp_file
from samecurve_products.sensors import synthetic
from samecurve_products.sensors.csv_files import read_csv
from samecurve_products.sensors.har_files import files_of, read_har
from samecurve_products.sensors.npz_files import read_npz
from samecurve_products.sensors.sections import TimeSeriesData
from samecurve_products.sensors.windows import Windows, WindowSet

_FORMAT = 2  # of the cache
_NOTES = "windows.json"
_PARTS = ("values", "labels", "subjects")


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """The windows of a source, with their hash and the place they come from."""

    windows: WindowSet
    sha256: str  # of the arrays
    place: str  # where they were read from


def stamp_windows(data: TimeSeriesData) -> object:
    """Names, sizes and times of the files that the windows are read from.

    UserError: a file is missing.
    """
    like_run = [] if data.like_run is None else [stamp_file(Path(data.like_run))]
    if data.source is None:
        return ["synthetic", synthetic.VERSION, *like_run]
    return [*map(stamp_file, _source_files(_path(data.source))), *like_run]


def prepare_windows(data: TimeSeriesData, cache: Path) -> Prepared:
    """The windows of a data section, from the cache if the files have not changed.

    Without a source the synthetic set is made.

    UserError: missing or unfit files.
    """
    home = cache / "timeseries"
    path = _path(data.source) if data.source else _synthetic_set(home)
    stamps = [stamp_file(file) for file in _source_files(path)]
    arrays = home / "arrays" / cache_key([_FORMAT, data.order, *stamps])
    cache_entry(arrays, lambda scratch: _write(_read(path, data), scratch), say=show_progress)
    notes = json.loads((arrays / _NOTES).read_text())
    splits = [_mapped(arrays, split) for split in notes["splits"]]
    windows = WindowSet.of(splits, notes["channels"], notes["classes"])
    return Prepared(windows=windows, sha256=notes["sha256"], place=str(path))


def _synthetic_set(home: Path) -> Path:
    """The directory of the synthetic set, which is written on first use."""
    place = home / f"synthetic-{synthetic.VERSION}"
    if not place.is_dir():
        with directory_made_once(place) as scratch:
            synthetic.write_files(scratch)
    return place


def _path(source: str) -> Path:
    return Path(source).expanduser().resolve()


def _source_files(path: Path) -> list[Path]:
    if path.is_dir():
        return files_of(path)
    if not path.is_file():
        raise UserError(
            f"there is no data at {path}",
            "a directory in the layout of UCI HAR, an .npz or a .csv file; without data.source a"
            " synthetic set is made",
            "data.source",
        )
    return [path]


def _read(path: Path, data: TimeSeriesData) -> WindowSet:
    if path.is_dir():
        return read_har(path)
    if path.suffix == ".npz":
        return read_npz(path, data.order)
    if path.suffix == ".csv":
        return read_csv(path)
    raise UserError(
        f"{path.name} is neither an .npz nor a .csv file",
        "one of these, or a directory in the layout of UCI HAR (docs/timeseries.md)",
        "data.source",
    )


def _write(windows: WindowSet, home: Path) -> None:
    digest = hashlib.sha256()
    splits = {"train": windows.train, "test": windows.test}
    present = {name: split for name, split in splits.items() if split is not None}
    for name, split in present.items():
        for part in _PARTS:
            array = getattr(split, part)
            if array is not None:
                digest.update(f"{name}/{part}/{array.shape}".encode())
                digest.update(np.ascontiguousarray(array).tobytes())
                np.save(home / f"{name}-{part}.npy", array)
    names = {
        "channels": list(windows.channels),
        "classes": list(windows.classes),
        "splits": list(present),
    }
    digest.update(json.dumps(names).encode())
    (home / _NOTES).write_text(json.dumps({**names, "sha256": digest.hexdigest()}))


def _mapped(home: Path, split: str) -> Windows:
    arrays: dict[str, Any] = {"subjects": None}
    for part in _PARTS:
        file = home / f"{split}-{part}.npy"
        if file.is_file():
            arrays[part] = np.load(file, mmap_mode="r" if part == "values" else None)
    return Windows(**arrays)
