"""Weights in files that other programs made: safetensors (one file, or several with an index) and
torch's .pt files, which are read with weights-only loading and never as arbitrary pickles.
"""

import json
import pickle
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeGuard

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

from samecurve.errors import UserError
from samecurve.torch_engine.optimizers import local_view

PICKLED = (".pt", ".pth", ".bin")
# the files that a directory is searched for; the first one that is there is read
_FILE_NAMES = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
    "diffusion_pytorch_model.safetensors",
    "diffusion_pytorch_model.safetensors.index.json",
    "diffusion_pytorch_model.fp16.safetensors",
    "diffusion_pytorch_model.safetensors.index.fp16.json",
    "diffusion_pytorch_model.bf16.safetensors",
    "diffusion_pytorch_model.safetensors.index.bf16.json",
)
_INDEX = re.compile(r"\.index(\.\w+)?\.json$")
_NESTED_KEYS = ("model", "state_dict", "model_state_dict")
_SAFETENSORS_DTYPES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "BOOL": "bool",
    "C64": "complex64",
}
# formats that are read as they are; other floating values are read as float32, which holds them
_KEPT_DTYPES = {
    torch.float64,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.bool,
    torch.complex128,
}
_WHERE = "--init-from"


@dataclass(frozen=True)
class WeightArray:
    """An array in a file of weights."""

    dtype: str  # as torch names it
    shape: tuple[int, ...]  # as a checkpoint has it, complex values as pairs
    read: Callable[[], NDArray[np.generic]]  # its values, unrounded, in 4 bytes or more


def read_weights(path: Path) -> tuple[dict[str, WeightArray], list[str]]:
    """The arrays of a file by name, and lines that the user should read.

    path: a file, or a directory that has one of _FILE_NAMES

    UserError: there is no such file, it is damaged, or it holds other things than plain weights.
    """
    if path.is_dir():
        files = [path / name for name in _FILE_NAMES if (path / name).is_file()]
        if not files:
            raise UserError(
                f"{path} has no {', '.join(_FILE_NAMES[:2])},"
                " and is neither a run nor a checkpoint",
                "a run, a checkpoint, a .safetensors or .pt file, or a directory with one of those"
                " files",
                _WHERE,
            )
        path = files[0]
    if _INDEX.search(path.name):
        return _read_indexed(path)
    if path.suffix == ".safetensors":
        return _read_safetensors(path), []
    if path.suffix in PICKLED:
        return _read_pickled(path)
    raise UserError(
        f"{path} is no file of weights, by its name",
        f"a run, a checkpoint, or a file that ends in .safetensors, {', '.join(PICKLED)}",
        _WHERE,
    )


def read_metadata(path: Path) -> Mapping[str, str]:
    """The texts that a safetensors file has beside its arrays. UserError: it is damaged."""
    try:
        opened: Any = safe_open(str(path), "pt")
        return opened.metadata() or {}
    except (SafetensorError, OSError) as error:
        raise UserError(
            f"{path} can't be read: {error}", "is it whole? get it again", _WHERE
        ) from None


def _read_indexed(path: Path) -> tuple[dict[str, WeightArray], list[str]]:
    """The arrays of several files, by an index that names the file of each array."""
    try:
        file_of = json.loads(path.read_text())["weight_map"]
        if not isinstance(file_of, dict) or not all(map(_is_beside, file_of.values())):
            raise ValueError("weight_map is no mapping of names to files beside it")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"{path} is no index of weights: {error}",
            "a directory as the Hugging Face libraries write it",
            _WHERE,
        ) from None
    arrays: dict[str, WeightArray] = {}
    remarks: dict[str, None] = {}
    for file in sorted(set(file_of.values())):
        arrays_of_file, remarks_of_file = read_weights(path.parent / file)
        arrays |= arrays_of_file
        remarks |= dict.fromkeys(remarks_of_file)
    if missing := sorted(set(file_of) - set(arrays)):
        raise UserError(
            f"{path} names {len(missing)} arrays that are not in their files:"
            f" {', '.join(missing[:4])}",
            "get the files again",
            _WHERE,
        )
    return arrays, list(remarks)


def _is_beside(file: object) -> bool:
    return isinstance(file, str) and Path(file).name == file and not file.endswith(".json")


