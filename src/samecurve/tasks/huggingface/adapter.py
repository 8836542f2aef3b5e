"""Adapters: small matrices of the peft library that are trained in place of a model's weights.

lora: a layer's weight W becomes W + scaling * B A, with B zero at first. dora: each of its rows is
scaled to a magnitude that is trained too. All other weights are frozen. Hu et al. 2021,
arXiv:2106.09685; Liu et al. 2024, arXiv:2402.09353.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from samecurve.core.config.document import suggest
from samecurve.core.system.installation import install_command
from samecurve.errors import UserError
from samecurve.tasks.huggingface.quantized import (
    QuantizedLinear,
    import_library,
    is_installed,
    quantize_layers,
)
from samecurve.tasks.huggingface.sections import Adapter, HFModel, Quantize
from samecurve.tasks.huggingface.weights import StoredArray

_ALL = "all-linear"
_PLAIN = re.compile(r"[\w.-]+")  # a name, and no pattern
_NAME = "default"  # peft's own for the only adapter
BASE = ".base_layer."  # between a layer's name and its own arrays
_MAGNITUDE = f".lora_magnitude_vector.{_NAME}.weight"
_A, _B = f".lora_A.{_NAME}.weight", f".lora_B.{_NAME}.weight"
_RULE = "samecurve_rule"  # attribute of a layer: what its first values are
_LAYER = "samecurve_layer"  # attribute of a base layer: (the layer that it lies in,)


def linear_layers(model: Any) -> dict[str, nn.Module]:
    """The linear layers of a plain model by name, without its output layer or head."""
    from transformers.pytorch_utils import Conv1D

    output = model.get_output_embeddings()
    head = {id(output)} | {
        id(module)
        for name, module in model.named_modules()
        if not f"{name}.".startswith(f"{model.base_model_prefix}.")
    }
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear | Conv1D) and id(module) not in head
    }


def target_layers(model: Any, adapter: Adapter) -> list[str]:
    """Names of a plain model's layers that the adapter is for.

    UserError: a target names no layer.
    """
    layers = linear_layers(model)
    if not layers:
        raise UserError(
            f"{type(model).__name__} has no linear layers that an adapter could be for",
            "leave model.adapter out",
            "model.adapter",
        )
    if adapter.target == _ALL:
        return list(layers)
    targets = [adapter.target] if isinstance(adapter.target, str) else adapter.target
    names = {
        target: [name for name in layers if f".{name}".endswith(f".{target}")] for target in targets
    }
    if isinstance(adapter.target, str) and not _PLAIN.fullmatch(adapter.target):
        pattern = _compiled(adapter.target)  # of a whole name, as in peft
        names = {adapter.target: [name for name in layers if pattern.fullmatch(name)]}
    short = sorted({name.rpartition(".")[2] for name in layers})
    for target, found in names.items():
        if found:
            continue
        near = suggest(target, short) or f"{_ALL}, or some of {', '.join(short)}"
        raise UserError(
            f"model.adapter.target {target} names no linear layer within this model's blocks",
            near,
            "model.adapter.target",
        )
    if not names:
        raise UserError(
            "model.adapter.target is an empty list: nothing would be trained",
            f"{_ALL}, or some of {', '.join(short)}",
            "model.adapter.target",
        )
    chosen = {name for found in names.values() for name in found}
    return [name for name in layers if name in chosen]


def _compiled(pattern: str) -> re.Pattern[str]:
    """UserError: it is no regular expression."""
    try:
        return re.compile(pattern)
    except re.error as error:
        raise UserError(
            f"model.adapter.target {pattern} is no regular expression: {error}",
            "a pattern such as .*\\.(q|v)_proj, or a list of names",
            "model.adapter.target",
        ) from None


def transposed_layers(model: Any) -> list[str]:
    """Names of the layers whose weights are [in, out]. model: a plain model."""
    layers = linear_layers(model)
    return [name for name, layer in layers.items() if not isinstance(layer, nn.Linear)]


def describe_adapter(model: Any, adapter: Adapter) -> str:
    """A line about the adapter for the user. model: plain"""
    names = target_layers(model, adapter)
    short = ", ".join(sorted({name.rpartition(".")[2] for name in names}))
    return (
        f"adapter {adapter.kind}, rank {adapter.rank}, scaled by {adapter.alpha / adapter.rank:g},"
        f" on {len(names)} layers ({short}); all else is frozen, and named by its SHA-256"
    )


def possible_adapters(model: Any) -> dict[str, int]:
    """Adapters that a plain model could have, as Facts lists them: trained numbers by name."""
    adapter = Adapter()
    layers: dict[str, Any] = dict(linear_layers(model))
    shapes = [tuple(layer.weight.shape) for layer in layers.values()]
    trained = sum(adapter.rank * (inputs + outputs) for outputs, inputs in shapes)
    return {f"model.adapter.rank={adapter.rank}": trained} if trained else {}


def peft_config(model: Any, adapter: Adapter, base: str | None = None) -> Any:
    """The library's config of the adapter. model: plain. base: where its weights lie"""
    if is_installed():
        import_library()
    try:
        from peft import LoraConfig
    except ImportError as error:
        raise UserError(
            f"model.adapter needs peft: {error}", install_command("hf"), "model.adapter"
        ) from None
    targets = target_layers(model, adapter)
    layers = linear_layers(model)
    is_transposed = not all(isinstance(layers[name], nn.Linear) for name in targets)
    return LoraConfig(
        r=adapter.rank,
        lora_alpha=adapter.alpha,  # type: ignore[arg-type]  # peft accepts a float
        lora_dropout=adapter.dropout,
        use_dora=adapter.kind == "dora",
        target_modules=targets,
        fan_in_fan_out=is_transposed,
        base_model_name_or_path=base,
        task_type="CAUSAL_LM",
    )


