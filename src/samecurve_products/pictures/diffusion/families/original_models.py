"""Configs of the models that a checkpoint in one file may hold: such a file has none of its own.

The numbers are those of the published models, in the library's words. What is not named has the
library's default.
"""

from collections.abc import Mapping
from typing import Any

_CLIP_L: Mapping[str, Any] = {
    "vocab_size": 49408,
    "hidden_size": 768,
    "intermediate_size": 3072,
    "projection_dim": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "max_position_embeddings": 77,
    "hidden_act": "quick_gelu",
    "layer_norm_eps": 1e-5,
    "bos_token_id": 49406,
    "eos_token_id": 49407,
    "pad_token_id": 49407,
}
_CLIP_BIG_G: Mapping[str, Any] = {
    **_CLIP_L,
    "hidden_size": 1280,
    "intermediate_size": 5120,
    "projection_dim": 1280,
    "num_hidden_layers": 32,
    "num_attention_heads": 20,
    "hidden_act": "gelu",
}
_TOKENIZER: Mapping[str, Any] = {"model_max_length": 77}
_VAE: Mapping[str, Any] = {
    "in_channels": 3,
    "out_channels": 3,
    "latent_channels": 4,
    "block_out_channels": [128, 256, 512, 512],
    "down_block_types": ["DownEncoderBlock2D"] * 4,
    "up_block_types": ["UpDecoderBlock2D"] * 4,
    "layers_per_block": 2,
    "norm_num_groups": 32,
    "act_fn": "silu",
    "sample_size": 512,
    "scaling_factor": 0.18215,
}
_BETAS: Mapping[str, Any] = {
    "num_train_timesteps": 1000,
    "beta_schedule": "scaled_linear",
    "beta_start": 0.00085,
    "beta_end": 0.012,
    "prediction_type": "epsilon",
    "steps_offset": 1,
}

# pipeline -> component -> library, class, config
ORIGINAL_MODELS: Mapping[str, Mapping[str, tuple[str, str, Mapping[str, Any]]]] = {
    "StableDiffusionPipeline": {
        "unet": (
            "diffusers",
            "UNet2DConditionModel",
            {
                "sample_size": 64,
                "in_channels": 4,
                "out_channels": 4,
                "down_block_types": [*["CrossAttnDownBlock2D"] * 3, "DownBlock2D"],
                "up_block_types": ["UpBlock2D", *["CrossAttnUpBlock2D"] * 3],
                "block_out_channels": [320, 640, 1280, 1280],
                "layers_per_block": 2,
                "cross_attention_dim": 768,
                "attention_head_dim": 8,
            },
        ),
        "vae": ("diffusers", "AutoencoderKL", _VAE),
        "text_encoder": ("transformers", "CLIPTextModel", _CLIP_L),
        "tokenizer": ("transformers", "CLIPTokenizer", _TOKENIZER),
        "scheduler": (
            "diffusers",
            "PNDMScheduler",
            {**_BETAS, "set_alpha_to_one": False, "skip_prk_steps": True},
        ),
    },
    "StableDiffusionXLPipeline": {
        "unet": (
            "diffusers",
            "UNet2DConditionModel",
            {
                "sample_size": 128,
                "in_channels": 4,
                "out_channels": 4,
                "down_block_types": ["DownBlock2D", *["CrossAttnDownBlock2D"] * 2],
                "up_block_types": [*["CrossAttnUpBlock2D"] * 2, "UpBlock2D"],
                "block_out_channels": [320, 640, 1280],
                "layers_per_block": 2,
                "transformer_layers_per_block": [1, 2, 10],
                "cross_attention_dim": 2048,
                "attention_head_dim": [5, 10, 20],
                "use_linear_projection": True,
                "addition_embed_type": "text_time",
                "addition_time_embed_dim": 256,
                "projection_class_embeddings_input_dim": 2816,
            },
        ),
        "vae": (
            "diffusers",
            "AutoencoderKL",
            {**_VAE, "sample_size": 1024, "scaling_factor": 0.13025, "force_upcast": True},
        ),
        "text_encoder": ("transformers", "CLIPTextModel", _CLIP_L),
        "tokenizer": ("transformers", "CLIPTokenizer", _TOKENIZER),
        "text_encoder_2": ("transformers", "CLIPTextModelWithProjection", _CLIP_BIG_G),
        "tokenizer_2": ("transformers", "CLIPTokenizer", {**_TOKENIZER, "pad_token": "!"}),
        "scheduler": (
            "diffusers",
            "EulerDiscreteScheduler",
            {**_BETAS, "timestep_spacing": "leading"},
        ),
    },
}
SETTINGS: Mapping[str, Mapping[str, Any]] = {
    "StableDiffusionPipeline": {"requires_safety_checker": False},
    "StableDiffusionXLPipeline": {"force_zeros_for_empty_prompt": True},
}
