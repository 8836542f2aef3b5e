"""Models of pictures that compute in milliseconds, in float64, with inputs for them."""

from collections.abc import Mapping
from typing import Any

import torch

from samecurve_products.lora.adapter import import_peft
from samecurve_products.lora.names import OWN

# layers of every sort: attention, feed-forward, convolutions of 1 and 3, strides of 1 and 2
UNET_TARGETS = (
    r".*(attn2\.to_[qv]|to_out\.0|proj_in|ff\.net\.2|time_emb_proj|conv1|conv_shortcut"
    r"|samplers\.0\.conv)|conv_in|time_embedding\.linear_1"
)
FLUX_TARGETS = r".*(to_q|add_k_proj|to_add_out|proj_mlp|ff\.net\.2)|x_embedder"
TARGETS = {"sd15": UNET_TARGETS, "sdxl": UNET_TARGETS, "flux": FLUX_TARGETS}

_UNET: dict[str, Any] = {
    "block_out_channels": (8, 16),
    "layers_per_block": 1,
    "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
    "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D"),
    "cross_attention_dim": 12,
    "attention_head_dim": 4,
    "norm_num_groups": 4,
    "sample_size": 8,
}
_SDXL: dict[str, Any] = {
    "use_linear_projection": True,
    "addition_embed_type": "text_time",
    "addition_time_embed_dim": 4,
    "projection_class_embeddings_input_dim": 34,
    "transformer_layers_per_block": (1, 2),
}
_FLUX: dict[str, Any] = {
    "patch_size": 1,
    "in_channels": 6,
    "num_layers": 1,
    "num_single_layers": 1,
    "attention_head_dim": 8,
    "num_attention_heads": 2,
    "joint_attention_dim": 12,
    "pooled_projection_dim": 10,
    "axes_dims_rope": (2, 2, 4),
}
_SD3: dict[str, Any] = {
    "sample_size": 16,
    "in_channels": 4,
    "out_channels": 4,
    "num_layers": 2,
    "attention_head_dim": 8,
    "num_attention_heads": 2,
    "joint_attention_dim": 40,
    "caption_projection_dim": 16,
    "pooled_projection_dim": 40,
    "pos_embed_max_size": 24,
}
_FLUX2: dict[str, Any] = {
    "in_channels": 16,
    "num_layers": 1,
    "num_single_layers": 1,
    "attention_head_dim": 16,
    "num_attention_heads": 2,
    "joint_attention_dim": 24,
    "timestep_guidance_channels": 16,
    "axes_dims_rope": (4, 4, 4, 4),
    "guidance_embeds": False,
}
_Z_IMAGE: dict[str, Any] = {
    "in_channels": 4,
    "dim": 32,
    "n_layers": 2,
    "n_refiner_layers": 1,
    "n_heads": 2,
    "n_kv_heads": 2,
    "cap_feat_dim": 16,
    "axes_dims": [4, 6, 6],
    "axes_lens": [600, 64, 64],
}
_TRANSFORMERS = {
    "flux": ("FluxTransformer2DModel", _FLUX),
    "sd3": ("SD3Transformer2DModel", _SD3),
    "flux2": ("Flux2Transformer2DModel", _FLUX2),
    "z_image": ("ZImageTransformer2DModel", _Z_IMAGE),
}
COMPONENTS = {"sd15": "unet", "sdxl": "unet", **dict.fromkeys(_TRANSFORMERS, "transformer")}


def build(name: str, dtype: torch.dtype = torch.float64) -> Any:
    """A frozen model, the same at each call: a frozen matrix is multiplied in another order."""
    import_peft()
    import diffusers

    library: Any = diffusers
    torch.manual_seed(1)
    if name in _TRANSFORMERS:
        kind, fields = _TRANSFORMERS[name]
        model = getattr(library, kind)(**fields)
    else:
        fields = {**_UNET, **(_SDXL if name == "sdxl" else {})}
        model = library.UNet2DConditionModel(**fields)
    return model.to(dtype).eval().requires_grad_(False)


@torch.no_grad()
def run(name: str, model: Any) -> torch.Tensor:
    """What the model says of fixed inputs."""
    random, dtype = torch.Generator().manual_seed(2), next(model.parameters()).dtype

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=random, dtype=torch.float64).to(dtype)

    if name == "flux":
        positions = torch.zeros(16, 3)
        positions[:, 1], positions[:, 2] = torch.arange(16) // 4, torch.arange(16) % 4
        said = model(
            hidden_states=draw(2, 16, 6),
            encoder_hidden_states=draw(2, 5, 12),
            pooled_projections=draw(2, 10),
            timestep=torch.tensor([0.2, 0.7], dtype=dtype),
            img_ids=positions,
            txt_ids=torch.zeros(5, 3),
        )
    else:
        added = {"text_embeds": draw(2, 10), "time_ids": torch.ones(2, 6, dtype=dtype)}
        conditions = {"added_cond_kwargs": added} if name == "sdxl" else {}
        said = model(draw(2, 4, 8, 8), torch.tensor([3, 500]), draw(2, 5, 12), **conditions)
    sample: torch.Tensor = said.sample
    return sample


def train(model: Any) -> None:
    """Move what is trained, as training would."""
    random = torch.Generator().manual_seed(3)
    for name, parameter in model.named_parameters():
        if name.endswith(OWN):
            values = torch.randn(parameter.shape, generator=random, dtype=torch.float64)
            parameter.data = parameter.data.double() + 0.1 * values


def adapter_arrays(model: Any) -> Mapping[str, torch.Tensor]:
    return {name: t for name, t in model.state_dict().items() if name.endswith(OWN)}