def add_adapter(model: Any, adapter: Adapter, quantize: Quantize = "none") -> None:
    """Put an adapter's matrices into the model; freeze all else except a classifier's head.

    model: plain, before its head is replaced
    quantize: the format that the linear layers are packed in
    """
    config, targets = peft_config(model, adapter), target_layers(model, adapter)
    from peft import inject_adapter_in_model

    layers = list(linear_layers(model))
    head = []
    if model.get_output_embeddings() is None:  # a classifier's head begins anew
        prefix = f"{model.base_model_prefix}."
        head = [p for name, p in model.named_parameters() if not name.startswith(prefix)]
    inject_adapter_in_model(config, model, low_cpu_mem_usage=True)  # without values, on meta
    for parameter in head:
        parameter.requires_grad_(True)
    if quantize != "none":
        beneath = BASE.rstrip(".")
        names = [f"{name}{beneath}" if name in targets else name for name in layers]
        quantize_layers(model, names, quantize)
    for name in targets:  # peft may have shortened the names in its config
        _make_real(model, model.get_submodule(name))


def _make_real(model: Any, layer: Any) -> None:
    """Allocate a layer's adapter with its first values, on the device of the layer's weight."""
    parts = {"A": layer.lora_A[_NAME], "B": layer.lora_B[_NAME]}
    if layer.lora_magnitude_vector:
        parts["magnitude"] = layer.lora_magnitude_vector[_NAME]
        setattr(layer.base_layer, _LAYER, (layer,))
    for rule, part in parts.items():
        setattr(part, _RULE, rule)
        device = next(layer.base_layer.parameters()).device
        empty = torch.empty_like(part.weight, device=device)
        part.weight = nn.Parameter(empty)
        first_values(model, part)
    _set_magnitude(layer.base_layer)


@torch.no_grad()
def first_values(model: Any, module: Any) -> None:
    """Set a module's first values, by the adapter's rules or else by the library's."""
    rule = getattr(module, _RULE, None)
    if rule == "A":
        nn.init.kaiming_uniform_(module.weight, a=math.sqrt(5))
    elif rule == "B":
        nn.init.zeros_(module.weight)
    elif rule is None:
        fill = model._init_weights  # noqa: SLF001 - the library's name for it
        if isinstance(module, QuantizedLinear):
            module.begin(fill)
        else:
            fill(module)
    _set_magnitude(module)


