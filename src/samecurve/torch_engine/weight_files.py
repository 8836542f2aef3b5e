"""Weights in files that others made: safetensors (one file, or several with an index) and torch's
own .pt, which is read with weights-only loading, never as arbitrary pickles.
"""

import json
import pickle
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

from samecurve.errors import UserError
from samecurve.torch_engine.optimizer_params import local_view

PICKLED = (".pt", ".pth", ".bin")
_NAMES = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)  # in a directory, the first that is there
_NESTED = ("model", "state_dict", "model_state_dict")
_TYPES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "I64": "int64",
    "I32": "int32",
    "C64": "complex64",
}
_KEPT = {
    torch.float64,
    torch.int64,
    torch.int32,
    torch.complex128,
}  # as they are; other floating values are read as float32, which holds them all
_WHERE = "--init-from"


@dataclass(frozen=True)
class WeightArray:
    """One array of a file.

    dtype: as torch names it. shape: as a checkpoint has it, complex values as pairs. read: its
    values, exactly, in 4 bytes or more.
    """

    dtype: str
    shape: tuple[int, ...]
    read: Callable[[], NDArray[Any]]


def read_weights(path: Path) -> tuple[dict[str, WeightArray], list[str]]:
    """path: a file, or a directory that has one of _NAMES.

    Returns arrays by name, and what the user should know. UserError: anything else, damaged, or no
    plain weights.
    """
    if path.is_dir():
        found = next((path / name for name in _NAMES if (path / name).is_file()), None)
        if found is None:
            raise UserError(
                f"{path} has no {', '.join(_NAMES[:2])}, and is neither a run nor a checkpoint",
                "a run, a checkpoint, a .safetensors or .pt file, or a directory with one of those"
                " files",
                _WHERE,
            )
        path = found
    if path.name.endswith(".index.json"):
        return _indexed(path)
    if path.suffix == ".safetensors":
        return _safetensors(path), []
    if path.suffix in PICKLED:
        return _pickled(path)
    raise UserError(
        f"{path} is no file of weights, by its name",
        f"a run, a checkpoint, or a file that ends in .safetensors, {', '.join(PICKLED)}",
        _WHERE,
    )


def _indexed(path: Path) -> tuple[dict[str, WeightArray], list[str]]:
    """Several files, and which array is in which of them."""
    try:
        places = json.loads(path.read_text())["weight_map"]
        if not isinstance(places, dict) or not all(
            isinstance(file, str) and Path(file).name == file and not file.endswith(".json")
            for file in places.values()
        ):
            raise ValueError("weight_map is no mapping of names to files beside it")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"{path} is no index of weights: {error}",
            "a directory as the Hugging Face libraries write it",
            _WHERE,
        ) from None
    arrays: dict[str, WeightArray] = {}
    words: list[str] = []
    for file in sorted(set(places.values())):
        own, said = read_weights(path.parent / file)
        arrays |= own
        words += [word for word in said if word not in words]
    if lacking := sorted(set(places) - set(arrays)):
        raise UserError(
            f"{path} names {len(lacking)} arrays that are not in their files:"
            f" {', '.join(lacking[:4])}",
            "get the files again",
            _WHERE,
        )
    return arrays, words


def _safetensors(path: Path) -> dict[str, WeightArray]:
    try:
        opened: Any = safe_open(str(path), "pt")
        slices = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118 - no mapping
    except (SafetensorError, OSError) as error:
        raise UserError(
            f"{path} can't be read: {error}", "is it whole? get it again", _WHERE
        ) from None
    arrays: dict[str, WeightArray] = {}
    for name, part in slices.items():
        kind = _TYPES.get(part.get_dtype())
        if kind is None:
            raise UserError(
                f"{path}: {name} holds {part.get_dtype()} values",
                f"weights in {', '.join(_TYPES)}",
                _WHERE,
            )
        shape = tuple(part.get_shape())
        arrays[name] = WeightArray(
            kind,
            (*shape, 2) if kind == "complex64" else shape,
            lambda name=name: _values(opened.get_tensor(name)),  # type: ignore[misc]
        )
    return arrays


