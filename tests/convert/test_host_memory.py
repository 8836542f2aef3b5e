"""Layers that other trainers keep in host memory: devices.offload_frozen, or the reason why not."""

from collections.abc import Mapping
from typing import Any

import pytest
from diffusion_configs import loaded, read_values
from onetrainer_presets import PRESETS, values_of_preset

from samecurve_products.convert.converted_config import ConvertedConfig

_GONE = "(gone)"
_FLUX = {
    **values_of_preset(next(preset for preset in PRESETS if preset.name == "flux LoRA")),
    "gradient_checkpointing": "CPU_OFFLOADED",
    "layer_offload_fraction": 0.7,
}
_NOT_AGAIN = {"offload_fraction": 1.0, "gradient_checkpointing": False}
_KOHYA = {
    "pretrained_model_name_or_path": "models/flux",
    "network_module": "networks.lora_flux",
    "network_train_unet_only": True,
    "train_data_dir": "pictures",
    "model_prediction_type": "raw",
    "guidance_scale": 1.0,
    "mixed_precision": "bf16",
    "blocks_to_swap": 19,
}
_TOOLKIT_MODEL = {"name_or_path": "models/flux", "arch": "flux", "layer_offloading": True}
_SIMPLETUNER = {
    "model_family": "flux",
    "model_type": "lora",
    "pretrained_model_name_or_path": "models/flux",
    "grad_clip_method": "norm",
    "ramtorch": True,
}


def toolkit(**model: Any) -> dict[str, Any]:
    process = {
        "type": "sd_trainer",
        "network": {"type": "lora", "linear": 16},
        "datasets": [{"folder_path": "pictures", "resolution": [1024]}],
        "train": {"batch_size": 1, "steps": 9, "noise_scheduler": "flowmatch", "lr": 1e-4},
        "model": {**_TOOLKIT_MODEL, **model},
    }
    return {"job": "extension", "config": {"name": "a", "process": [process]}}


def changed(values: Mapping[str, Any], **changes: Any) -> dict[str, Any]:
    both = {**values, **changes}
    return {name: value for name, value in both.items() if value != _GONE}


def why(converted: ConvertedConfig, field: str) -> str:
    (text,) = [row.explanation for row in converted.readings if row.field.endswith(field)]
    return text


@pytest.mark.parametrize(
    ("values", "share"),
    [
        (_FLUX, 0.7),
        (changed(_FLUX, compile=True), 0.7),
        (changed(_FLUX, layer_offload_fraction=_GONE, transformer={"offload_fraction": 0.4}), 0.4),
        (_KOHYA, 0.5),
        (changed(_KOHYA, torch_compile=True, blocks_to_swap=36), 0.947),
        (toolkit(), 1.0),
        (toolkit(layer_offloading_transformer_percent=0.85, compile=True), 0.85),
        (_SIMPLETUNER, 1.0),
        (changed(_SIMPLETUNER, ramtorch_transformer_percent=30), 0.3),
        (changed(_SIMPLETUNER, ramtorch=False, enable_group_offload=True), 1.0),
    ],
)
def test_a_share_of_the_layers_is_that_of_the_frozen_blocks(
    values: dict[str, Any], share: float
) -> None:
    """Nothing is compiled then, since the two are not built together."""
    config = read_values(values).document.value
    assert config["devices"]["offload_frozen"] == share
    assert "compile" not in config["train"]


@pytest.mark.parametrize(
    ("values", "field", "says"),
    [
        (changed(_FLUX, gradient_checkpointing="ON"), "layer_offload_fraction", "none are"),
        (
            changed(_FLUX, training_method="FINE_TUNE"),
            "layer_offload_fraction",
            "weights that are trained stay",
        ),
        (
            changed(
                _FLUX, model_type="STABLE_DIFFUSION_XL_10_BASE", dynamic_timestep_shifting=_GONE
            ),
            "layer_offload_fraction",
            "moves nothing of a UNet, there; --set devices.offload_frozen=1",
        ),
        (
            changed(_FLUX, layer_offload_fraction=_GONE, transformer=_NOT_AGAIN),
            "transformer.offload_fraction",
            "none are",
        ),
        (changed(_FLUX, layer_offload_fraction=0.0), "layer_offload_fraction", "no layer is moved"),
        (changed(_KOHYA, network_module="networks.lora_sd3"), "blocks_to_swap", "how many blocks"),
        (changed(_KOHYA, network_module=_GONE), "blocks_to_swap", "weights that are trained"),
        (toolkit(layer_offloading_transformer_percent=0), "model.layer_offloading", "no layer"),
        (changed(_SIMPLETUNER, model_type="full"), "ramtorch", "weights that are trained"),
        (changed(_SIMPLETUNER, fsdp_enable=True), "ramtorch", "has devices.offload"),
        (changed(_SIMPLETUNER, ramtorch_target_modules="*"), "ramtorch", "names its layers"),
        (
            changed(_SIMPLETUNER, ramtorch=_GONE, musubi_blocks_to_swap=8),
            "musubi_blocks_to_swap",
            "how many blocks",
        ),
    ],
)
def test_what_is_not_moved_says_why(values: dict[str, Any], field: str, says: str) -> None:
    converted = read_values(values)
    assert says in why(converted, field)
    assert "offload_frozen" not in converted.document.value.get("devices", {})


def test_onetrainer_presets_for_small_cards_move_layers() -> None:
    """Those that train an adapter here and move layers there, which are computed again."""
    configs = {
        preset.name: loaded(read_values(values_of_preset(preset))).config
        for preset in PRESETS
        if not preset.reasons
    }
    moved = [name for name, config in configs.items() if vars(config.devices)["offload_frozen"]]
    assert {vars(configs[name].train)["recompute"] for name in moved} == {"block"}
    assert moved == [
        *(f"flux2 LoRA {size}" for size in ("8GB", "16GB")),
        *(f"z-image LoRA {size}" for size in ("8GB", "16GB")),
    ]
