"""A checkpoint's manifest: its form, and the only place where the form is checked.

A checkpoint may come from anywhere, so every entry is checked. Files are named without a directory,
are ordinary files, and have the size and hash that the manifest gives. The boxes of an array cover
it once. The manifest's own hash reveals damage, not intent.
"""

import hashlib
import json
import math
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from samecurve.core.config.param_groups import ParamGroup
from samecurve.core.planning.fixed import Fixed
from samecurve.core.protocols import TASK_STATE, Counters
from samecurve.core.system import read_file_bytes

VERSION = 1
MANIFEST = "manifest.json"
DTYPES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U64": "uint64",
    "U32": "uint32",
    "U16": "uint16",
    "U8": "uint8",
    "BOOL": "bool",
}
_MOST_BYTES = 1 << 30  # of a manifest, which has 100 bytes for each array and rank
_MOST_DIMENSIONS = 32
_LARGEST = 1 << 62
_MOST_LOSS = sys.float_info.max
_FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,200}")
_STEP_NAME = re.compile(r"step-[0-9]{8,19}")


class CorruptCheckpointError(Exception):
    """A checkpoint that can't be trusted. The message says what is wrong."""


def name_of(step: int) -> str:
    return f"step-{step:08d}"


def is_step_name(name: str) -> bool:
    """Whether a directory has the name of a checkpoint, such as step-00000500."""
    return _STEP_NAME.fullmatch(name) is not None


