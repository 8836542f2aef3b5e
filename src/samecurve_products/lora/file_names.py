"""How files of adapters call the layers of a model of pictures.

diffusers writes a layer's whole name, after the part of the pipeline that it lies in:
`unet.down_blocks.0.attentions.0.proj_in`. Front ends read names of one word, which kohya's trainer
began with: `lora_unet_down_blocks_0_attentions_0_proj_in`. Of SDXL that word is made from the names
of its first code (input_blocks, middle_block, output_blocks), as kohya writes it and every front
end reads it. Other models' first code has one layer where diffusers has three (qkv): such names are
read, never written.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from samecurve.seam import UserError
from samecurve_products.lora.image_models import find_candidates

# before a name of one word, by the part of the pipeline
_PREFIXES = {
    "unet": "lora_unet_",
    "text_encoder": "lora_te_",
    "text_encoder_2": "lora_te2_",
    "text_encoder_3": "lora_te3_",
}
# transformers whose diffusers names ComfyUI reads after lora_transformer_; others: after lycoris_
_AFTER_TRANSFORMER = {
    "FluxTransformer2DModel",
    "Flux2Transformer2DModel",
    "ChromaTransformer2DModel",
    "SD3Transformer2DModel",
}
_READ_WORDS = ("lora_unet_", "lora_transformer_", "lycoris_")
_READ_DOTS = ("", "diffusion_model.", "base_model.model.")


@dataclass(frozen=True)
class FileNames:
    """The names of one model's layers in files."""

    model: str  # name of its class
    component: str  # the part of the pipeline: unet, transformer, text_encoder
    words: Mapping[str, str]  # layer -> its name of one word, as it is written
    known: Mapping[str, tuple[str, ...]]  # a name in files -> the layer, or layers, that it is of


def find_file_names(model: Any, component: str, prefix: str | None = None) -> FileNames:
    """The names of a plain model's layers in files.

    component: the part of the pipeline that the model is
    prefix: before names of one word, such as lora_te1_; None: the usual one
    """
    layers = list(find_candidates(model).layers)
    kind = type(model).__name__
    if prefix is None:
        after = "lora_transformer_" if kind in _AFTER_TRANSFORMER else "lycoris_"
        prefix = _PREFIXES.get(component, after)
    first_code = _first_code(model, layers)
    words = {layer: _word(prefix, first_code.get(layer, layer)) for layer in layers}
    if len(set(words.values())) < len(layers):
        raise UserError(
            f"two layers of {kind} have the same name of one word",
            "write the adapter in the layout of diffusers",
        )
    known: dict[str, tuple[str, ...]] = {}
    for layer in layers:
        for name in (layer, first_code.get(layer, layer)):
            known |= dict.fromkeys(_spellings(name, component, prefix), (layer,))
    for name, several in _fused(kind, layers).items():
        known |= dict.fromkeys(_spellings(name, component, prefix), several)
    return FileNames(kind, component, words, known)


def _word(prefix: str, name: str) -> str:
    return prefix + name.replace(".", "_")


def _spellings(name: str, component: str, prefix: str) -> Iterable[str]:
    """All names that files have for a layer of this name."""
    names = [name]
    if name.endswith(".to_out.0"):
        names.append(name.removesuffix(".0"))  # in files of old versions of diffusers
    for each in names:
        for before in (f"{component}.", f"{component}.base_model.model.", *_READ_DOTS):
            yield before + each
    words = (prefix,) if component.startswith("text_encoder") else (prefix, *_READ_WORDS)
    for before in words:
        yield _word(before, name)


def _first_code(model: Any, layers: Iterable[str]) -> dict[str, str]:
    """The layers of an SDXL model by their names in its first code; {}: another model."""
    config = getattr(model, "config", None)
    if not isinstance(config, Mapping):
        return {}
    per_level = config.get("layers_per_block")
    if config.get("addition_embed_type") != "text_time" or not isinstance(per_level, int):
        return {}
    attended = {name.split(".")[1] for name in layers if re.match(r"up_blocks\.\d+\.att", name)}
    return {name: _first_name(name, per_level, attended) for name in layers}


_OUTSIDE = {
    "conv_in": "input_blocks.0.0",
    "conv_out": "out.2",
    "time_embedding.linear_1": "time_embed.0",
    "time_embedding.linear_2": "time_embed.2",
    "add_embedding.linear_1": "label_emb.0.0",
    "add_embedding.linear_2": "label_emb.0.2",
}
_IN_RESNETS = {
    "conv1": "in_layers.2",
    "conv2": "out_layers.3",
    "time_emb_proj": "emb_layers.1",
    "conv_shortcut": "skip_connection",
}
_BLOCK = re.compile(r"(down_blocks|mid_block|up_blocks)\.(?:(\d+)\.)?(\w+)\.(\d+)\.(.+)")


