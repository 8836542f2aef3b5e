"""Checkpoints in one file, in the layout of the models' authors, made from tiny pipelines.

The names are written here by a table of our own: the way back is the library's.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

LEVELS, LAYERS = 2, 1  # of the tiny UNets and VAEs
_RESNET = {
    "norm1": "in_layers.0",
    "conv1": "in_layers.2",
    "time_emb_proj": "emb_layers.1",
    "norm2": "out_layers.0",
    "conv2": "out_layers.3",
    "conv_shortcut": "skip_connection",
}
_OUTSIDE = {
    "time_embedding.linear_1": "time_embed.0",
    "time_embedding.linear_2": "time_embed.2",
    "add_embedding.linear_1": "label_emb.0.0",
    "add_embedding.linear_2": "label_emb.0.2",
    "conv_in": "input_blocks.0.0",
    "conv_norm_out": "out.0",
    "conv_out": "out.2",
}
_IN_OPEN_CLIP = {
    "layer_norm1": "ln_1",
    "layer_norm2": "ln_2",
    "mlp.fc1": "mlp.c_fc",
    "mlp.fc2": "mlp.c_proj",
    "self_attn.out_proj": "attn.out_proj",
}


def unet_name(name: str, attended_ups: set[int]) -> str:
    """The original name of an array of a UNet. attended_ups: upward levels with attention."""
    for ours, original in _OUTSIDE.items():
        if name.startswith(f"{ours}."):
            return name.replace(ours, original, 1)
    place, _, rest = name.partition(".")
    if place == "mid_block":
        kind, number, rest = rest.split(".", 2)
        block = f"middle_block.{2 * int(number) if kind == 'resnets' else 1}"
        return f"{block}.{_in_block(kind, rest)}"
    level, kind, number, rest = rest.split(".", 3)
    first = int(level) * (LAYERS + 1)
    if kind == "downsamplers":
        return f"input_blocks.{first + LAYERS + 1}.0.op.{rest.removeprefix('conv.')}"
    if kind == "upsamplers":
        position = 2 if int(level) in attended_ups else 1
        return f"output_blocks.{first + LAYERS}.{position}.{rest}"
    side, start = (
        ("input_blocks", first + 1) if place == "down_blocks" else ("output_blocks", first)
    )
    position = 0 if kind == "resnets" else 1
    return f"{side}.{start + int(number)}.{position}.{_in_block(kind, rest)}"


def _in_block(kind: str, rest: str) -> str:
    if kind != "resnets":
        return rest
    layer, _, value = rest.partition(".")
    return f"{_RESNET[layer]}.{value}"


def vae_name(name: str) -> str:
    """The original name of an array of a VAE."""
    name = name.replace("conv_shortcut", "nin_shortcut").replace("conv_norm_out", "norm_out")
    name = re.sub(r"mid_block\.resnets\.(\d)", lambda m: f"mid.block_{int(m[1]) + 1}", name)
    name = re.sub(r"down_blocks\.(\d)\.resnets", r"down.\1.block", name)
    name = re.sub(r"down_blocks\.(\d)\.downsamplers\.0", r"down.\1.downsample", name)
    name = re.sub(
        r"up_blocks\.(\d)\.(resnets|upsamplers\.0)",
        lambda m: f"up.{LEVELS - 1 - int(m[1])}.{'block' if m[2] == 'resnets' else 'upsample'}",
        name,
    )
    name = name.replace("mid_block.attentions.0", "mid.attn_1").replace("group_norm", "norm")
    for ours, original in (("to_q", "q"), ("to_k", "k"), ("to_v", "v"), ("to_out.0", "proj_out")):
        name = name.replace(f"attn_1.{ours}.", f"attn_1.{original}.")
    return name


def open_clip(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A text encoder's arrays as open_clip has them: query, key and value in one."""
    made: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        inner = name.removeprefix("text_model.")
        if name == "text_projection.weight":
            made["text_projection"] = tensor.T.contiguous()
        elif inner.startswith("embeddings.position_embedding"):
            made["positional_embedding"] = tensor
        elif inner.startswith("embeddings.token_embedding"):
            made["token_embedding.weight"] = tensor
        elif inner.startswith("final_layer_norm"):
            made[inner.replace("final_layer_norm", "ln_final")] = tensor
        elif ".q_proj." in inner:
            parts = [tensors[name.replace("q_proj", f"{each}_proj")] for each in "qkv"]
            block, kind = inner.removeprefix("encoder.layers.").split(".self_attn.q_proj.")
            made[f"transformer.resblocks.{block}.attn.in_proj_{kind}"] = torch.cat(parts)
        elif ".k_proj." not in inner and ".v_proj." not in inner:
            for ours, original in _IN_OPEN_CLIP.items():
                inner = inner.replace(ours, original)
            made[inner.replace("encoder.layers", "transformer.resblocks")] = tensor
    return made


def _read(home: Path, component: str) -> dict[str, Tensor]:
    (file,) = (home / component).glob("*.safetensors")
    tensors: dict[str, Tensor] = load_file(file)
    return tensors


def _text_model(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {f"text_model.{name.removeprefix('text_model.')}": t for name, t in tensors.items()}


def save_original(home: Path, file: Path, *, attended_ups: set[int], extra: Any = None) -> Path:
    """The pipeline at home as one file.

    attended_ups: upward levels of its UNet that have attention
    """
    is_xl = (home / "text_encoder_2").is_dir()
    arrays = {
        f"model.diffusion_model.{unet_name(name, attended_ups)}": tensor
        for name, tensor in _read(home, "unet").items()
    }
    for name, tensor in _read(home, "vae").items():
        original = vae_name(name)
        is_convolution = ".attn_1." in original and tensor.ndim == 2
        arrays[f"first_stage_model.{original}"] = (
            tensor[:, :, None, None] if is_convolution else tensor
        )
    clip = "conditioner.embedders.0.transformer." if is_xl else "cond_stage_model.transformer."
    for name, tensor in _text_model(_read(home, "text_encoder")).items():
        arrays[f"{clip}{name}"] = tensor
    if is_xl:
        for name, tensor in open_clip(_read(home, "text_encoder_2")).items():
            arrays[f"conditioner.embedders.1.model.{name}"] = tensor
    arrays |= extra or {}
    save_file({name: tensor.contiguous() for name, tensor in arrays.items()}, file)
    return file
