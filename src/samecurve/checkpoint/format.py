"""A checkpoint on disk: named arrays in safetensors files, and a manifest that names the file of
each array.

    checkpoints/step-00000500/manifest.json  rank-0-of-2.safetensors  rank-1-of-2.safetensors

A checkpoint knows no topology and no engine. An array may lie in several files as boxes (parts with
offsets into the whole array). The hashes in the manifest reveal a flipped bit or a torn file before
anything is trained on the checkpoint.
"""

import hashlib
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, TensorSpec, safe_open, serialize_file

from samecurve.checkpoint import (
    DTYPES,
    VERSION,
    CorruptCheckpointError,
    check_cover,
    hash_of,
    read_manifest,
)
from samecurve.core.protocols import ArrayShard, Checkpoint
from samecurve.core.system import regular_only
from samecurve.errors import RunError


@dataclass(frozen=True)
class Written:
    """A file that a rank has written."""

    file: str
    bytes: int
    sha256: str
    # the boxes in the file: name -> dtype, shape of the whole array, offsets of the box
    arrays: Mapping[str, tuple[str, tuple[int, ...], tuple[int, ...]]]


def write_pieces(path: Path, pieces: Sequence[ArrayShard]) -> Written:
    """Write one rank's arrays into one file, which is on disk when this returns.

    OSError: no space, no permission.
    """
    specs = {
        p.name: TensorSpec(
            dtype=DTYPES[p.dtype],
            shape=list(p.buffer.shape),
            data_ptr=p.buffer.ctypes.data,
            data_len=p.buffer.nbytes,
        )
        for p in pieces
    }
    try:
        serialize_file(specs, str(path), {"format": "pt"})
    except Exception as error:  # the library wraps the system's error in its own
        number = re.search(r"os error (\d+)", str(error))
        if number is None:
            raise OSError(f"{path}: {error}") from error
        code = int(number[1])
        raise OSError(code, os.strerror(code), str(path)) from error
    with open(path, "rb+") as file:
        os.fsync(file.fileno())
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return Written(
        path.name,
        path.stat().st_size,
        digest,
        {p.name: (p.dtype, p.shape, p.offsets) for p in pieces},
    )


