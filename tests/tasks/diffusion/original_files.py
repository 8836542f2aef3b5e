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

OF_ONE_FILE = {"sd15": {1}, "sdxl": {0}}  # the upward levels of the UNet that have attention
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


def unet_name(name: str, attended_ups: set[int], layers: int = LAYERS) -> str:
    """The original name of an array of a UNet.

    attended_ups: upward levels with attention
    layers: residual blocks of a downward level
    """
    for ours, original in _OUTSIDE.items():
        if name.startswith(f"{ours}."):
            return name.replace(ours, original, 1)
    place, _, rest = name.partition(".")
    if place == "mid_block":
        kind, number, rest = rest.split(".", 2)
        block = f"middle_block.{2 * int(number) if kind == 'resnets' else 1}"
        return f"{block}.{_in_block(kind, rest)}"
    level, kind, number, rest = rest.split(".", 3)
    first = int(level) * (layers + 1)
    if kind == "downsamplers":
        return f"input_blocks.{first + layers + 1}.0.op.{rest.removeprefix('conv.')}"
    if kind == "upsamplers":
        position = 2 if int(level) in attended_ups else 1
        return f"output_blocks.{first + layers}.{position}.{rest}"
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


_SD3_OUTSIDE = {
    "pos_embed.pos_embed": "pos_embed",
    "pos_embed.proj": "x_embedder.proj",
    "time_text_embed.timestep_embedder.linear_1": "t_embedder.mlp.0",
    "time_text_embed.timestep_embedder.linear_2": "t_embedder.mlp.2",
    "time_text_embed.text_embedder.linear_1": "y_embedder.mlp.0",
    "time_text_embed.text_embedder.linear_2": "y_embedder.mlp.2",
    "norm_out.linear": "final_layer.adaLN_modulation.1",
    "proj_out": "final_layer.linear",
}
_SD3_INSIDE = {
    "norm1.linear": "x_block.adaLN_modulation.1",
    "norm1_context.linear": "context_block.adaLN_modulation.1",
    "attn.to_out.0": "x_block.attn.proj",
    "attn2.to_out.0": "x_block.attn2.proj",
    "attn.to_add_out": "context_block.attn.proj",
    "attn.norm_added_q": "context_block.attn.ln_q",
    "attn.norm_added_k": "context_block.attn.ln_k",
    "attn.norm_q": "x_block.attn.ln_q",
    "attn.norm_k": "x_block.attn.ln_k",
    "attn2.norm_q": "x_block.attn2.ln_q",
    "attn2.norm_k": "x_block.attn2.ln_k",
    "ff.net.0.proj": "x_block.mlp.fc1",
    "ff.net.2": "x_block.mlp.fc2",
    "ff_context.net.0.proj": "context_block.mlp.fc1",
    "ff_context.net.2": "context_block.mlp.fc2",
    "attn.to_q": "x_block.attn.qkv",
    "attn2.to_q": "x_block.attn2.qkv",
    "attn.add_q_proj": "context_block.attn.qkv",
}
_FLUX_OUTSIDE = {
    "x_embedder": "img_in",
    "context_embedder": "txt_in",
    "time_text_embed.timestep_embedder.linear_1": "time_in.in_layer",
    "time_text_embed.timestep_embedder.linear_2": "time_in.out_layer",
    "time_text_embed.guidance_embedder.linear_1": "guidance_in.in_layer",
    "time_text_embed.guidance_embedder.linear_2": "guidance_in.out_layer",
    "time_text_embed.text_embedder.linear_1": "vector_in.in_layer",
    "time_text_embed.text_embedder.linear_2": "vector_in.out_layer",
    "norm_out.linear": "final_layer.adaLN_modulation.1",
    "proj_out": "final_layer.linear",
}
_FLUX_INSIDE = {
    "norm1.linear": "img_mod.lin",
    "norm1_context.linear": "txt_mod.lin",
    "attn.to_out.0": "img_attn.proj",
    "attn.to_add_out": "txt_attn.proj",
    "attn.norm_added_q.weight": "txt_attn.norm.query_norm.scale",
    "attn.norm_added_k.weight": "txt_attn.norm.key_norm.scale",
    "attn.norm_q.weight": "img_attn.norm.query_norm.scale",
    "attn.norm_k.weight": "img_attn.norm.key_norm.scale",
    "ff.net.0.proj": "img_mlp.0",
    "ff.net.2": "img_mlp.2",
    "ff_context.net.0.proj": "txt_mlp.0",
    "ff_context.net.2": "txt_mlp.2",
    "attn.to_q": "img_attn.qkv",
    "attn.add_q_proj": "txt_attn.qkv",
}
_FLUX_SINGLE = {
    "norm.linear": "modulation.lin",
    "proj_out": "linear2",
    "attn.norm_q.weight": "norm.query_norm.scale",
    "attn.norm_k.weight": "norm.key_norm.scale",
    "attn.to_q": "linear1",
}
_FLUX2_OUTSIDE = {
    "x_embedder": "img_in",
    "context_embedder": "txt_in",
    "time_guidance_embed.timestep_embedder.linear_1": "time_in.in_layer",
    "time_guidance_embed.timestep_embedder.linear_2": "time_in.out_layer",
    "double_stream_modulation_img.linear": "double_stream_modulation_img.lin",
    "double_stream_modulation_txt.linear": "double_stream_modulation_txt.lin",
    "single_stream_modulation.linear": "single_stream_modulation.lin",
    "norm_out.linear": "final_layer.adaLN_modulation.1",
    "proj_out": "final_layer.linear",
}
_FLUX2_INSIDE = {
    **_FLUX_INSIDE,
    "ff.linear_in": "img_mlp.0",
    "ff.linear_out": "img_mlp.2",
    "ff_context.linear_in": "txt_mlp.0",
    "ff_context.linear_out": "txt_mlp.2",
}
_FLUX2_SINGLE = {
    "attn.to_qkv_mlp_proj": "linear1",
    "attn.to_out": "linear2",
    "attn.norm_q.weight": "norm.query_norm.scale",
    "attn.norm_k.weight": "norm.key_norm.scale",
}
_JOINED = (("to_q", "to_k", "to_v"), ("add_q_proj", "add_k_proj", "add_v_proj"))


