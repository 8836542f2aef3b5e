"""Files of weights and configs, read no further than their headers."""

import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from samecurve.seam import UserError, read_file_bytes
from samecurve_products.pictures.diffusion.families.opened import WHERE

PICKLED = (".ckpt", ".pt", ".pth", ".bin")
VARIANTS = ("", "fp16", "bf16")  # of weights, in the order in which they are looked for
_MOST_HEADER = 1 << 27  # bytes of a safetensors file's header
_MOST_CONFIG = 1 << 26  # bytes of a config, or of an index
_POINTER = b"version https://git-lfs"


@dataclass(frozen=True)
class ArrayHeader:
    """An array of a safetensors file, as its header describes it."""

    dtype: str  # as the file names it: F32, BF16
    shape: tuple[int, ...]


def read_config(file: Path, where: str = WHERE) -> dict[str, Any]:
    """A JSON object of a pipeline. UserError: the file is missing or damaged."""
    try:
        values = json.loads(read_file_bytes(file, _MOST_CONFIG))
        if not isinstance(values, dict):
            raise ValueError("it is no JSON object")
    except FileNotFoundError:
        raise UserError(f"there is no {file}", "get the pipeline's files again", where) from None
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(
            f"{file} can't be read: {error}", "get the pipeline's files again", where
        ) from None
    return values


def read_header(file: Path, where: str = WHERE) -> dict[str, ArrayHeader]:
    """The arrays of a safetensors file, by name. UserError: it is none, or not whole."""
    try:
        size = file.stat().st_size
        with file.open("rb") as opened:
            start = opened.read(8)
            if (start + opened.read(len(_POINTER) - 8)) == _POINTER:
                raise UserError(
                    f"{file} is a Git LFS pointer, and not the weights themselves",
                    f"git -C {file.parent} lfs pull",
                    where,
                )
            if len(start) < 8:
                raise ValueError(f"it has {len(start)} bytes")
            (length,) = struct.unpack("<Q", start)
            if length > min(size - 8, _MOST_HEADER):
                raise ValueError("its header is longer than the file")
            opened.seek(8)
            header = json.loads(opened.read(length))
        arrays = {name: entry for name, entry in header.items() if name != "__metadata__"}
        end = max((int(entry["data_offsets"][1]) for entry in arrays.values()), default=0)
        if size < 8 + length + end:
            raise ValueError(f"it ends early, at {size} of {8 + length + end} bytes")
        return {
            name: ArrayHeader(str(entry["dtype"]), tuple(map(int, entry["shape"])))
            for name, entry in arrays.items()
        }
    except (OSError, struct.error, ValueError, TypeError, KeyError, AttributeError) as error:
        raise UserError(
            f"{file} can't be read as a safetensors file: {error}",
            "is it whole? get it again",
            where,
        ) from None


def find_weights(directory: Path, stem: str, where: str = WHERE) -> Path | None:
    """The weights in a component's directory: one file, or the index of several; None: none.

    stem: the file's name as the library writes it, without its endings

    UserError: the index is damaged, or a file that it names is missing.
    """
    for variant in VARIANTS:
        dotted = f".{variant}" if variant else ""
        single = directory / f"{stem}{dotted}.safetensors"
        index = directory / f"{stem}.safetensors.index{dotted}.json"
        if single.is_file():
            return single
        if index.is_file():
            weight_files(index, where)
            return index
    return None


def weight_files(weights: Path, where: str = WHERE) -> tuple[Path, ...]:
    """The files of weights that find_weights() stands for. UserError: one is missing."""
    if weights.suffix != ".json":
        return (weights,)
    names = read_config(weights, where).get("weight_map")
    if not isinstance(names, Mapping) or not all(map(_is_beside, names.values())):
        raise UserError(
            f"{weights} is no index of weights", "get the pipeline's files again", where
        )
    files = tuple(weights.parent / name for name in sorted(set(names.values())))
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        raise UserError(
            f"{weights.parent} lacks {len(missing)} of {len(files)} files of weights:"
            f" {', '.join(missing[:3])}",
            "get these files too",
            where,
        )
    return files


def has_pickles(directory: Path) -> bool:
    """Whether the directory holds weights as pickles."""
    return any(file.suffix in PICKLED for file in directory.iterdir())


def _is_beside(name: object) -> bool:
    return isinstance(name, str) and Path(name).name == name and name.endswith(".safetensors")