def make_manifest(meta: Mapping[str, Any], written: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """A checkpoint's manifest.

    meta: step, epoch, consumed, config, fixed, loop, versions.
    written: the fields of Written of every rank.
    """
    arrays: dict[str, Any] = {}
    for rank in written:
        for name, (dtype, shape, offsets) in rank["arrays"].items():
            entry = arrays.setdefault(name, {"dtype": dtype, "shape": list(shape), "boxes": []})
            entry["boxes"].append({"file": rank["file"], "offsets": list(offsets)})
    files = {rank["file"]: {"bytes": rank["bytes"], "sha256": rank["sha256"]} for rank in written}
    manifest = {"version": VERSION, **meta, "files": files, "arrays": dict(sorted(arrays.items()))}
    return {**manifest, "hash": hash_of(manifest)}


def verify_checkpoint(path: Path, *, weights_only: bool = False) -> dict[str, Any]:
    """Compare every file and array of a checkpoint with its manifest. Returns the manifest.

    weights_only: as read_manifest()

    CorruptCheckpointError: says which file is damaged, and how.
    """
    manifest = read_manifest(path, weights_only=weights_only)
    for name, expected in manifest["files"].items():
        _check_size(path / name, expected["bytes"])
    arrays = Arrays(path, manifest)
    for name in arrays:
        arrays.check(name)
    for name, expected in manifest["files"].items():
        with open(path / name, "rb", opener=regular_only) as file:
            if hashlib.file_digest(file, "sha256").hexdigest() != expected["sha256"]:
                raise CorruptCheckpointError(
                    f"{name} does not match its hash: its content has changed"
                )
    return manifest


def _check_size(path: Path, size: int) -> None:
    try:
        with open(path, "rb", opener=regular_only) as file:
            actual = os.fstat(file.fileno()).st_size
    except FileNotFoundError:
        raise CorruptCheckpointError(f"{path.name} is missing") from None
    except OSError as error:
        raise CorruptCheckpointError(f"{path.name}: {error.strerror}") from None
    if actual != size:
        wrong = "cut off" if actual < size else "not as it was written"
        raise CorruptCheckpointError(f"{path.name} has {actual} bytes, not {size}: {wrong}")


class Arrays(Mapping[str, NDArray[Any]]):
    """The arrays of a checkpoint, read only where they are asked for.

    path: of the checkpoint.

    Reading an array raises CorruptCheckpointError where its boxes don't cover it once.
    """

    def __init__(self, path: Path, manifest: Mapping[str, Any]) -> None:
        self._path, self._arrays = path, manifest["arrays"]
        self._open: dict[str, Any] = {}
        self._names_in: dict[str, set[str]] = {}  # file -> names of its arrays
        self._checked: set[str] = set()

    def __getitem__(self, name: str) -> NDArray[Any]:
        shape = self.shape(name)
        return self.part(name, (0,) * len(shape), shape)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._arrays[name]["shape"])

    def dtype(self, name: str) -> str:
        """The name of the array's dtype in safetensors (F32)."""
        return str(self._arrays[name]["dtype"])

    def hold(self) -> None:
        """Open every file now. An open file can be read even after a live run removes it."""
        for entry in self._arrays.values():
            for box in entry["boxes"]:
                self._file(box["file"])

    def check(self, name: str) -> None:
        """Check an array. CorruptCheckpointError: its files contradict the manifest."""
        if name in self._checked:
            return
        entry, boxes = self._arrays[name], []
        for box in entry["boxes"]:
            written = self._slice(box["file"], name)
            if written.get_dtype() != entry["dtype"]:
                raise CorruptCheckpointError(
                    f"array {name} is {written.get_dtype()} in {box['file']}, not {entry['dtype']}"
                )
            size = written.get_shape()
            if len(size) != len(entry["shape"]):
                raise CorruptCheckpointError(
                    f"array {name} has another number of dimensions in {box['file']}"
                )
            boxes.append((box["offsets"], size))
        wrong = check_cover(entry["shape"], boxes)
        if wrong:
            raise CorruptCheckpointError(f"array {name}: {wrong}")
        self._checked.add(name)

    def part(self, name: str, offsets: tuple[int, ...], shape: tuple[int, ...]) -> NDArray[Any]:
        """A part of an array, put together from the boxes that ranks wrote.

        offsets: where the part begins in the array.
        """
        self.check(name)
        entry = self._arrays[name]
        part = np.empty(shape, dtype=DTYPES[entry["dtype"]])
        for box in entry["boxes"]:
            begins, written = box["offsets"], self._slice(box["file"], name)
            lows = list(map(max, offsets, begins))
            highs = [
                min(want + size, begin + length)
                for want, size, begin, length in zip(
                    offsets, shape, begins, written.get_shape(), strict=True
                )
            ]
            if any(low >= high for low, high in zip(lows, highs, strict=True)):
                continue  # the two boxes have nothing in common
            here = _slices(lows, highs, offsets)
            if here:
                part[here] = written[_slices(lows, highs, begins)]
            else:  # a single number
                part[here] = self._file(box["file"]).get_tensor(name)
        return part

    def _slice(self, file: str, name: str) -> Any:
        opened = self._file(file)
        if name not in self._names_in[file]:
            raise CorruptCheckpointError(f"array {name} is not in {file}")
        return opened.get_slice(name)

    def _file(self, file: str) -> Any:
        if file not in self._open:
            path = self._path / file
            try:
                os.close(regular_only(str(path), os.O_RDONLY))
                opened: Any = safe_open(str(path), "numpy")
                names = opened.keys()
            except (OSError, SafetensorError) as error:
                raise CorruptCheckpointError(f"{file} can't be read: {error}") from error
            self._open[file], self._names_in[file] = opened, set(names)
        return self._open[file]

    def __iter__(self) -> Iterator[str]:
        return iter(self._arrays)

    def __len__(self) -> int:
        return len(self._arrays)


def _slices(lows: Sequence[int], highs: Sequence[int], origin: Sequence[int]) -> tuple[slice, ...]:
    """[low, high) of each dimension, counted from a box's origin."""
    return tuple(
        slice(low - begin, high - begin)
        for low, high, begin in zip(lows, highs, origin, strict=True)
    )


def load(path: Path, *, weights_only: bool = False) -> Checkpoint:
    """Open a checkpoint without comparing its hashes. RunError: the manifest is damaged.

    weights_only: as read_manifest()
    """
    try:
        manifest = read_manifest(path, weights_only=weights_only)
    except CorruptCheckpointError as error:
        raise RunError(f"checkpoint {path}: {error}", "--resume another one", str(path)) from None
    return Checkpoint(
        path=str(path),
        step=manifest["step"],
        epoch=manifest["epoch"],
        consumed=manifest["consumed"],
        arrays=Arrays(path, manifest),
        loop=manifest["loop"],
    )
