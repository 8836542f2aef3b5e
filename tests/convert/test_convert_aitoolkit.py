"""ai-toolkit's YAML as a config of task diffusion."""

from copy import deepcopy
from typing import Any

import pytest
from diffusion_configs import (
    check_every_field_is_named,
    flat_names,
    loaded,
    read_values,
    refused,
    values_of,
)

from samecurve_products.convert.converted_config import ConvertedConfig

FLUX: dict[str, Any] = {
    "type": "sd_trainer",
    "training_folder": "output",
    "device": "cuda:0",
    "trigger_word": "p3r5on",
    "network": {"type": "lora", "linear": 16, "linear_alpha": 32},
    "save": {"dtype": "float16", "save_every": 250, "max_step_saves_to_keep": 4},
    "datasets": [
        {
            "folder_path": "pictures/birds",
            "caption_ext": "txt",
            "caption_dropout_rate": 0.05,
            "shuffle_tokens": False,
            "cache_latents_to_disk": True,
            "resolution": [768],
            "num_repeats": 3,
        },
        {"folder_path": "pictures/fish", "caption_dropout_rate": 0.05, "resolution": 768},
    ],
    "train": {
        "batch_size": 2,
        "steps": 2000,
        "gradient_accumulation_steps": 1,
        "train_unet": True,
        "train_text_encoder": False,
        "gradient_checkpointing": True,
        "noise_scheduler": "flowmatch",
        "optimizer": "adamw8bit",
        "lr": 1e-4,
        "dtype": "bf16",
    },
    "model": {"name_or_path": "models/flux", "is_flux": True, "quantize": True},
    "sample": {
        "sampler": "flowmatch",
        "sample_every": 200,
        "width": 1024,
        "height": 1024,
        "prompts": ["[trigger] in a boat", "a bird"],
        "neg": "blur",
        "seed": 42,
        "walk_seed": True,
        "guidance_scale": 4,
        "sample_steps": 20,
    },
}


def config(changes: dict[str, Any] | None = None, **others: Any) -> ConvertedConfig:
    """changes: dotted names of fields, and their values; None takes a field out."""
    process = {**deepcopy(FLUX), **others}
    for name, value in (changes or {}).items():
        *sections, last = name.split(".")
        at: Any = process
        for section in sections:
            at = at[int(section)] if isinstance(at, list) else at.setdefault(section, {})
        at[last] = value
        if value is None:
            del at[last]
    meta = {"name": "[name]", "version": "1.0"}
    inner = {"name": "birds", "process": [process]}
    return read_values({"job": "extension", "config": inner, "meta": meta})


def test_an_adapter_of_flux() -> None:
    converted = config()
    names = flat_names(FLUX) - {"sample.prompts.0"}
    check_every_field_is_named(converted, names | {"name", "meta"})
    becomes = {
        "model.path": "models/flux",
        "model.adapter.kind": "lora",
        "model.adapter.rank": 16,
        "model.adapter.alpha": 16.0,  # linear_alpha is of unets alone
        "model.adapter.target": ".*transformer_blocks.*",
        "model.quantize": "8bit",
        "model.encoder_precision": "bf16",
        "model.time_steps.distribution": "logit_normal",
        "model.time_steps.shift": 1.0,
        "data.resolution": 768,
        "data.captions.trigger": "p3r5on",
        "data.captions.extension": ".txt",
        "data.captions.missing": "empty",
        "data.captions.dropout": 0.05,
        "data.validation": 0.0,
        "data.prompts": ["p3r5on in a boat", "a bird"],
        "data.negative_prompt": "blur",
        "data.sample_steps": 20,
        "data.guidance": 4.0,
        "batch.per_device": 2,
        "batch.accumulate": 1,
        "optimizer.name": "adamw8bit",
        "optimizer.lr": 1e-4,
        "optimizer.eps": 1e-6,
        "schedule.decay": "constant",
        "train.steps": 2000,
        "train.precision": "bf16",
        "train.recompute": "block",
        "train.save_every": 250,
        "train.keep": 4,
        "train.sample_every": 200,
    }
    assert values_of(converted, *becomes) == becomes
    assert converted.run_directory == "output"
    rows = loaded(converted).config.data.model_dump()["source"]
    assert [row if isinstance(row, str) else row["repeats"] for row in rows] == [3, "pictures/fish"]


