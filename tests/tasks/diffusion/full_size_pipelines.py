"""SDXL and Z-Image as they are published, without their numbers: what a plan reads of them.

Configs have the published sizes. Files of weights are a header and a hole: they take no disk.
"""

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from tiny_pipelines import clip_tokenizer, qwen_tokenizer
from torch import nn

from samecurve_products.pictures.diffusion.families.library import library

_DIFFUSERS = "diffusion_pytorch_model"
_TRANSFORMERS = "model"


def save_sdxl(home: Path) -> Path:
    """SDXL base 1.0: 2.57 billion numbers in its UNet."""
    diffusers, transformers = library("diffusers"), library("transformers")
    first = _clip(768, intermediate_size=3072, num_hidden_layers=12, num_attention_heads=12)
    second = _clip(
        1280,
        intermediate_size=5120,
        num_hidden_layers=32,
        num_attention_heads=20,
        hidden_act="gelu",
    )
    with torch.device("meta"):
        parts = {
            "unet": sdxl_unet(),
            "vae": sdxl_vae(),
            "text_encoder": transformers.CLIPTextModel(first),
            "text_encoder_2": transformers.CLIPTextModelWithProjection(second),
        }
    tokenizers = {
        "tokenizer": clip_tokenizer(home / "made"),
        "tokenizer_2": clip_tokenizer(home / "made", pad_token="!"),
    }
    scheduler = diffusers.EulerDiscreteScheduler(
        beta_schedule="scaled_linear",
        beta_start=0.00085,
        beta_end=0.012,
        timestep_spacing="leading",
        steps_offset=1,
    )
    return _save(home, "StableDiffusionXLPipeline", parts, tokenizers, scheduler)


def save_z_image(home: Path) -> Path:
    """Z-Image: 6.15 billion numbers in its transformer, and a language model of 4 billion."""
    diffusers, transformers = library("diffusers"), library("transformers")
    language = transformers.Qwen3Config(
        vocab_size=151936,
        hidden_size=2560,
        intermediate_size=9728,
        num_hidden_layers=36,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        tie_word_embeddings=True,
    )
    with torch.device("meta"):
        parts = {
            # its sizes are the library's defaults
            "transformer": diffusers.ZImageTransformer2DModel(axes_lens=[1536, 512, 512]),
            "vae": _vae(latent_channels=16, scaling_factor=0.3611, shift_factor=0.1159),
            "text_encoder": transformers.Qwen3Model(language),
        }
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0)
    return _save(home, "ZImagePipeline", parts, {"tokenizer": qwen_tokenizer()}, scheduler)


def sdxl_unet() -> Any:
    """Made where torch makes tensors: on the meta device it has no numbers."""
    return library("diffusers").UNet2DConditionModel(
        sample_size=128,
        block_out_channels=(320, 640, 1280),
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
        transformer_layers_per_block=(1, 2, 10),
        attention_head_dim=(5, 10, 20),
        cross_attention_dim=2048,
        use_linear_projection=True,
        addition_embed_type="text_time",
        addition_time_embed_dim=256,
        projection_class_embeddings_input_dim=2816,
    )


def sdxl_vae() -> Any:
    return _vae(latent_channels=4, scaling_factor=0.13025, force_upcast=True)


def _clip(width: int, **sizes: Any) -> Any:
    return library("transformers").CLIPTextConfig(
        hidden_size=width, projection_dim=width, vocab_size=49408, **sizes
    )


def _vae(**options: Any) -> Any:
    return library("diffusers").AutoencoderKL(
        block_out_channels=(128, 256, 512, 512),
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        layers_per_block=2,
        sample_size=1024,
        **options,
    )


def _save(
    home: Path,
    pipeline: str,
    parts: Mapping[str, Any],
    tokenizers: Mapping[str, Any],
    scheduler: Any,
) -> Path:
    """Write what diffusers' save_pretrained() writes, with holes for the weights."""
    for name, part in parts.items():
        of_diffusers = hasattr(part, "save_config")
        (part.save_config if of_diffusers else part.config.save_pretrained)(home / name)
        stem = _DIFFUSERS if of_diffusers else _TRANSFORMERS
        write_hole(home / name / f"{stem}.safetensors", part)
    for name, other in {**tokenizers, "scheduler": scheduler}.items():
        other.save_pretrained(home / name)
    index = {
        name: [_library_of(part), type(part).__name__]
        for name, part in {**parts, **tokenizers, "scheduler": scheduler}.items()
    }
    (home / "model_index.json").write_text(json.dumps({"_class_name": pipeline, **index}))
    return home


def _library_of(part: object) -> str:
    return type(part).__module__.partition(".")[0]


def write_hole(file: Path, part: nn.Module) -> None:
    """A safetensors file in bf16 with the header alone; what follows is a hole."""
    header, end = {}, 0
    for name, array in part.state_dict().items():
        begin, end = end, end + 2 * array.numel()
        header[name] = {"dtype": "BF16", "shape": list(array.shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    with file.open("wb") as opened:
        opened.write(struct.pack("<Q", len(text)) + text)
        opened.truncate(8 + len(text) + end)
