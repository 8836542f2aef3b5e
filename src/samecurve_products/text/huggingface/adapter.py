"""The huggingface task's adapters: which layers of a language model they are for.

The matrices themselves are in the room `lora`. Special here: layers of kind Conv1D, whose weights
are [in, out], and a head, which gets no adapter.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from samecurve.seam import UserError
from samecurve_products.lora import StoredArray, file_reading
from samecurve_products.lora import adapter as lora
from samecurve_products.lora import names as lora_names
from samecurve_products.lora import targets as lora_targets
from samecurve_products.lora.file_names import FileNames
from samecurve_products.lora.sections import Quantize
from samecurve_products.text.huggingface.sections import Adapter, HFModel


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
    candidates = lora_targets.Candidates(
        type(model).__name__,
        layers,
        {lora_targets.ALL: list(layers)},
        "linear layer within this model's blocks",
    )
    return lora_targets.target_layers(candidates, adapter)


def transposed_layers(model: Any) -> list[str]:
    """Names of the layers whose weights are [in, out]. model: a plain model."""
    layers = linear_layers(model)
    return [name for name, layer in layers.items() if not isinstance(layer, nn.Linear)]


def describe_adapter(model: Any, adapter: Adapter) -> str:
    """A line about the adapter for the user. model: plain"""
    return lora.describe_adapter(target_layers(model, adapter), adapter)


def possible_adapters(model: Any) -> dict[str, int]:
    """Adapters that a plain model could have, as Facts lists them: trained numbers by name."""
    adapter = Adapter()
    layers: dict[str, Any] = dict(linear_layers(model))
    shapes = [tuple(layer.weight.shape) for layer in layers.values()]
    trained = sum(adapter.rank * (inputs + outputs) for outputs, inputs in shapes)
    return {f"model.adapter.rank={adapter.rank}": trained} if trained else {}


def peft_config(model: Any, adapter: Adapter, base: str | None = None) -> Any:
    """The library's config of the adapter. model: plain. base: where its weights lie"""
    targets = target_layers(model, adapter)
    layers = linear_layers(model)
    return lora.peft_config(
        adapter,
        targets,
        fan_in_fan_out=not all(isinstance(layers[name], nn.Linear) for name in targets),
        base_model_name_or_path=base,
        task_type="CAUSAL_LM",
    )


def add_adapter(model: Any, adapter: Adapter, quantize: Quantize = "none") -> None:
    """Put an adapter's matrices into the model; freeze all else except a classifier's head.

    model: plain, before its head is replaced
    quantize: the format that the linear layers are packed in
    """
    config, targets = peft_config(model, adapter), target_layers(model, adapter)
    head = []
    if model.get_output_embeddings() is None:  # a classifier's head begins anew
        prefix = f"{model.base_model_prefix}."
        head = [p for name, p in model.named_parameters() if not name.startswith(prefix)]
    packed = list(linear_layers(model))
    lora.inject_adapter(model, adapter, targets, config, packed=packed, quantize=quantize)
    for parameter in head:
        parameter.requires_grad_(True)


def first_values(model: Any, module: Any) -> None:
    """Set a module's first values, by the adapter's rules or else by the library's."""
    lora.first_values(module, model._init_weights)  # noqa: SLF001 - the library's name for it


def with_adapter_names(
    model: Any,
    adapter: Adapter,
    arrays: Mapping[str, StoredArray],
    rounded: Mapping[str, StoredArray],
) -> dict[str, StoredArray]:
    """A plain model's arrays by the names that they have beneath an adapter.

    model: plain
    rounded: the arrays as the model will have them
    """
    linear = linear_layers(model)
    layers = {name: linear[name] for name in target_layers(model, adapter)}
    return lora.with_adapter_names(layers, adapter, arrays, rounded)


def adapter_tensors(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The adapter's tensors under the names of the files that PeftModel reads."""
    own = lora_names.adapter_tensors(tensors)
    return {f"base_model.model.{name}": tensor for name, tensor in own.items()}


def read_adapter(
    model: Any,
    adapter: Adapter,
    arrays: Mapping[str, StoredArray],
    shapes: Mapping[str, tuple[int, ...]],
    metadata: Mapping[str, str],
) -> tuple[Mapping[str, StoredArray], list[str]]:
    """An adapter's file, as peft writes it, by the names of the model's arrays; lines for the user.

    model: plain
    shapes: of the model's arrays, beneath the adapter
    """
    layers = linear_layers(model)
    known = {f"{before}{name}": (name,) for name in layers for before in ("base_model.model.", "")}
    names = FileNames(type(model).__name__, "", {}, known)
    file = file_reading.read_adapter(arrays, adapter, shapes, names, metadata)
    return file.arrays, file.notes


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
