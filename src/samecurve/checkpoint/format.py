"""A checkpoint on disk: named arrays in safetensors files, and a manifest that says where each one
lies.

    checkpoints/step-00000500/manifest.json  rank-0-of-2.safetensors  rank-1-of-2.safetensors

It knows no topology and no engine. An array may lie in several files as boxes (offsets into the
whole); the hashes in the manifest tell a flipped bit or a torn file before anything is trained on
it.
"""

import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import TensorSpec, safe_open, serialize_file

from samecurve.core.protocols import ArrayShard, Checkpoint
from samecurve.errors import RunError

VERSION = 1
MANIFEST = "manifest.json"
_DTYPES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "I64": "int64",
    "I32": "int32",
}


class CorruptCheckpointError(Exception):
    """A checkpoint that can't be trusted: what is wrong with it."""


@dataclass(frozen=True)
class Written:
    """One rank's file."""

    file: str
    bytes: int
    sha256: str
    # the boxes in it: name -> dtype, shape of the whole array, offsets of the box
    arrays: Mapping[str, tuple[str, tuple[int, ...], tuple[int, ...]]]

    def to_json(self) -> dict[str, Any]:
        return {
            "file": self.file,
            "bytes": self.bytes,
            "sha256": self.sha256,
            "arrays": self.arrays,
        }


def name_of(step: int) -> str:
    return f"step-{step:08d}"


def write_pieces(path: Path, pieces: Sequence[ArrayShard]) -> Written:
    """One rank's arrays into one file, on disk when this returns.

    OSError: no space, no permission.
    """
    specs = {
        p.name: TensorSpec(
            dtype=_DTYPES[p.dtype],
            shape=list(p.buffer.shape),
            data_ptr=p.buffer.ctypes.data,
            data_len=p.buffer.nbytes,
        )
        for p in pieces
    }
    try:
        serialize_file(specs, str(path), {"format": "pt"})
    except Exception as error:  # the library wraps the system's error in its own
        free = os.statvfs(path.parent)
        raise OSError(f"{error} ({free.f_bavail * free.f_frsize} bytes free)") from error
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
    written: Written.to_json() of every rank.
    """
    arrays: dict[str, Any] = {}
    for rank in written:
        for name, (dtype, shape, offsets) in rank["arrays"].items():
            entry = arrays.setdefault(name, {"dtype": dtype, "shape": list(shape), "boxes": []})
            entry["boxes"].append({"file": rank["file"], "offsets": list(offsets)})
    files = {rank["file"]: {"bytes": rank["bytes"], "sha256": rank["sha256"]} for rank in written}
    manifest = {"version": VERSION, **meta, "files": files, "arrays": dict(sorted(arrays.items()))}
    return {**manifest, "hash": _hash(manifest)}


def _hash(manifest: Mapping[str, Any]) -> str:
    """Of a manifest without its own hash."""
    values = {key: value for key, value in manifest.items() if key != "hash"}
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def read_manifest(path: Path) -> dict[str, Any]:
    """CorruptCheckpointError: no manifest, or not one of ours."""
    try:
        manifest = json.loads((path / MANIFEST).read_text())
    except (OSError, ValueError) as error:
        raise CorruptCheckpointError(f"its manifest can't be read: {error}") from None
    if not isinstance(manifest, dict):
        raise CorruptCheckpointError("its manifest is no mapping")
    if manifest.get("version") != VERSION:
        raise CorruptCheckpointError(
            f"its format is version {manifest.get('version')}, this program reads {VERSION}"
        )
    if manifest.get("hash") != _hash(manifest):
        raise CorruptCheckpointError("its manifest does not match its own hash")
    return manifest


def verify(path: Path) -> dict[str, Any]:
    """Its manifest, every file's size and hash checked against it.

    CorruptCheckpointError: which file is damaged, and how.
    """
    manifest = read_manifest(path)
    for name, expected in manifest["files"].items():
        try:
            size = (path / name).stat().st_size
        except OSError:
            raise CorruptCheckpointError(f"{name} is missing") from None
        if size != expected["bytes"]:
            raise CorruptCheckpointError(
                f"{name} has {size} bytes, not {expected['bytes']}: cut off"
            )
        with open(path / name, "rb") as file:
            if hashlib.file_digest(file, "sha256").hexdigest() != expected["sha256"]:
                raise CorruptCheckpointError(
                    f"{name} does not match its hash: its content has changed"
                )
    return manifest


class Arrays(Mapping[str, NDArray[Any]]):
    """The arrays of a checkpoint, of which no more is read than is asked for.

    path: of the checkpoint.
    """

    def __init__(self, path: Path, manifest: Mapping[str, Any]) -> None:
        self._path, self._arrays = path, manifest["arrays"]
        self._open: dict[str, Any] = {}

    def __getitem__(self, name: str) -> NDArray[Any]:
        shape = self.shape(name)
        return self.part(name, (0,) * len(shape), shape)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._arrays[name]["shape"])

    def dtype(self, name: str) -> str:
        """As safetensors names it (F32)."""
        return str(self._arrays[name]["dtype"])

    def hold(self) -> None:
        """Open every file now: what is open can still be read when a live run takes its older
        checkpoints away.
        """
        for entry in self._arrays.values():
            for box in entry["boxes"]:
                self._file(box["file"])

    def part(self, name: str, offsets: tuple[int, ...], shape: tuple[int, ...]) -> NDArray[Any]:
        """The box of this shape that begins at `offsets`, put together from the boxes that ranks
        wrote.
        """
        entry = self._arrays[name]
        part = np.empty(shape, dtype=_DTYPES[entry["dtype"]])
        for box in entry["boxes"]:
            file, begins = self._file(box["file"]), box["offsets"]
            written = file.get_slice(name)
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
                part[here] = file.get_tensor(name)
        return part

    def _file(self, file: str) -> Any:
        if file not in self._open:
            self._open[file] = safe_open(str(self._path / file), "numpy")
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


def load(path: Path) -> Checkpoint:
    """A checkpoint opened (not verified). RunError: damaged."""
    try:
        manifest = read_manifest(path)
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
