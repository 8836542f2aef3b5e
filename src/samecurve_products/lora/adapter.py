"""Adapters: small matrices of the peft library that are trained in place of a model's weights.

lora: a layer's weight W becomes W + scaling * B A, with B zero at first. dora: each of its rows is
scaled to a magnitude that is trained too. lokr: W + scaling * (w1 x w2), a Kronecker product, with
w1 zero at first (lokr.py). All other weights are frozen. Of a convolution, W is the matrix with a
row for each output channel. Hu et al. 2021, arXiv:2106.09685; Liu et al. 2024, arXiv:2402.09353.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from samecurve.seam import UserError, install_command
from samecurve_products.lora import StoredArray
from samecurve_products.lora.names import (
    BASE,
    MAGNITUDE,
    NAME,
    OWN,
    W1,
    W2,
    W2_A,
    W2_B,
    A,
    B,
)
from samecurve_products.lora.quantized import (
    QuantizedLinear,
    import_library,
    is_installed,
    quantize_layers,
)
from samecurve_products.lora.sections import AdapterSection, Quantize
from samecurve_products.lora.targets import short_name

_RULE = "samecurve_rule"  # attribute of a module: what its first values are
_LAYER = "samecurve_layer"  # attribute of a base layer: (the layer that it lies in,)
_UNIFORM, _ZERO, _NORMS = "uniform", "zero", "norms"
_LORA_RULES = {"lora_A": _UNIFORM, "lora_B": _ZERO, "lora_magnitude_vector": _NORMS}
_LOKR_RULES = {
    "lokr_w1": _ZERO,
    "lokr_w2": _UNIFORM,
    "lokr_w2_a": _UNIFORM,
    "lokr_w2_b": _UNIFORM,
}


def describe_adapter(names: Sequence[str], adapter: AdapterSection) -> str:
    """A line about the adapter for the user. names: of the layers that it is for"""
    short = ", ".join(sorted({short_name(name) for name in names}))
    return (
        f"adapter {adapter.kind}, rank {adapter.rank}, scaled by {adapter.scaling:g},"
        f" on {len(names)} layers ({short}); all else is frozen, and named by its SHA-256"
    )


def import_peft() -> Any:
    """Import peft, late, because it takes seconds. UserError: it is not installed."""
    if is_installed():
        import_library()
    try:
        import peft
    except ImportError as error:
        raise UserError(
            f"model.adapter needs peft: {error}", install_command("hf"), "model.adapter"
        ) from None
    return peft


def peft_config(adapter: AdapterSection, targets: str | Sequence[str], **more: Any) -> Any:
    """The library's config of the adapter.

    targets: whole names of layers, or a regular expression of them
    more: fields of the library's config that a task knows
    """
    peft = import_peft()
    if adapter.kind == "lokr":
        return peft.LoKrConfig(r=adapter.rank, alpha=adapter.alpha, target_modules=targets, **more)
    return peft.LoraConfig(
        r=adapter.rank,
        lora_alpha=adapter.alpha,
        lora_dropout=adapter.dropout,
        use_dora=adapter.kind == "dora",
        target_modules=targets,
        **more,
    )


def inject_adapter(
    model: Any,
    adapter: AdapterSection,
    targets: Sequence[str],
    config: Any,
    *,
    packed: Sequence[str] = (),
    quantize: Quantize = "none",
) -> None:
    """Put an adapter's matrices into a plain model, with their first values; freeze all else.

    targets: whole names of the layers that it is for; config: of peft_config()
    packed: names of the linear layers whose weights are packed, beneath an adapter or not
    quantize: the format that they are packed in
    """
    if adapter.kind == "lokr":
        from samecurve_products.lora.lokr import KroneckerModel

        KroneckerModel(model, config, adapter_name=NAME, low_cpu_mem_usage=True)
    else:
        from peft import inject_adapter_in_model

        inject_adapter_in_model(config, model, low_cpu_mem_usage=True)  # without values, on meta
    if quantize != "none":
        beneath = BASE.rstrip(".")
        chosen = set(targets)
        names = [f"{name}{beneath}" if name in chosen else name for name in packed]
        quantize_layers(model, names, quantize)
    for name in targets:  # peft may have shortened the names in its config
        _make_real(model.get_submodule(name))


def _make_real(layer: Any) -> None:
    """Allocate a layer's adapter with its first values, on the device of the layer's weight."""
    device = next(layer.base_layer.parameters()).device
    if getattr(layer, "lora_magnitude_vector", None):
        setattr(layer.base_layer, _LAYER, (layer,))
    for module, rule in _parts(layer):
        setattr(module, _RULE, rule)
        for name, parameter in list(module.named_parameters(recurse=False)):
            empty = torch.empty_like(parameter, device=device)
            module.register_parameter(name, nn.Parameter(empty))
        _adapter_values(module, rule)
    _set_magnitude(layer.base_layer)


def _parts(layer: Any) -> Iterator[tuple[Any, str]]:
    """The modules of an adapter in a layer, each with the rule of its first values."""
    for attribute, rule in _LORA_RULES.items():
        if getattr(layer, attribute, None):
            yield getattr(layer, attribute)[NAME], rule
    for attribute, rule in _LOKR_RULES.items():
        if len(getattr(layer, attribute, ())):
            yield getattr(layer, attribute), rule  # a ParameterDict


@torch.no_grad()
def first_values(module: Any, fill: Callable[[Any], object]) -> None:
    """Set a module's first values, by the adapter's rules or else by the model's.

    fill: sets those of a plain module
    """
    rule = getattr(module, _RULE, None)
    if rule is not None:
        _adapter_values(module, rule)
    elif isinstance(module, QuantizedLinear):
        module.begin(fill)
    else:
        fill(module)
    _set_magnitude(module)


@torch.no_grad()
def _adapter_values(module: Any, rule: str) -> None:
    for parameter in module.parameters(recurse=False):
        if rule == _UNIFORM:
            nn.init.kaiming_uniform_(parameter, a=math.sqrt(5))
        elif rule == _ZERO:
            nn.init.zeros_(parameter)


@torch.no_grad()
def _set_magnitude(base: Any) -> None:
    """Set DoRA's magnitude, which follows from the weights beneath it."""
    for layer in getattr(base, _LAYER, ()):
        magnitude = layer.lora_magnitude_vector[NAME].weight
        if base.weight.ndim > 2:  # the very operations of peft's forward pass: the same bits
            norms = base.weight.norm(p=2, dim=(1, 2, 3), keepdim=True)
            magnitude.copy_(norms.transpose(1, 0))
        else:
            rows = base.weight.T if layer.fan_in_fan_out else base.weight
            magnitude.copy_(torch.linalg.norm(rows, dim=1))


