"""Tiny pipelines with random weights, made without any download.

Each is saved as diffusers saves it. Their sizes are the smallest that the library builds.
"""

import json
from pathlib import Path
from typing import Any

import torch

from samecurve_products.pictures.diffusion.families.library import library

ALL = ["sd15", "sdxl", "z_image", "sd3", "flux", "flux2"]
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


def save_z_image(home: Path, **scheduler: Any) -> Path:
    diffusers = library("diffusers")
    torch.manual_seed(0)
    transformer = diffusers.ZImageTransformer2DModel(
        in_channels=4,
        dim=32,
        n_layers=2,
        n_refiner_layers=1,
        n_heads=2,
        n_kv_heads=2,
        cap_feat_dim=16,
        axes_dims=[4, 6, 6],
        axes_lens=[600, 64, 64],
    )
    torch.nn.init.normal_(transformer.x_pad_token)
    torch.nn.init.normal_(transformer.cap_pad_token)
    diffusers.ZImagePipeline(
        vae=vae(shift_factor=0.1),
        text_encoder=qwen(16),
        tokenizer=qwen_tokenizer(),
        transformer=transformer,
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(**{"shift": 3.0, **scheduler}),
    ).save_pretrained(home)
    return home


def qwen(width: int, layers: int = 3) -> Any:
    """A language model over bytes."""
    transformers = library("transformers")
    config = transformers.Qwen3Config(
        vocab_size=260,
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=layers,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
    )
    return (transformers.Qwen3Model if layers == 3 else transformers.Qwen3ForCausalLM)(config)


def qwen_tokenizer() -> Any:
    """A tokenizer of single bytes, with a template for one message."""
    letters = byte_letters()
    specials = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    tokenizer = library("transformers").Qwen2Tokenizer(
        vocab={word: i for i, word in enumerate([*letters, *specials])}, merges=[]
    )
    tokenizer.chat_template = (
        "{% for message in messages %}<|im_start|>{{ message.content }}<|im_end|>{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>{% if not enable_thinking %}-{% endif %}"
        "{% endif %}"
    )
    return tokenizer


def t5(width: int) -> Any:
    """A T5 encoder of two layers, over letters."""
    transformers = library("transformers")
    config = transformers.T5Config(
        vocab_size=64,
        d_model=width,
        d_kv=8,
        d_ff=2 * width,
        num_layers=2,
        num_heads=2,
        feed_forward_proj="gated-gelu",
    )
    return transformers.T5EncoderModel(config)


def t5_tokenizer() -> Any:
    letters = ["\u2581", *"abcdefghijklmnopqrstuvwxyz ,.:-0123456789"]
    pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), *((each, -2.0) for each in letters)]
    return library("transformers").T5TokenizerFast(vocab=pieces, extra_ids=0)


def save_sd3(home: Path, **scheduler: Any) -> Path:
    diffusers, transformers = library("diffusers"), library("transformers")
    torch.manual_seed(0)
    clip = transformers.CLIPTextModelWithProjection
    diffusers.StableDiffusion3Pipeline(
        vae=vae(shift_factor=0.1),
        text_encoder=clip(clip_config(16)),
        text_encoder_2=clip(clip_config(24, hidden_act="gelu")),
        text_encoder_3=t5(40),
        tokenizer=clip_tokenizer(home / "made"),
        tokenizer_2=clip_tokenizer(home / "made", pad_token="!"),
        tokenizer_3=t5_tokenizer(),
        transformer=diffusers.SD3Transformer2DModel(
            sample_size=16,
            in_channels=4,
            out_channels=4,
            num_layers=2,
            attention_head_dim=8,
            num_attention_heads=2,
            joint_attention_dim=40,
            caption_projection_dim=16,
            pooled_projection_dim=40,
            pos_embed_max_size=24,
            qk_norm="rms_norm",
            dual_attention_layers=(0,),
        ),
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(**{"shift": 3.0, **scheduler}),
    ).save_pretrained(home)
    return home


def save_flux(home: Path, **scheduler: Any) -> Path:
    diffusers, transformers = library("diffusers"), library("transformers")
    torch.manual_seed(0)
    diffusers.FluxPipeline(
        vae=vae(shift_factor=0.1),
        text_encoder=transformers.CLIPTextModel(clip_config(16)),
        text_encoder_2=t5(24),
        tokenizer=clip_tokenizer(home / "made"),
        tokenizer_2=t5_tokenizer(),
        transformer=diffusers.FluxTransformer2DModel(
            in_channels=16,
            num_layers=1,
            num_single_layers=2,
            attention_head_dim=16,
            num_attention_heads=2,
            joint_attention_dim=24,
            pooled_projection_dim=16,
            guidance_embeds=True,
            axes_dims_rope=(4, 6, 6),
        ),
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(
            **{"use_dynamic_shifting": True, "shift": 3.0, **scheduler}
        ),
    ).save_pretrained(home)
    return home


def save_flux2(home: Path, **settings: Any) -> Path:
    """Its captions are three layers of a language model: the 9th, 18th and 27th."""
    diffusers = library("diffusers")
    torch.manual_seed(0)
    autoencoder = diffusers.AutoencoderKLFlux2(
        block_out_channels=[8, 16],
        down_block_types=["DownEncoderBlock2D"] * 2,
        up_block_types=["UpDecoderBlock2D"] * 2,
        layers_per_block=1,
        norm_num_groups=4,
        latent_channels=4,
        sample_size=32,
    )
    autoencoder.bn.running_mean.normal_()
    autoencoder.bn.running_var.uniform_(0.5, 2)
    diffusers.Flux2KleinPipeline(
        vae=autoencoder,
        text_encoder=qwen(8, layers=27),
        tokenizer=qwen_tokenizer(),
        transformer=diffusers.Flux2Transformer2DModel(
            in_channels=16,
            num_layers=1,
            num_single_layers=1,
            attention_head_dim=16,
            num_attention_heads=2,
            joint_attention_dim=24,
            timestep_guidance_channels=16,
            axes_dims_rope=(4, 4, 4, 4),
            guidance_embeds=False,
        ),
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True, shift=3.0),
        **settings,
    ).save_pretrained(home)
    return home
