"""Adapters in a model of pictures: the UNets and transformers of diffusers, and models like them.

Targets are linear layers and convolutions. What lies before and after a model's blocks (embeddings,
the output) is a target by name alone, and is never packed.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from samecurve_products.lora.adapter import inject_adapter, peft_config
from samecurve_products.lora.quantized import Packing, layer_packings
from samecurve_products.lora.sections import AdapterSection, Quantize
from samecurve_products.lora.targets import ALL, Candidates, target_layers

ATTENTION = "attention"
# what diffusers' models call the products of an attention layer
_PRODUCTS = (
    *(".to_q", ".to_k", ".to_v", ".to_out.0", ".to_out"),
    *(".add_q_proj", ".add_k_proj", ".add_v_proj", ".to_add_out"),  # of a second stream
    *(".to_qkv", ".to_kv", ".to_added_qkv", ".to_qkv_mlp_proj"),  # several in one
)


def find_candidates(model: nn.Module) -> Candidates:
    """The layers of a plain model that an adapter could be for.

    attention: the products of every attention layer; all-linear: the linear layers of the blocks.
    """
    layers = {name: module for name, module in model.named_modules() if _is_plain(module)}
    groups = {
        ATTENTION: [name for name in layers if f".{name}".endswith(_PRODUCTS)],
        ALL: [name for name, layer in layers.items() if _is_linear_in_block(name, layer)],
    }
    noun = "linear layer or convolution of this model"
    return Candidates(type(model).__name__, layers, groups, noun)


def _is_plain(module: Any) -> bool:
    """Whether an adapter can stand in a module's place. A subclass may compute otherwise."""
    if type(module) is nn.Conv2d:
        return module.groups == 1 and module.dilation == (1, 1) and module.padding_mode == "zeros"
    return type(module) is nn.Linear


def _is_linear_in_block(name: str, layer: nn.Module) -> bool:
    """Whether a layer is linear and lies in a numbered block, such as `layers.3.attention.to_q`."""
    return isinstance(layer, nn.Linear) and any(part.isdigit() for part in name.split(".")[:-1])


def adapted_layers(model: nn.Module, adapter: AdapterSection) -> dict[str, nn.Module]:
    """The layers of a plain model that the adapter is for, by name.

    UserError: a target names no layer.
    """
    candidates = find_candidates(model)
    return {name: candidates.layers[name] for name in target_layers(candidates, adapter)}


def packings(model: nn.Module, quantize: Quantize) -> dict[str, Packing]:
    """The packing of each packed layer of a plain model, by name."""
    if quantize == "none":
        return {}
    candidates = find_candidates(model)
    packed = {name: candidates.layers[name] for name in candidates.groups[ALL]}
    return layer_packings(packed, quantize)


def add_adapter(model: nn.Module, adapter: AdapterSection, quantize: Quantize = "none") -> None:
    """Put an adapter's matrices into a plain model, with their first values; freeze all else.

    quantize: the format that the linear layers of the blocks are packed in

    UserError: a target names no layer.
    """
    candidates = find_candidates(model)
    targets = target_layers(candidates, adapter)
    inject_adapter(
        model,
        adapter,
        targets,
        peft_config(adapter, _pattern(targets)),
        packed=candidates.groups[ALL],
        quantize=quantize,
    )


def _pattern(names: Sequence[str]) -> str:
    """A regular expression of these names and no others; peft takes a name for an ending too."""
    return "|".join(map(re.escape, names))


def possible_adapters(model: nn.Module, adapter: AdapterSection) -> Mapping[str, int]:
    """Adapters that a plain model could have, as Facts lists them: trained numbers by name."""
    candidates = find_candidates(model)
    names = candidates.groups[ATTENTION] or candidates.groups[ALL]
    shapes = [candidates.layers[name].get_parameter("weight").shape for name in names]
    trained = sum(adapter.rank * (shape[0] + shape[1:].numel()) for shape in shapes)
    return {f"model.adapter.rank={adapter.rank}": trained} if trained else {}
