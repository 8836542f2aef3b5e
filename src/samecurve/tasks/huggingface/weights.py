"""The library's weights as files hold them, as its model has them, and back.

Some models keep in one array what files hold in several (experts). The library says which; its own
operations are applied here, array by array, when an array is read.
"""

import re
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

# of an array as it is asked for and in the end read: dtype, shape, read()
StoredArray = Any


def from_files(model: Any, arrays: Mapping[str, StoredArray]) -> dict[str, StoredArray]:
    """By the model's own names; no value is read.

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
        if _is_ignored(model, name):
            continue
        renamed, pattern = rename_source_key(name, renamings, converters, prefix, known)
        if renamed not in known and name in known:
            renamed, pattern = name, None
        if pattern is None:
            result[renamed] = arrays[name]
        else:
            joined.setdefault(renamed, []).append((name, pattern))
    operations = {pattern: entry for entry in converters for pattern in entry.source_patterns}
    for target, sources in joined.items():
        result |= _joined(model, target, sources, operations, arrays)
    return result


def to_files(model: Any, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """As save_pretrained() writes them."""
    from transformers.core_model_loading import revert_weight_conversion

    return dict(revert_weight_conversion(model, dict(tensors)))


def _is_ignored(model: nn.Module, name: str) -> bool:
    """Whether it follows from the config, so that files of old have it and the model has not."""
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
    """What several arrays become; their shapes by the same operations on the meta device."""

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