def _renamed(name: str, table: Mapping[str, str]) -> str:
    for ours, original in table.items():
        if name == ours or name.startswith(f"{ours}."):
            return original + name.removeprefix(ours)
    return name


def _with_joined(own: Mapping[str, Tensor], name: str) -> Tensor | None:
    """The array under a name, with those that are joined to it; None: it is joined to another."""
    for first, *others in _JOINED:
        if f".{first}." in name:
            each = [own[name.replace(first, other)] for other in (first, *others)]
            if name.startswith("single_transformer_blocks."):
                each.append(own[name.replace("attn.to_q", "proj_mlp")])
            return torch.cat(each)
        if any(f".{other}." in name for other in others):
            return None
    return None if ".proj_mlp." in name else own[name]


def _with_swapped_halves(tensor: Tensor) -> Tensor:
    return torch.cat(tensor.chunk(2)[::-1])


def sd3_arrays(own: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A denoiser of SD3 as its authors lay it out."""
    last = max(int(name.split(".")[1]) for name in own if name.startswith("transformer_blocks."))
    arrays = {}
    for name in own:
        tensor = _with_joined(own, name)
        if tensor is None:
            continue
        if name.startswith((f"transformer_blocks.{last}.norm1_context", "norm_out")):
            tensor = _with_swapped_halves(tensor)
        original = _renamed(name, _SD3_OUTSIDE)
        if name.startswith("transformer_blocks."):
            _, block, rest = name.split(".", 2)
            original = f"joint_blocks.{block}.{_renamed(rest, _SD3_INSIDE)}"
        arrays[original] = tensor
    return arrays


def flux_arrays(own: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A denoiser of FLUX.1 as its authors lay it out."""
    return _flux_arrays(own, _FLUX_OUTSIDE, _FLUX_INSIDE, _FLUX_SINGLE)


def flux2_arrays(own: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A denoiser of FLUX.2 as its authors lay it out."""
    return _flux_arrays(own, _FLUX2_OUTSIDE, _FLUX2_INSIDE, _FLUX2_SINGLE)


def _flux_arrays(
    own: Mapping[str, Tensor],
    outside: Mapping[str, str],
    inside: Mapping[str, str],
    single: Mapping[str, str],
) -> dict[str, Tensor]:
    arrays = {}
    for name in own:
        tensor = _with_joined(own, name)
        if tensor is None:
            continue
        if name.startswith("norm_out"):
            tensor = _with_swapped_halves(tensor)
        original = _renamed(name, outside)
        for place, blocks, table in (
            ("transformer_blocks.", "double_blocks", inside),
            ("single_transformer_blocks.", "single_blocks", single),
        ):
            if name.startswith(place):
                _, block, rest = name.split(".", 2)
                original = f"{blocks}.{block}.{_renamed(rest, table)}"
        arrays[original] = tensor
    return arrays


def z_image_arrays(own: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A denoiser of Z-Image as its authors lay it out."""
    arrays = {}
    for name in own:
        tensor = _with_joined(own, name)
        if tensor is None:
            continue
        original = name.replace("all_x_embedder.2-1.", "x_embedder.")
        original = original.replace("all_final_layer.2-1.", "final_layer.")
        original = original.replace("attention.to_out.0.", "attention.out.")
        original = re.sub(r"attention\.norm_([qk])\.", r"attention.\1_norm.", original)
        arrays[original.replace(".to_q.", ".qkv.")] = tensor
    return arrays


def save_denoiser(home: Path, file: Path, prefix: str = "") -> Path:
    """The denoiser of the pipeline at home as its authors lay it out, alone in a file."""
    arrays = globals()[f"{home.name}_arrays"](_read(home, "transformer"))
    save_file({f"{prefix}{name}": tensor.contiguous() for name, tensor in arrays.items()}, file)
    return file