@pytest.mark.parametrize(
    ("changes", "becomes"),
    [
        (
            {"model.is_flux": None, "model.is_xl": True, "train.noise_scheduler": "ddpm"},
            {
                "model.adapter.alpha": 32.0,
                "model.adapter.target": (
                    ".*(attentions|time_emb_proj|time_embedding|add_embedding|conv_shortcut).*"
                ),
                "model.time_steps.distribution": "uniform",
            },
        ),
        ({"model.is_flux": None, "model.arch": "zimage:turbo"}, {"model.adapter.rank": 16}),
        ({"network.all_layers": True}, {"model.adapter.target": ".*"}),
        ({"network": None}, {"model.adapter": None, "model.quantize": "none"}),
        ({"model.qtype": "uint4|adapter.safetensors"}, {"model.quantize": "4bit"}),
        ({"train.timestep_type": "linear"}, {"model.time_steps.distribution": "uniform"}),
        ({"train.timestep_type": "shift"}, {"model.time_steps.shift": None}),
        ({"train.min_snr_gamma": 5}, {"model.min_snr": 5}),
        ({"train.gradient_accumulation": 4}, {"batch.accumulate": 4}),
        ({"train.unet_lr": 2e-4}, {"optimizer.lr": 2e-4}),
        (
            {"train.optimizer_params": {"weight_decay": 0.1}},
            {"optimizer.weight_decay": 0.1, "optimizer.betas": (0.9, 0.999)},
        ),
        (
            {
                "train.lr_scheduler": "constant_with_warmup",
                "train.lr_scheduler_params": {"num_warmup_steps": 50},
            },
            {"schedule.warmup": 50},
        ),
        ({"logging": {"use_wandb": True, "project_name": "birds"}}, {"track.wandb": "online"}),
        ({"train.disable_sampling": True}, {"train.sample_every": 0}),
    ],
)
def test_a_field(changes: dict[str, Any], becomes: dict[str, Any]) -> None:
    assert values_of(config(changes), *becomes) == becomes


def test_prompts_with_settings_of_their_own() -> None:
    samples = [{"prompt": "a boat", "guidance_scale": 2.0}, {"prompt": "a bird"}]
    converted = config({"sample.prompts": None, "sample.samples": samples})
    found = values_of(converted, "data.prompts", "data.guidance", "data.sample_steps")
    assert list(found.values()) == [["a boat", "a bird"], 2.0, 20]


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"datasets.0.resolution": [512, 768]}, "is several resolutions"),
        ({"datasets.0.flip_x": True}, "is not the same for all folders"),
        ({"datasets.0.is_reg": True}, "regularisation"),
        ({"datasets.0.mask_path": "masks"}, "NAME-masklabel.png"),
        ({"datasets.0.default_caption": "a bird"}, "the caption of pictures without one"),
        ({"datasets": []}, "no data is named"),
        ({"train.ema_config": {"use_ema": True, "ema_decay": 0.99}}, "--set train.ema=0.99"),
        ({"train.gradient_accumulation_steps": 4}, "counts each pass as a step"),
        ({"train.timestep_type": "weighted"}, "in a way that is not here"),
        ({"train.train_text_encoder": True}, "captions are encoded once"),
        ({"train.noise_offset": 0.1}, "changes the noise"),
        ({"train.loss_type": "mae"}, "another loss than the mean square error"),
        ({"train.optimizer": "prodigy"}, "prodigy is not computed here"),
        ({"train.diff_output_preservation": True}, "is another objective"),
        ({"model.qtype": "uint3|adapter.safetensors"}, "fewer bits than four"),
        ({"network.conv": 16}, "adapts convolutions"),
        ({"network.type": "lokr"}, "lokr_full_rank: false"),
        ({"model.assistant_lora_path": "a.safetensors"}, "adds an adapter"),
        ({"model.is_flux": None, "model.arch": "wan22_14b"}, "of a kind that task diffusion"),
        ({"type": "concept_slider"}, "is no training of a model"),
        ({"slider": {"resolutions": [[512, 512]]}}, "is another objective"),
        ({"new": 1}, "new 1 is a field that this program does not know"),
    ],
)
def test_what_would_change_the_training_is_refused(changes: dict[str, Any], says: str) -> None:
    errors = refused(config(changes))
    assert any(says in error for error in errors), errors
    assert all("remedy: " in error for error in errors)