def hash_of(manifest: Mapping[str, Any]) -> str:
    """The hash of a manifest, computed without the entry that holds it."""
    values = {key: value for key, value in manifest.items() if key != "hash"}
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def read_manifest(path: Path, *, weights_only: bool = False) -> dict[str, Any]:
    """The manifest of the checkpoint in the directory `path`.

    weights_only: the checkpoint is a copy of weights to begin from, which no run has saved

    CorruptCheckpointError: there is no manifest, it is not one of ours, or an entry is impossible.
    """
    if path.is_symlink():
        raise CorruptCheckpointError(f"{path.name} is a link, not a directory")
    try:
        manifest = json.loads(read_file_bytes(path / MANIFEST, _MOST_BYTES))
    except OSError as error:
        raise CorruptCheckpointError(f"{MANIFEST} can't be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise CorruptCheckpointError(f"its manifest can't be read: {error}") from None
    if not isinstance(manifest, dict):
        raise CorruptCheckpointError("its manifest is no mapping")
    if manifest.get("version") != VERSION:
        raise CorruptCheckpointError(
            f"its format is version {manifest.get('version')}, this program reads {VERSION}"
        )
    if manifest.get("hash") != hash_of(manifest):
        raise CorruptCheckpointError("its manifest does not match its own hash")
    try:
        if not weights_only:
            _check_run(manifest)
        _check(manifest)
    except _WrongError as wrong:
        raise CorruptCheckpointError(f"its manifest: {wrong}") from None
    if is_step_name(path.name) and path.name != name_of(manifest["step"]):
        raise CorruptCheckpointError(
            f"its manifest is of step {manifest['step']}, its directory is {path.name}"
        )
    return manifest


class _WrongError(Exception):
    """An impossible entry of a manifest."""


def _check(manifest: Mapping[str, Any]) -> None:
    for name in ("step", "epoch", "consumed"):
        _integer(manifest, name)
    _check_counters(_mapping(manifest, "loop"))
    files, arrays = _mapping(manifest, "files"), _mapping(manifest, "arrays")
    for name in files:
        _check_file(name, _mapping(files, name))
    for name in arrays:
        _check_array(name, _mapping(arrays, name), files)


def _check_run(manifest: Mapping[str, Any]) -> None:
    """Check the entries that a run needs to go on."""
    config = _mapping(manifest, "config")
    try:
        for group in config.get("optimizer.groups", []):
            ParamGroup(**group)
    except (TypeError, ValueError):
        raise _WrongError("config: optimizer.groups is no list of groups") from None
    if not isinstance(config.get("task", ""), str):
        raise _WrongError("config: task is no text")
    try:
        fixed = Fixed.from_json(_mapping(manifest, "fixed"))
    except ValueError as error:
        raise _WrongError(f"fixed: {error}") from None
    if fixed.anchor.step > _integer(manifest, "step") or fixed.anchor.consumed > fixed.samples:
        raise _WrongError("fixed: the anchor lies beyond the step")


def _check_counters(loop: Mapping[str, Any]) -> None:
    known = {*(field.name for field in fields(Counters)), "best_loss", TASK_STATE}
    unknown = loop.keys() - known
    if TASK_STATE in loop:
        _mapping(loop, TASK_STATE)
    if unknown:
        raise _WrongError(f"loop: {min(unknown)} is not known")
    for name in ("best_step", "metrics_step", "skipped", "early_step", "early_waited"):
        if loop.get(name) is not None:
            _integer(loop, name)
    metrics = _mapping(loop, "metrics") if "metrics" in loop else {}
    values = {name: loop.get(name) for name in ("best_loss", "best_value", "early_value")}
    for name, value in {**metrics, **values}.items():
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if value is not None and not (is_number and not abs(value) > _MOST_LOSS):
            raise _WrongError(f"loop: {name} is no number")


def _check_file(name: str, entry: Mapping[str, Any]) -> None:
    if not _FILE_NAME.fullmatch(name):
        raise _WrongError(f"{name[:80]!r} is no file name: a file lies beside its manifest")
    _integer(entry, "bytes")
    if not re.fullmatch(r"[0-9a-f]{64}", str(entry.get("sha256"))):
        raise _WrongError(f"{name} has no sha256")


def _check_array(name: str, entry: Mapping[str, Any], files: Mapping[str, Any]) -> None:
    if str(entry.get("dtype")) not in DTYPES:
        raise _WrongError(f"array {name}: no dtype is {entry.get('dtype')}")
    shape = _integers(entry, "shape", name)
    if math.prod(shape) > _LARGEST:
        raise _WrongError(f"array {name}: nothing is as large as {shape}")
    boxes = entry.get("boxes")
    if not isinstance(boxes, list) or not boxes:
        raise _WrongError(f"array {name} lies nowhere")
    seen = set()
    for box in boxes:
        file = box.get("file") if isinstance(box, dict) else None
        if not isinstance(file, str) or file not in files or file in seen:
            raise _WrongError(f"array {name}: {file} is none of the files, or is named twice")
        seen.add(file)
        if len(_integers(box, "offsets", name)) != len(shape):
            raise _WrongError(f"array {name}: a box has another number of dimensions")


def _integers(entry: Mapping[str, Any], key: str, array: str) -> list[int]:
    values = entry.get(key)
    if (
        not isinstance(values, list)
        or len(values) > _MOST_DIMENSIONS
        or not all(type(value) is int and 0 <= value < _LARGEST for value in values)
    ):
        raise _WrongError(f"array {array}: {key} is no list of sizes")
    return values


def _integer(values: Mapping[str, Any], key: str) -> int:
    value = values.get(key)
    if type(value) is not int or not 0 <= value < _LARGEST:
        raise _WrongError(f"{key} is no number" if key in values else f"{key} is missing")
    return value


def _mapping(values: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = values.get(key)
    if not isinstance(value, dict):
        raise _WrongError(f"{key[:80]} is no mapping" if key in values else f"{key} is missing")
    return value


def check_cover(
    shape: Sequence[int], boxes: Sequence[tuple[Sequence[int], Sequence[int]]]
) -> str | None:
    """Check that boxes cover each value of an array once.

    shape: of the array
    boxes: (offsets, shape) of each box

    Returns what is wrong; None: nothing is.
    """
    # boxes that end after the last box begins
    begun: list[tuple[Sequence[int], list[int]]] = []
    covered = 0
    for offsets, size in sorted(boxes, key=lambda box: tuple(box[0])):
        ends = [begin + length for begin, length in zip(offsets, size, strict=True)]
        if any(end > limit for end, limit in zip(ends, shape, strict=True)):
            return f"a box reaches beyond its shape {tuple(shape)}"
        if not math.prod(size):
            continue
        covered += math.prod(size)
        if shape:
            begun = [(low, high) for low, high in begun if high[0] > offsets[0]]
        if any(_meet(low, high, offsets, ends) for low, high in begun):
            return "two of its boxes overlap"
        begun.append((offsets, ends))
    missing = math.prod(shape) - covered
    return f"{missing} of its {math.prod(shape)} values lie in no box" if missing else None


def _meet(
    low: Sequence[int], high: Sequence[int], offsets: Sequence[int], ends: Sequence[int]
) -> bool:
    return all(
        max(*begins) < min(*stops)
        for begins, stops in zip(
            zip(low, offsets, strict=True), zip(high, ends, strict=True), strict=True
        )
    )