@torch.no_grad()
def _set_magnitude(base: Any) -> None:
    """Set DoRA's magnitude, which follows from the weights beneath it."""
    for layer in getattr(base, _LAYER, ()):
        rows = base.weight.T if layer.fan_in_fan_out else base.weight
        layer.lora_magnitude_vector[_NAME].weight.copy_(torch.linalg.norm(rows, dim=1))


def with_adapter_names(
    model: Any,
    adapter: Adapter,
    arrays: Mapping[str, StoredArray],
    rounded: Mapping[str, StoredArray],
) -> dict[str, StoredArray]:
    """A plain model's arrays by the names that they have beneath an adapter.

    DoRA's magnitudes, which follow from the weights, are added.

    model: plain
    rounded: the arrays as the model will have them
    """
    linear = linear_layers(model)
    layers = {name: linear[name] for name in target_layers(model, adapter)}
    result: dict[str, StoredArray] = {}
    for name, array in arrays.items():
        layer, _, leaf = name.rpartition(".")
        if layer not in layers:
            result[name] = array
            continue
        result[f"{layer}{BASE}{leaf}"] = array
        if adapter.kind == "dora" and leaf == "weight":
            axis = 1 if isinstance(layers[layer], nn.Linear) else 0
            shape = (array.shape[1 - axis],)
            read = partial(_norms, rounded[name], axis)
            result[f"{layer}{_MAGNITUDE}"] = replace(array, shape=shape, read=read)
    return result


def _norms(array: StoredArray, axis: int) -> NDArray[Any]:
    norms: NDArray[Any] = np.linalg.norm(array.read(), axis=axis)
    return norms


def merged(
    tensors: Mapping[str, torch.Tensor], adapter: Adapter, transposed: Sequence[str] = ()
) -> dict[str, torch.Tensor]:
    """A plain model's weights, with the adapter's change added.

    tensors: by the names beneath an adapter
    transposed: layers whose weights are [in, out]
    """
    scaling = adapter.alpha / adapter.rank
    result: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        if name.endswith((_A, _B, _MAGNITUDE)):
            continue
        layer, base, leaf = name.rpartition(BASE)
        if not base:
            result[name] = tensor
        elif leaf != "weight":
            result[f"{layer}.{leaf}"] = tensor
        else:
            change = scaling * (tensors[f"{layer}{_B}"] @ tensors[f"{layer}{_A}"])
            rows = (tensor.T if layer in transposed else tensor) + change
            if f"{layer}{_MAGNITUDE}" in tensors:
                magnitude = tensors[f"{layer}{_MAGNITUDE}"]
                rows = rows * (magnitude / torch.linalg.norm(rows, dim=1))[:, None]
            result[f"{layer}.{leaf}"] = rows.T if layer in transposed else rows
    return result


def adapter_tensors(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The adapter's tensors under the names of peft's files."""
    own = {name: t for name, t in tensors.items() if name.endswith((_A, _B, _MAGNITUDE))}
    return {
        "base_model.model."
        + name.replace(f".{_NAME}.weight", "" if name.endswith(_MAGNITUDE) else ".weight"): tensor
        for name, tensor in own.items()
    }


def separable(fields: HFModel, *, classifies: bool) -> tuple[Adapter, str]:
    """The adapter, and the directory of the base model that it is for.

    UserError: the adapter can't be a file of its own.
    """
    whole = "--format huggingface, which writes a whole model"
    if fields.adapter is None:
        raise UserError("this run trained a whole model, no adapter", whole, "--format")
    if fields.path is None:
        raise UserError(
            "this run's base has random values of its own, in no directory that peft could read",
            whole,
            "--format",
        )
    if classifies:
        raise UserError(
            "a classifier's head is trained beside its adapter, and would be left out",
            whole,
            "--format",
        )
    return fields.adapter, fields.path


def write_config(model: Any, adapter: Adapter, base: str, directory: Path) -> None:
    """Write adapter_config.json. model: plain"""
    config = peft_config(model, adapter, base)
    config.inference_mode = True
    config.save_pretrained(str(directory))
