"""Values of attributes as JSON has them, and back: numbers, texts, arrays, lists and dicts."""

import math
from base64 import b64decode, b64encode
from collections import deque
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

_MOST_BYTES = 1 << 16  # of one attribute
_LISTS = {kind.__name__: kind for kind in (list, tuple, set, deque)}


class CantBeWrittenError(Exception):
    """The value is too large, or of another kind."""


def written(value: object) -> Any:
    """The value as JSON has it.

    CantBeWrittenError: it is none of the kinds above, or has more than 64 KiB.
    """
    budget = [_MOST_BYTES]
    return _written(value, budget)


def _written(value: Any, budget: list[int]) -> Any:
    """budget: bytes that are left, in a list of one number"""
    kind = type(value)
    is_array = kind in {torch.Tensor, np.ndarray}
    budget[0] -= value.nbytes if is_array else len(value) if kind is str else 8
    if budget[0] < 0:
        raise CantBeWrittenError
    if value is None or kind in {bool, int, str} or (kind is float and math.isfinite(value)):
        return value
    if kind is float:
        return {"float": str(value)}
    if kind is torch.Tensor and value.layout is torch.strided:
        numbers = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
        return _array("tensor", numbers, str(value.dtype).removeprefix("torch."), value.shape)
    if isinstance(value, np.ndarray | np.generic) and value.dtype.kind in "biufc":
        return _array("numpy", np.asarray(value), value.dtype.str, value.shape)
    if kind is dict:
        pairs = [[_written(part, budget) for part in pair] for pair in value.items()]
        return {"dict": pairs}
    if kind in _LISTS.values():
        # a set of texts has another order in each process
        items = sorted(value, key=repr) if kind is set else value
        return {kind.__name__: [_written(one, budget) for one in items]}
    raise CantBeWrittenError


def _array(kind: str, numbers: np.ndarray[Any, Any], dtype: str, shape: Any) -> Any:
    return {kind: b64encode(numbers.tobytes()).decode(), "dtype": dtype, "shape": list(shape)}


def read(value: Any) -> Any:
    """The value that written() was given."""
    if not isinstance(value, Mapping):
        return value
    kind, inner = next(iter(value.items()))
    if kind == "float":
        return float(inner)
    if kind == "dict":
        return {read(key): read(one) for key, one in inner}
    if kind in _LISTS:
        return _LISTS[kind](read(one) for one in inner)
    numbers = np.frombuffer(b64decode(inner), np.uint8).copy()
    if kind == "tensor":
        flat = torch.from_numpy(numbers).view(getattr(torch, value["dtype"]))
        return flat.reshape(value["shape"])
    array = numbers.view(value["dtype"]).reshape(value["shape"])
    return array if value["shape"] else array[()]