def _pickled(path: Path) -> tuple[dict[str, WeightArray], list[str]]:
    found, words = _state_dict(_unpickled(path), path)
    arrays = {}
    for name, tensor in found.items():
        if (
            tensor.layout != torch.strided
            or tensor.is_quantized
            or not (tensor.is_floating_point() or tensor.is_complex() or tensor.dtype in _KEPT)
        ):
            raise UserError(
                f"{path}: {name} is a {str(tensor.layout).removeprefix('torch.')} tensor of"
                f" {str(tensor.dtype).removeprefix('torch.')}",
                f"plain weights in {', '.join(_TYPES.values())}",
                _WHERE,
            )
        shape = tuple(tensor.shape)
        arrays[name] = WeightArray(
            str(tensor.dtype).removeprefix("torch."),
            (*shape, 2) if tensor.is_complex() else shape,
            lambda tensor=tensor: _values(tensor),  # type: ignore[misc]
        )
    return arrays, words


def _unpickled(path: Path) -> Any:
    """What torch.save wrote, large files page by page where their format allows that."""
    if not path.is_file():
        raise UserError(f"there is no file {path}", "check the path", _WHERE)
    try:
        try:
            return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        except RuntimeError as error:
            if "mmap can only be used" not in str(error):
                raise
            return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        named = re.search(r"GLOBAL (\S+)|(?:class|function|type) (\S+)", str(error))
        what = f": it holds {next(group for group in named.groups() if group)}" if named else ""
        raise UserError(
            f"{path} is more than weights, and nothing else is loaded from a pickle, which could"
            f" run any code{what}",
            "save the weights alone where you trust the file: torch.save(model.state_dict(),"
            " 'weights.pt'), or safetensors.torch.save_file",
            _WHERE,
        ) from None
    except Exception as error:  # of any kind: what is no pickle is read as one
        raise UserError(
            f"{path} can't be read: {(str(error).splitlines() or [type(error).__name__])[0]}",
            "is it whole, and written by torch.save? get it again",
            _WHERE,
        ) from None


def _state_dict(found: Any, path: Path) -> tuple[dict[str, torch.Tensor], list[str]]:
    """The state dict that a file is, or has under one of the usual names."""
    if _is_state(found):
        return found, []
    nested = [key for key in _NESTED if isinstance(found, Mapping) and _is_state(found.get(key))]
    if len(nested) == 1:
        rest = [str(key) for key in found if key != nested[0]]
        return found[nested[0]], [
            f'the weights are those under "{nested[0]}"'
            + (
                f"; left out: {', '.join(rest[:6])}{' ...' if len(rest) > 6 else ''}"
                if rest
                else ""
            )
        ]
    holds = (
        f"a mapping with {', '.join(map(str, list(found)[:6])) or 'nothing'}"
        if isinstance(found, Mapping)
        else f"of type {type(found).__name__}"
    )
    several = f"; {' and '.join(nested)} are each a state dict" if nested else ""
    raise UserError(
        f"{path} holds no single state dict: it is {holds}{several}",
        f"torch.save(model.state_dict(), ...), or that under {', '.join(_NESTED)}",
        _WHERE,
    )


def _is_state(found: Any) -> bool:
    return (
        isinstance(found, Mapping)
        and bool(found)
        and all(
            isinstance(name, str) and isinstance(value, torch.Tensor)
            for name, value in found.items()
        )
    )


def _values(tensor: torch.Tensor) -> NDArray[Any]:
    tensor = tensor.detach()
    if tensor.dtype not in _KEPT:
        tensor = tensor.to(torch.complex64 if tensor.is_complex() else torch.float32)
    found: NDArray[Any] = local_view(tensor.resolve_conj().resolve_neg()).contiguous().numpy()
    return found