def _first_name(name: str, per_level: int, attended: set[str]) -> str:
    """The name of an SDXL layer in its first code.

    per_level: layers of a level; attended: numbers of the levels on the way up with attention
    """
    match = _BLOCK.fullmatch(name)
    if match is None:
        return _OUTSIDE.get(name, name)
    side, level, kind, number, rest = match.groups()
    if kind == "resnets":
        rest = _IN_RESNETS.get(rest, rest)
    if side == "mid_block":
        place = 1 if kind == "attentions" else 2 * int(number)
        return f"middle_block.{place}.{rest}"
    start = (per_level + 1) * int(level)
    if kind == "downsamplers":
        return f"input_blocks.{1 + start + per_level}.0.op"
    if kind == "upsamplers":
        return f"output_blocks.{start + per_level}.{2 if level in attended else 1}.conv"
    inner = 1 if kind == "attentions" else 0
    if side == "down_blocks":
        return f"input_blocks.{1 + start + int(number)}.{inner}.{rest}"
    return f"output_blocks.{start + int(number)}.{inner}.{rest}"


def _each(place: str, names: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(f"{place}.{name}" for name in names)


_QKV = ("to_q", "to_k", "to_v")
_ADDED = ("add_q_proj", "add_k_proj", "add_v_proj")
# layers of a block in a model's first code -> here, those that lie in it one after another
_DOUBLE_BLOCK = {
    "img_attn.qkv": _each("attn", _QKV),
    "txt_attn.qkv": _each("attn", _ADDED),
    "img_attn.proj": ("attn.to_out.0",),
    "txt_attn.proj": ("attn.to_add_out",),
    "img_mlp.0": ("ff.net.0.proj",),
    "img_mlp.2": ("ff.net.2",),
    "txt_mlp.0": ("ff_context.net.0.proj",),
    "txt_mlp.2": ("ff_context.net.2",),
    "img_mod.lin": ("norm1.linear",),
    "txt_mod.lin": ("norm1_context.linear",),
}
_SINGLE_BLOCK = {
    "linear1": (*_each("attn", _QKV), "proj_mlp"),
    "linear2": ("proj_out",),
    "modulation.lin": ("norm.linear",),
}
_JOINT_BLOCK = {
    "x_block.attn.qkv": _each("attn", _QKV),
    "context_block.attn.qkv": _each("attn", _ADDED),
    "x_block.attn2.qkv": _each("attn2", _QKV),
    "x_block.attn.proj": ("attn.to_out.0",),
    "x_block.attn2.proj": ("attn2.to_out.0",),
    "context_block.attn.proj": ("attn.to_add_out",),
    "x_block.mlp.fc1": ("ff.net.0.proj",),
    "x_block.mlp.fc2": ("ff.net.2",),
    "context_block.mlp.fc1": ("ff_context.net.0.proj",),
    "context_block.mlp.fc2": ("ff_context.net.2",),
}
_Z_IMAGE_BLOCK = {
    "attention.qkv": _each("attention", _QKV),
    "attention.out": ("attention.to_out.0",),
}
_FLUX = [
    ("transformer_blocks", "double_blocks", _DOUBLE_BLOCK),
    ("single_transformer_blocks", "single_blocks", _SINGLE_BLOCK),
]
# by a model's class: blocks here, blocks in the first code, and their layers
_FIRST_CODES = {
    "FluxTransformer2DModel": _FLUX,
    "ChromaTransformer2DModel": _FLUX,
    "SD3Transformer2DModel": [("transformer_blocks", "joint_blocks", _JOINT_BLOCK)],
    "ZImageTransformer2DModel": [
        (blocks, blocks, _Z_IMAGE_BLOCK)
        for blocks in ("layers", "noise_refiner", "context_refiner")
    ],
}


def _fused(kind: str, layers: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """Names in a model's first code, each with the layers here that lie in it one after another."""
    present = set(layers)
    result: dict[str, tuple[str, ...]] = {}
    for here, there, names in _FIRST_CODES.get(kind, []):
        numbers = {name.split(".")[1] for name in present if name.startswith(f"{here}.")}
        for number in numbers:
            for name, parts in names.items():
                whole = tuple(f"{here}.{number}.{part}" for part in parts)
                if present.issuperset(whole):
                    result[f"{there}.{number}.{name}"] = whole
    return result


def is_of_text_encoder(name: str) -> bool:
    """Whether an array in a file is of a text encoder."""
    return name.startswith(("lora_te", "text_encoder"))
