"""OneTrainer's presets, in August 2026: their names, and what each sets that decides what becomes
of it here. Rates, batches, resolutions and names of models are ours.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

UNSERVED, OPTIMIZER, ENCODERS = "kind of model", "optimizer", "text encoders"
METHOD, TIMES, SOME_TIMES = "training method", "distribution of times", "some times only"
WEIGHTS, MASKS, PLACE = "weights of times", "masks", "a part elsewhere"

_FLOW = {"timestep_distribution": "LOGIT_NORMAL"}
_PARABOLA = {"timestep_distribution": "INVERTED_PARABOLA", "noising_weight": 8.0}
_ADAFACTOR = {"optimizer": {"optimizer": "ADAFACTOR"}}
_P2 = {"loss_weight_fn": "P2", "loss_weight_strength": 1.0}
_Z_LAYERS = {
    "layer_filter": "^(?=.*attention)(?!.*refiner).*,^(?=.*feed_forward)(?!.*refiner).*",
    "layer_filter_preset": "attn-mlp",
    "layer_filter_regex": True,
}
_MASKED = {"masked_training": True, "normalize_masked_area_loss": True}
_INPAINTING = "_INPAINTING"
_SD15, _SD20, _SD21 = "STABLE_DIFFUSION_15", "STABLE_DIFFUSION_20", "STABLE_DIFFUSION_21"
_SDXL = "STABLE_DIFFUSION_XL_10_BASE"


class Preset(NamedTuple):
    """A preset.

    reasons: why it does not train here as it is; none: it does
    """

    name: str
    model_type: str
    method: str
    fields: Mapping[str, Any]
    reasons: tuple[str, ...] = ()


def _frozen(number: int, denoiser: str = "transformer", **part: Any) -> dict[str, Any]:
    """The sections of a denoiser that is trained, and of text encoders that are not."""
    names = ["text_encoder", *(f"text_encoder_{n}" for n in range(2, number + 1))]
    encoders = {name: {"train": False, "weight_dtype": "FLOAT_8"} for name in names}
    return {denoiser: {"train": True, "weight_dtype": "BFLOAT_16", **part}, **encoders}


def _unet(number: int) -> dict[str, Any]:
    """The sections of Stable Diffusion's presets, of whose text encoders they say little."""
    names = ["unet", "text_encoder", *(f"text_encoder_{n}" for n in range(2, number + 1))]
    return {name: {"weight_dtype": "FLOAT_16"} for name in names}


def _layers(names: str, preset: str) -> dict[str, Any]:
    return {"layer_filter": names, "layer_filter_preset": preset}


def _pair(
    name: str, sizes: str, model_type: str, method: str, fields: dict[str, Any], *why: str
) -> list[Preset]:
    """A preset for each size of GPU memory: the smaller ones move more layers to host memory."""
    return [
        Preset(
            f"{name} {size}",
            model_type,
            method,
            {**fields, "transformer": {**fields["transformer"], "offload_fraction": 0.5}},
            why,
        )
        for size in sizes.split()
    ]


_ONE, _TWO, _THREE = _frozen(1), _frozen(2), _frozen(3)
_QUANTIZED = _frozen(1, weight_dtype="INT_W8A8")
_MORE = {"learning_rate": 2e-4, "batch_size": 2, "resolution": "512", "train_dtype": "BFLOAT_16"}
_TUNE, _LORA, _EMBED = "FINE_TUNE", "LORA", "EMBEDDING"
_PIXART = {**_frozen(1, "transformer"), "epochs": 40}
_CHROMA = {**_ONE, **_PARABOLA}
_DETURBO = _frozen(1, model_name="https://example.org/z_image_de_turbo.safetensors")
_WUERSTCHEN = {
    "prior": {"weight_dtype": "FLOAT_16"},
    "text_encoder": {"weight_dtype": "FLOAT_16"},
    "decoder": {"model_name": "models/decoder", "weight_dtype": "FLOAT_16"},
    "decoder_vqgan": {"weight_dtype": "FLOAT_16"},
    "effnet_encoder": {"model_name": "models/effnet", "weight_dtype": "FLOAT_16"},
    **_P2,
}
_BY_WINDOW = {"layer_filter_preset": "attn-mlp"}

