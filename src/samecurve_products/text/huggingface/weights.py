"""Weights as the library's files hold them, converted to the model's names and shapes, and back.

Some models keep in one array what files hold in several (experts). The library describes these
conversions; its own operations are applied here, array by array, when an array is read.
"""

import hashlib
import re
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from samecurve_products.lora import StoredArray


def from_files(model: Any, arrays: Mapping[str, StoredArray]) -> dict[str, StoredArray]:
    """Map a directory's arrays to the model's own names; no value is read.

    model: without values
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import (
        WeightConverter,
        WeightRenaming,
        dot_natural_key,
        rename_source_key,
    )

    transforms = get_model_conversion_mapping(model)
    renamings = [entry for entry in transforms if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in transforms if isinstance(entry, WeightConverter)]
    known, prefix = model.state_dict(), model.base_model_prefix
    result: dict[str, StoredArray] = {}
    joined: dict[str, list[tuple[str, str]]] = {}  # name here -> (name there, pattern)
    for name in sorted(arrays, key=dot_natural_key):
        renamed, pattern = rename_source_key(name, renamings, converters, prefix, known)
        if renamed not in known and name in known:
            renamed, pattern = name, None
        if renamed not in known and _is_ignored(model, name):
            continue
        if pattern is None:
            result[renamed] = arrays[name]
        else:
            joined.setdefault(renamed, []).append((name, pattern))
    operations = {pattern: entry for entry in converters for pattern in entry.source_patterns}
    for target, sources in joined.items():
        result |= _joined(model, target, sources, operations, arrays)
    return result


def with_new_head(model: Any, arrays: Mapping[str, StoredArray]) -> dict[str, StoredArray]:
    """The arrays of a base model with a new head, and without the head of another model.

    New values follow the library's rule and are drawn from the array's name, so every process
    makes the same. Arrays that the base lacks are reported by the check of weights.

    model: without values
    """
    known, base = model.state_dict(), f"{model.base_model_prefix}."
    result = {
        name: array for name, array in arrays.items() if name in known or name.startswith(base)
    }
    own = [name for name, _ in model.named_parameters()]  # tied weights once
    absent = [name for name in own if name not in arrays and not name.startswith(base)]
    if not arrays or not any(name.startswith(base) for name in result):
        return dict(arrays)
    first = next(iter(arrays.values()))
    for name in absent:
        read = partial(_new_value, model, name)
        shape = tuple(known[name].shape)
        result[name] = replace(first, dtype="float32", shape=shape, read=read)
    return result


def _new_value(model: Any, name: str) -> NDArray[Any]:
    """A weight in the library's initial spread; a bias of zeros."""
    shape = tuple(model.state_dict()[name].shape)
    if len(shape) < 2:
        return np.zeros(shape, np.float32)
    spread = float(getattr(model.config, "initializer_range", 0.02))
    key = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8])
    random = np.random.default_rng(key)
    return random.normal(0.0, spread, shape).astype(np.float32)


def to_files(model: Any, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Map a model's tensors to the names and shapes that save_pretrained() writes."""
    from transformers.core_model_loading import revert_weight_conversion

    return dict(revert_weight_conversion(model, dict(tensors)))


def _is_ignored(model: nn.Module, name: str) -> bool:
    """Whether an array follows from the config: old files have it, and the model does not."""
    patterns = getattr(model, "_keys_to_ignore_on_load_unexpected", None) or []
    computed = name.endswith("rotary_emb.inv_freq")
    return computed or any(re.search(pattern, name) for pattern in patterns)


def _joined(
    model: Any,
    target: str,
    sources: list[tuple[str, str]],
    operations: Mapping[str, Any],
    arrays: Mapping[str, StoredArray],
) -> dict[str, StoredArray]:
    """Arrays joined from several; the same operations on the meta device give the shapes."""

    def convert(*, real: bool) -> Mapping[str, Any]:
        converter = deepcopy(operations[sources[0][1]])
        for name, pattern in sources:
            array = arrays[name]
            tensor = torch.empty(array.shape, device="meta")
            if real:
                tensor = torch.from_numpy(array.read())
            converter.add_tensor(target, name, pattern, tensor)
        converted: Mapping[str, Any] = converter.convert(target, model=model, config=model.config)
        return converted

    def read(name: str) -> Any:
        return _single(convert(real=True)[name]).contiguous().numpy()

    first = arrays[sources[0][0]]
    return {
        name: replace(first, shape=tuple(_single(value).shape), read=partial(read, name))
        for name, value in convert(real=False).items()
    }


def _single(value: Any) -> torch.Tensor:
    tensor: torch.Tensor = value[0] if isinstance(value, list) else value
    return tensor
