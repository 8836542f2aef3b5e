"""Tiny pipelines with random weights, made without any download.

Each is saved as diffusers saves it. Their sizes are the smallest that the library builds.
"""

import json
from pathlib import Path
from typing import Any

import torch

from samecurve.tasks.diffusion.families.loading import library

CLIP_LENGTH = 77
_START, _END = "<|startoftext|>", "<|endoftext|>"


def byte_letters() -> list[str]:
    """The letters that byte-level tokenizers write bytes as."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [byte for byte in range(256) if byte not in shown]
    letters = {byte: chr(byte) for byte in shown}
    letters |= {byte: chr(256 + place) for place, byte in enumerate(hidden)}
    return [letters[byte] for byte in range(256)]


def clip_tokenizer(home: Path, **options: Any) -> Any:
    """A CLIP tokenizer of single bytes."""
    letters = byte_letters()
    words = [*letters, *(f"{letter}</w>" for letter in letters), _START, _END]
    home.mkdir(parents=True, exist_ok=True)
    (home / "vocab.json").write_text(json.dumps({word: i for i, word in enumerate(words)}))
    (home / "merges.txt").write_text("#version: 0.2\n")
    return library("transformers").CLIPTokenizer.from_pretrained(
        home, model_max_length=CLIP_LENGTH, local_files_only=True, **options
    )


def clip_config(width: int, **options: Any) -> Any:
    return library("transformers").CLIPTextConfig(
        **{
            "vocab_size": 514,
            "hidden_size": width,
            "intermediate_size": 2 * width,
            "num_hidden_layers": 3,
            "num_attention_heads": 2,
            "max_position_embeddings": CLIP_LENGTH,
            "projection_dim": width,
            "bos_token_id": 512,
            "eos_token_id": 513,
            "pad_token_id": 513,
            **options,
        }
    )


def vae(**options: Any) -> Any:
    """Of two levels: two pixels become one place."""
    return library("diffusers").AutoencoderKL(
        **{
            "block_out_channels": [8, 16],
            "down_block_types": ["DownEncoderBlock2D"] * 2,
            "up_block_types": ["UpDecoderBlock2D"] * 2,
            "layers_per_block": 1,
            "norm_num_groups": 4,
            "latent_channels": 4,
            "sample_size": 32,
            "scaling_factor": 0.5,
            **options,
        }
    )


def unet(**options: Any) -> Any:
    return library("diffusers").UNet2DConditionModel(
        **{
            "sample_size": 16,
            "block_out_channels": [8, 16],
            "down_block_types": ["CrossAttnDownBlock2D", "DownBlock2D"],
            "up_block_types": ["UpBlock2D", "CrossAttnUpBlock2D"],
            "layers_per_block": 1,
            "norm_num_groups": 4,
            "attention_head_dim": 2,
            "cross_attention_dim": 16,
            **options,
        }
    )


def save_sd15(home: Path, **scheduler: Any) -> Path:
    diffusers, transformers = library("diffusers"), library("transformers")
    torch.manual_seed(0)
    diffusers.StableDiffusionPipeline(
        vae=vae(),
        text_encoder=transformers.CLIPTextModel(clip_config(16)),
        tokenizer=clip_tokenizer(home / "made"),
        unet=unet(),
        scheduler=diffusers.PNDMScheduler(
            **{
                "beta_schedule": "scaled_linear",
                "beta_start": 0.00085,
                "beta_end": 0.012,
                "skip_prk_steps": True,
                "steps_offset": 1,
                **scheduler,
            }
        ),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    ).save_pretrained(home)
    return home


def save_sdxl(home: Path, **scheduler: Any) -> Path:
    diffusers, transformers = library("diffusers"), library("transformers")
    torch.manual_seed(0)
    diffusers.StableDiffusionXLPipeline(
        vae=vae(force_upcast=True),
        text_encoder=transformers.CLIPTextModel(clip_config(16)),
        text_encoder_2=transformers.CLIPTextModelWithProjection(clip_config(24, hidden_act="gelu")),
        tokenizer=clip_tokenizer(home / "made"),
        tokenizer_2=clip_tokenizer(home / "made", pad_token="!"),
        unet=unet(
            down_block_types=["DownBlock2D", "CrossAttnDownBlock2D"],
            up_block_types=["CrossAttnUpBlock2D", "UpBlock2D"],
            cross_attention_dim=40,
            transformer_layers_per_block=[1, 2],
            attention_head_dim=[2, 4],
            use_linear_projection=True,
            addition_embed_type="text_time",
            addition_time_embed_dim=8,
            projection_class_embeddings_input_dim=6 * 8 + 24,
        ),
        scheduler=diffusers.EulerDiscreteScheduler(
            **{
                "beta_schedule": "scaled_linear",
                "beta_start": 0.00085,
                "beta_end": 0.012,
                "timestep_spacing": "leading",
                "steps_offset": 1,
                **scheduler,
            }
        ),
        add_watermarker=False,
    ).save_pretrained(home)
    return home