PRESETS: tuple[Preset, ...] = (
    Preset(
        "anima Finetune",
        "ANIMA",
        _TUNE,
        {**_ONE, **_FLOW, **_ADAFACTOR, **_layers("transformer_block", "blocks")},
        (UNSERVED, OPTIMIZER),
    ),
    Preset(
        "anima LoRA",
        "ANIMA",
        _LORA,
        {**_QUANTIZED, **_FLOW, **_layers("attn1,attn2,ff", "attn-mlp")},
        (UNSERVED,),
    ),
    *_pair(
        *("chroma Finetune", "8GB 16GB 24GB", "CHROMA_1", _TUNE, {**_CHROMA, **_ADAFACTOR}),
        *(UNSERVED, TIMES, OPTIMIZER),
    ),
    *_pair(
        *("chroma LoRA", "8GB 16GB 24GB", "CHROMA_1", _LORA),
        {**_CHROMA, **_layers("attn,ff.net,proj_mlp", "attn-mlp")},
        *(UNSERVED, TIMES),
    ),
    *_pair(
        *("ernie LoRA", "8GB 16GB", "ERNIE", _LORA),
        {**_QUANTIZED, **_FLOW, **_layers("self_attention,mlp", "attn-mlp")},
        UNSERVED,
    ),
    *_pair(
        *("flux2 Finetune", "16GB 24GB", "FLUX_2", _TUNE),
        {**_ONE, **_FLOW, "dynamic_timestep_shifting": True, **_ADAFACTOR},
        OPTIMIZER,
    ),
    *_pair(
        *("flux2 LoRA", "8GB 16GB", "FLUX_2", _LORA),
        {
            **_QUANTIZED,
            **_FLOW,
            "dynamic_timestep_shifting": True,
            "compile": True,
            **_layers("transformer_block", "blocks"),
        },
    ),
    Preset(
        "flux LoRA",
        "FLUX_DEV_1",
        _LORA,
        {**_frozen(2, weight_dtype="NFLOAT_4"), **_FLOW, "dynamic_timestep_shifting": True},
    ),
    Preset(
        "hidream LoRA",
        "HI_DREAM_FULL",
        _LORA,
        {**_frozen(4, weight_dtype="FLOAT_8"), **_FLOW},
        (UNSERVED,),
    ),
    Preset(
        "hunyuan video LoRA",
        "HUNYUAN_VIDEO",
        _LORA,
        {**_TWO, **_FLOW, **_layers("transformer_blocks", "blocks")},
        (UNSERVED,),
    ),
    *_pair(
        *("ideogram Finetune", "16GB 24GB", "IDEOGRAM_4", _TUNE),
        {**_ONE, **_FLOW, **_ADAFACTOR, **_layers("layers", "blocks")},
        *(UNSERVED, OPTIMIZER),
    ),
    *_pair(
        *("ideogram LoRA", "16GB 24GB", "IDEOGRAM_4", _LORA),
        {
            **_QUANTIZED,
            **_FLOW,
            **_layers("attention,feed_forward", "attn-mlp"),
            "unconditional_transformer": {"weight_dtype": "NFLOAT_4", "offload_fraction": 1.0},
        },
        UNSERVED,
    ),
    *_pair(
        *("krea2 Finetune", "16GB 24GB", "KREA_2", _TUNE),
        {
            **_ONE,
            **_FLOW,
            **_ADAFACTOR,
            **_layers("transformer_blocks", "blocks"),
            "attention_mechanism": "CUDNN",
        },
        *(UNSERVED, OPTIMIZER),
    ),
    *_pair(
        *("krea2 LoRA", "16GB 24GB", "KREA_2", _LORA),
        {**_QUANTIZED, **_FLOW, **_layers("attn,ff", "attn-mlp"), "attention_mechanism": "CUDNN"},
        UNSERVED,
    ),
    Preset("pixart alpha 1.0", "PIXART_ALPHA", _TUNE, _PIXART, (UNSERVED,)),
    Preset("pixart sigma 1.0 LoRA", "PIXART_SIGMA", _LORA, _PIXART, (UNSERVED,)),
    Preset("pixart sigma 1.0", "PIXART_SIGMA", _TUNE, _PIXART, (UNSERVED,)),
    *_pair(
        *("qwen Finetune", "16GB 24GB", "QWEN", _TUNE),
        {**_ONE, **_FLOW, **_ADAFACTOR, **_layers("transformer_block", "blocks")},
        *(UNSERVED, OPTIMIZER),
    ),
    *_pair(
        *("qwen LoRA", "16GB 24GB", "QWEN", _LORA),
        {**_QUANTIZED, **_FLOW, **_layers("attn,img_mlp,txt_mlp", "attn-mlp")},
        UNSERVED,
    ),
    Preset("sd 1.5 LoRA", _SD15, _LORA, {**_unet(1), **_BY_WINDOW}, (ENCODERS,)),
    Preset("sd 1.5 embedding", _SD15, _EMBED, _unet(1), (METHOD, ENCODERS)),
    Preset("sd 1.5 inpaint masked", _SD15 + _INPAINTING, _TUNE, _MASKED, (UNSERVED, MASKS)),
    Preset("sd 1.5 inpaint", _SD15 + _INPAINTING, _TUNE, {}, (UNSERVED,)),
    Preset(
        "sd 1.5 masked",
        _SD15,
        _TUNE,
        {**_MASKED, "max_noising_strength": 0.8},
        (ENCODERS, SOME_TIMES, MASKS),
    ),
    Preset("sd 1.5", _SD15, _TUNE, {"unet": {"train": True}}, (ENCODERS,)),
    Preset(
        "sd 2.0 inpaint LoRA", _SD20 + _INPAINTING, _LORA, {**_unet(1), **_BY_WINDOW}, (UNSERVED,)
    ),
    Preset("sd 2.0 inpaint", _SD20 + _INPAINTING, _TUNE, {}, (UNSERVED,)),
    Preset("sd 2.1 LoRA", _SD21, _LORA, {**_unet(1), **_BY_WINDOW}, (ENCODERS,)),
    Preset("sd 2.1 embedding", _SD21, _EMBED, _unet(1), (METHOD, ENCODERS)),
    Preset("sd 2.1", _SD21, _TUNE, {}, (ENCODERS,)),
    Preset("sd 3 LoRA", "STABLE_DIFFUSION_3", _LORA, {**_THREE, **_FLOW}),
    Preset("sd 3", "STABLE_DIFFUSION_3", _TUNE, {**_THREE, **_FLOW}),
    Preset("sdxl 1.0 LoRA", _SDXL, _LORA, {**_frozen(2, "unet"), **_BY_WINDOW}),
    Preset("sdxl 1.0 embedding", _SDXL, _EMBED, _unet(2), (METHOD, ENCODERS)),
    Preset(
        "sdxl 1.0 inpaint LoRA",
        _SDXL + _INPAINTING,
        _LORA,
        {**_frozen(2, "unet"), **_BY_WINDOW},
        (UNSERVED,),
    ),
    Preset("sdxl 1.0", _SDXL, _TUNE, _frozen(2, "unet")),
    Preset("sana 1.6b", "SANA", _TUNE, _frozen(1), (UNSERVED,)),
    Preset(
        "stable cascade",
        "STABLE_CASCADE_1",
        _TUNE,
        {**_WUERSTCHEN, **_ADAFACTOR},
        (UNSERVED, WEIGHTS, OPTIMIZER),
    ),
    Preset("wuerstchen 2.0 LoRA", "WUERSTCHEN_2", _LORA, _WUERSTCHEN, (UNSERVED, WEIGHTS)),
    Preset(
        "wuerstchen 2.0 embedding",
        "WUERSTCHEN_2",
        _EMBED,
        _WUERSTCHEN,
        (UNSERVED, METHOD, WEIGHTS),
    ),
    Preset(
        "wuerstchen 2.0",
        "WUERSTCHEN_2",
        _TUNE,
        {**_WUERSTCHEN, **_ADAFACTOR},
        (UNSERVED, WEIGHTS, OPTIMIZER),
    ),
    *_pair(
        *("z-image DeTurbo LoRA", "8GB 16GB", "Z_IMAGE", _LORA),
        {**_DETURBO, **_FLOW, **_Z_LAYERS},
        PLACE,
    ),
    *_pair(
        *("z-image Finetune", "16GB 24GB", "Z_IMAGE", _TUNE),
        {**_ONE, **_FLOW, **_ADAFACTOR},
        OPTIMIZER,
    ),
    *_pair(*("z-image LoRA", "8GB 16GB", "Z_IMAGE", _LORA), {**_QUANTIZED, **_FLOW, **_Z_LAYERS}),
)


def values_of_preset(preset: Preset) -> dict[str, Any]:
    """The preset as a file has it, with one folder of pictures."""
    return {
        **_MORE,
        "base_model_name": "models/of-mine",
        "model_type": preset.model_type,
        "training_method": preset.method,
        "output_model_destination": "models/new.safetensors",
        "output_dtype": "BFLOAT_16",
        "vae": {"weight_dtype": "FLOAT_32"},
        "quantization": {"layer_filter": "layers", "layer_filter_preset": "blocks"},
        **preset.fields,
        "concepts": [{"path": "pictures"}],
    }