def _read_safetensors(path: Path) -> dict[str, WeightArray]:
    try:
        opened: Any = safe_open(str(path), "pt")
        slices = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118 no mapping
    except (SafetensorError, OSError) as error:
        raise UserError(
            f"{path} can't be read: {error}", "is it whole? get it again", _WHERE
        ) from None
    arrays: dict[str, WeightArray] = {}
    for name, part in slices.items():
        dtype = _SAFETENSORS_DTYPES.get(part.get_dtype())
        if dtype is None:
            raise UserError(
                f"{path}: {name} holds {part.get_dtype()} values",
                f"weights in {', '.join(_SAFETENSORS_DTYPES)}",
                _WHERE,
            )
        shape = tuple(part.get_shape())
        if dtype == "complex64":
            shape = (*shape, 2)

        def read(name: str = name) -> NDArray[np.generic]:
            return _to_numpy(opened.get_tensor(name))

        arrays[name] = WeightArray(dtype, shape, read)
    return arrays


def _read_pickled(path: Path) -> tuple[dict[str, WeightArray], list[str]]:
    state_dict, remarks = _state_dict(_unpickled(path), path)
    arrays = {}
    for name, tensor in state_dict.items():
        dtype = str(tensor.dtype).removeprefix("torch.")
        is_number = tensor.is_floating_point() or tensor.is_complex()
        if (
            tensor.layout != torch.strided
            or tensor.is_quantized
            or not (is_number or tensor.dtype in _KEPT_DTYPES)
        ):
            layout = str(tensor.layout).removeprefix("torch.")
            raise UserError(
                f"{path}: {name} is a {layout} tensor of {dtype}",
                f"plain weights in {', '.join(_SAFETENSORS_DTYPES.values())}",
                _WHERE,
            )
        shape = tuple(tensor.shape)
        if tensor.is_complex():
            shape = (*shape, 2)
        arrays[name] = WeightArray(dtype, shape, partial(_to_numpy, tensor))
    return arrays, remarks


def _unpickled(path: Path) -> Any:
    """The object that torch.save() wrote, mapped into memory where the file format allows that."""
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
        what = f": it holds {named.group(1) or named.group(2)}" if named else ""
        raise UserError(
            f"{path} is more than weights, and nothing else is loaded from a pickle, which could"
            f" run any code{what}",
            "save the weights alone where you trust the file: torch.save(model.state_dict(),"
            " 'weights.pt'), or safetensors.torch.save_file",
            _WHERE,
        ) from None
    except Exception as error:  # any kind: the file may be no pickle at all
        first_line = (str(error).splitlines() or [type(error).__name__])[0]
        raise UserError(
            f"{path} can't be read: {first_line}",
            "is it whole, and written by torch.save? get it again",
            _WHERE,
        ) from None


def _state_dict(content: object, path: Path) -> tuple[dict[str, torch.Tensor], list[str]]:
    """The state dict of a file (all of it, or a part of a usual name), and lines for the user."""
    if _is_state_dict(content):
        return content, []
    if not isinstance(content, Mapping):
        content_text = f"of type {type(content).__name__}"
        nested = {}
    else:
        keys = [str(key) for key in content]
        content_text = f"a mapping with {', '.join(keys[:6]) or 'nothing'}"
        nested = {key: value for key in _NESTED_KEYS if _is_state_dict(value := content.get(key))}
    if len(nested) == 1:
        ((chosen, state_dict),) = nested.items()
        rest = [key for key in keys if key != chosen]
        more = " ..." if len(rest) > 6 else ""
        left_out = f"; left out: {', '.join(rest[:6])}{more}" if rest else ""
        return state_dict, [f'the weights are those under "{chosen}"{left_out}']
    several = f"; {' and '.join(nested)} are each a state dict" if nested else ""
    raise UserError(
        f"{path} holds no single state dict: it is {content_text}{several}",
        f"torch.save(model.state_dict(), ...), or that under {', '.join(_NESTED_KEYS)}",
        _WHERE,
    )


def _is_state_dict(content: object) -> TypeGuard[dict[str, torch.Tensor]]:
    return (
        isinstance(content, Mapping)
        and bool(content)
        and all(
            isinstance(name, str) and isinstance(value, torch.Tensor)
            for name, value in content.items()
        )
    )


def _to_numpy(tensor: torch.Tensor) -> NDArray[np.generic]:
    tensor = tensor.detach()
    if tensor.dtype not in _KEPT_DTYPES:
        tensor = tensor.to(torch.complex64 if tensor.is_complex() else torch.float32)
    values: NDArray[np.generic] = (
        local_view(tensor.resolve_conj().resolve_neg()).contiguous().numpy()
    )
    return values