def with_adapter_names(
    layers: Mapping[str, nn.Module],
    adapter: AdapterSection,
    arrays: Mapping[str, StoredArray],
    rounded: Mapping[str, StoredArray],
) -> dict[str, StoredArray]:
    """A plain model's arrays by the names that they have beneath an adapter.

    DoRA's magnitudes, which follow from the weights, are added.

    layers: those of the plain model that the adapter is for
    rounded: the arrays as the model will have them
    """
    result: dict[str, StoredArray] = {}
    for name, array in arrays.items():
        layer, _, leaf = name.rpartition(".")
        if layer not in layers:
            result[name] = array
            continue
        result[f"{layer}{BASE}{leaf}"] = array
        if adapter.kind == "dora" and leaf == "weight":
            axis = 0 if isinstance(layers[layer], nn.Linear | nn.Conv2d) else 1
            rows = array.shape[axis]
            shape = (rows,) if len(array.shape) == 2 else (1, rows, 1, 1)
            read = partial(_norms, rounded[name], axis, shape)
            result[f"{layer}{MAGNITUDE}"] = replace(array, shape=shape, read=read)
    return result


def _norms(array: StoredArray, axis: int, shape: tuple[int, ...]) -> NDArray[Any]:
    """Norms of an array's rows, which lie along the axis."""
    values = array.read()
    if values.ndim > 2:
        values = values.reshape(len(values), -1)
    norms: NDArray[Any] = np.linalg.norm(values, axis=1 - axis)
    return norms.reshape(shape)


def merged(
    tensors: Mapping[str, torch.Tensor], adapter: AdapterSection, transposed: Sequence[str] = ()
) -> dict[str, torch.Tensor]:
    """A plain model's weights, with the adapter's change added.

    tensors: by the names beneath an adapter
    transposed: layers whose weights are [in, out]
    """
    result: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        if name.endswith(OWN):
            continue
        layer, base, leaf = name.rpartition(BASE)
        if not base:
            result[name] = tensor
        elif leaf != "weight":
            result[f"{layer}.{leaf}"] = tensor
        else:
            weight = tensor.T if layer in transposed else tensor
            weight = weight + adapter.scaling * _change(tensors, layer, weight.shape)
            if f"{layer}{MAGNITUDE}" in tensors:
                weight = _with_norms(weight, tensors[f"{layer}{MAGNITUDE}"])
            result[f"{layer}.{leaf}"] = weight.T if layer in transposed else weight
    return result


def _change(
    tensors: Mapping[str, torch.Tensor], layer: str, shape: tuple[int, ...]
) -> torch.Tensor:
    """The change of a layer's weight, which has this shape, without its factor."""
    if f"{layer}{A}" in tensors:
        flat = tensors[f"{layer}{B}"].flatten(1) @ tensors[f"{layer}{A}"].flatten(1)
        return flat.view(shape)
    w1, kernel = tensors[f"{layer}{W1}"], shape[2:]
    w1 = w1.reshape(*w1.shape, *(1 for _ in kernel))
    if f"{layer}{W2}" in tensors:
        w2 = tensors[f"{layer}{W2}"]
    else:
        w2 = tensors[f"{layer}{W2_A}"] @ tensors[f"{layer}{W2_B}"]
        w2 = w2.view(len(w2), -1, *kernel)
    product: torch.Tensor = torch.kron(w1, w2.contiguous())
    return product


def _with_norms(weight: torch.Tensor, magnitude: torch.Tensor) -> torch.Tensor:
    """A weight whose rows have these norms."""
    rows = weight.flatten(1)
    factors: torch.Tensor = magnitude.flatten() / torch.linalg.norm(rows, dim=1)
    return (rows * factors[:, None]).view(weight.shape)
