"""SimpleTuner's config.json and its data sets as a config of task diffusion."""

import json
from pathlib import Path
from typing import Any

import pytest
from diffusion_configs import (
    check_every_field_is_named,
    flat_names,
    loaded,
    read_path,
    refused,
    values_of,
)

from samecurve_products.convert.converted_config import ConvertedConfig

CONFIG: dict[str, Any] = {
    "--model_type": "lora",
    "--model_family": "sd3",
    "--pretrained_model_name_or_path": "models/sd3",
    "--data_backend_config": "config/sets.json",
    "--lora_type": "standard",
    "--lora_rank": 32,
    "--lora_dropout": 0.0,
    "--flow_schedule_shift": 2,
    "--base_model_precision": "int8-quanto",
    "--train_batch_size": 2,
    "--gradient_accumulation_steps": 2,
    "--max_train_steps": 1000,
    "--num_train_epochs": 0,
    "--learning_rate": "1e-4",
    "--lr_scheduler": "cosine",
    "--lr_warmup_steps": 100,
    "--optimizer": "adamw_bf16",
    "--adam_beta2": 0.99,
    "--max_grad_norm": 1.0,
    "--grad_clip_method": "norm",
    "--mixed_precision": "bf16",
    "--gradient_checkpointing": "true",
    "--caption_dropout_probability": 0.1,
    "--resolution": 1024,
    "--resolution_type": "pixel_area",
    "--seed": 42,
    "--output_dir": "output/mine",
    "--checkpoint_step_interval": 500,
    "--checkpoints_total_limit": 5,
    "--report_to": "wandb",
    "--tracker_project_name": "birds",
    "--use_ema": "false",
    "--validation_prompt": "a bird",
    "--validation_num_inference_steps": "20",
    "--validation_guidance": 3.0,
    "--validation_step_interval": 200,
    "--push_to_hub": "true",
}
SETS: list[dict[str, Any]] = [
    {
        "id": "birds",
        "type": "local",
        "instance_data_dir": "pictures/birds",
        "crop": False,
        "resolution": 1024,
        "resolution_type": "pixel_area",
        "minimum_image_size": 0,
        "caption_strategy": "textfile",
        "cache_dir_vae": "cache/birds",
        "repeats": 4,
        "caption_shuffle": {"enable": True, "position_start": 1, "split_on": "comma"},
    },
    {
        "id": "fish",
        "type": "local",
        "instance_data_dir": "pictures/fish",
        "caption_strategy": "textfile",
        "prepend_instance_prompt": True,
        "instance_prompt": "fish of mine",
        "caption_shuffle": {"enable": True, "position_start": 1},
    },
    {"id": "off", "type": "aws", "disabled": True},
    {"id": "text", "dataset_type": "text_embeds", "default": True, "cache_dir": "cache/text"},
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path


def config(
    folder: Path, changes: dict[str, Any] | None = None, sets: list[dict[str, Any]] | None = None
) -> ConvertedConfig:
    values = {**CONFIG, **{f"--{name}": value for name, value in (changes or {}).items()}}
    values = {name: value for name, value in values.items() if value != "(gone)"}
    file = folder / "config" / "config.json"
    file.parent.mkdir(exist_ok=True)
    file.write_text(json.dumps(values))
    (folder / "config" / "sets.json").write_text(json.dumps(SETS if sets is None else sets))
    return read_path(file)


def test_an_adapter_and_its_data_sets(folder: Path) -> None:
    converted = config(folder)
    names = {name.removeprefix("--") for name in CONFIG}
    check_every_field_is_named(converted, names | flat_names({"sets": SETS}))
    becomes = {
        "model.path": "models/sd3",
        "model.adapter.kind": "lora",
        "model.adapter.rank": 32,
        "model.adapter.alpha": 32.0,
        "model.adapter.dropout": 0.0,
        "model.adapter.target": ["to_k", "to_q", "to_v", "to_out.0"],
        "model.quantize": "8bit",
        "model.encoder_precision": "bf16",
        "model.time_steps.distribution": "logit_normal",
        "model.time_steps.shift": 2.0,
        "data.resolution": 1024,
        "data.buckets": True,
        "data.crop": "center",
        "data.captions.missing": "refuse",
        "data.captions.shuffle": True,
        "data.captions.keep": 1,
        "data.captions.dropout": 0.1,
        "data.prompts": ["a bird"],
        "data.sample_steps": 20,
        "data.guidance": 3.0,
        "batch.per_device": 2,
        "batch.accumulate": 2,
        "optimizer.name": "adamw",
        "optimizer.lr": 1e-4,
        "optimizer.betas": (0.9, 0.99),
        "optimizer.clip": 1.0,
        "schedule.decay": "cosine",
        "schedule.warmup": 100,
        "train.steps": 1000,
        "train.precision": "bf16",
        "train.recompute": "block",
        "train.seed": 42,
        "train.save_every": 500,
        "train.keep": 5,
        "train.sample_every": 200,
        "track.wandb": "online",
        "track.wandb_project": "birds",
    }
    assert values_of(converted, *becomes) == becomes
    assert converted.run_directory == "output/mine"
    rows = loaded(converted).config.data.model_dump()["source"]
    assert [(row["source"], row["repeats"], row["trigger"]) for row in rows] == [
        ("pictures/birds", 5, None),  # 0 means once, there
        ("pictures/fish", 1, "fish of mine"),
    ]


@pytest.mark.parametrize(
    ("changes", "becomes"),
    [
        (
            {"model_type": "full", "base_model_precision": "no_change"},
            {"model.adapter": None, "model.quantize": "none"},
        ),
        ({"base_model_precision": "nf4-bnb"}, {"model.quantize": "4bit"}),
        ({"lora_alpha": 8}, {"model.adapter.alpha": 8.0}),
        ({"peft_lora_target_modules": ["to_q"]}, {"model.adapter.target": ["to_q"]}),
        ({"use_dora": True}, {"model.adapter.kind": "dora"}),
        ({"flow_use_uniform_schedule": True}, {"model.time_steps.distribution": "uniform"}),
        ({"flow_schedule_auto_shift": True}, {"model.time_steps.shift": None}),
        (
            {"model_family": "sdxl", "snr_gamma": 5},
            {"model.min_snr": 5, "model.time_steps.distribution": "uniform"},
        ),
        ({"max_train_steps": "(gone)", "num_train_epochs": 3}, {"train.steps": "3ep"}),
        ({"train_batch_size": "(gone)"}, {"batch.per_device": 4}),
        ({"optimizer": "bnb-adamw8bit"}, {"optimizer.name": "adamw8bit"}),
        ({"fsdp_enable": True, "fsdp_cpu_offload": True}, {"devices.strategy": "fsdp"}),
    ],
)
def test_a_field(folder: Path, changes: dict[str, Any], becomes: dict[str, Any]) -> None:
    assert values_of(config(folder, changes), *becomes) == becomes


@pytest.mark.parametrize(
    ("more", "becomes"),
    [
        ({"crop": True}, {"data.buckets": False, "data.crop": "random"}),
        (
            {"crop": True, "crop_aspect": "preserve", "crop_style": "center"},
            {"data.buckets": True, "data.crop": "center"},
        ),
        ({"caption_strategy": "filename"}, {"data.captions.missing": "name"}),
        (
            {"caption_strategy": "instanceprompt", "instance_prompt": "a bird"},
            {"data.captions.missing": "empty"},
        ),
        ({"resolution": 1.05, "resolution_type": "area"}, {"data.resolution": 1024}),
    ],
)
def test_a_data_set(folder: Path, more: dict[str, Any], becomes: dict[str, Any]) -> None:
    sets = [{"id": "a", "instance_data_dir": "pictures", **more}]
    assert values_of(config(folder, sets=sets), *becomes) == becomes


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"model_family": "wan"}, "of a kind that task diffusion does not train"),
        ({"pretrained_model_name_or_path": "(gone)"}, "nothing is downloaded"),
        ({"lora_type": "lycoris"}, "--set model.adapter.kind=lokr"),
        ({"model_family": "flux"}, "flux_lora_target is not in the file"),
        ({"grad_clip_method": "(gone)"}, "clips each number of the gradient"),
        ({"optimizer": "optimi-lion"}, "optimi-lion is not computed here"),
        ({"lr_scheduler": "polynomial"}, "is a schedule that is not here"),
        ({"use_ema": True}, "--set train.ema=0.995"),
        ({"loss_type": "huber"}, "another loss than the mean square error"),
        ({"offset_noise": True}, "changes the noise"),
        ({"flow_use_beta_schedule": True}, "in a way that is not here"),
        ({"base_model_precision": "int2-quanto"}, "fewer bits than four"),
        ({"controlnet": True}, "is another kind of training"),
        ({"crepa_enabled": True}, "is another objective"),
        ({"allow_dataset_oversubscription": True}, "until each bucket fills a batch"),
        ({"data_backend_config": "gone.json"}, "-d FOLDER"),
        ({"report_to": "comet_ml"}, "is a tracker that is not here"),
        ({"new_argument": 1}, "new_argument 1 is a field that this program does not know"),
    ],
)
def test_what_would_change_the_training_is_refused(
    folder: Path, changes: dict[str, Any], says: str
) -> None:
    errors = refused(config(folder, changes))
    assert any(says in error for error in errors), errors
    assert all("remedy: " in error for error in errors)


@pytest.mark.parametrize(
    ("sets", "says"),
    [
        ([{"type": "aws", "instance_data_dir": "a"}], "is not on this machine"),
        ([{"dataset_type": "video", "instance_data_dir": "a"}], "no set of pictures"),
        ([{"instance_data_dir": "a", "probability": 0.5}], "draws pictures by chance"),
        ([{"instance_data_dir": "a", "minimum_image_size": 512}], "leaves out small pictures"),
        ([{"instance_data_dir": "a", "crop_aspect": "closest"}], "chooses the shapes"),
        ([{"instance_data_dir": "a", "train_batch_size": 8}], "is a batch of its own"),
        ([{"instance_data_dir": "a", "caption_strategy": "parquet"}], "in another form"),
        (
            [{"instance_data_dir": "a", "crop": True}, {"instance_data_dir": "b"}],
            "is not the same for all folders",
        ),
    ],
)
def test_a_data_set_that_is_not_served(folder: Path, sets: list[dict[str, Any]], says: str) -> None:
    errors = refused(config(folder, sets=sets))
    assert any(says in error for error in errors), errors


def test_a_file_that_its_window_wrote(folder: Path) -> None:
    """There the arguments lie in a section, beside what the window knows."""
    config(folder)
    file = folder / "config" / "config.json"
    file.write_text(json.dumps({"_metadata": {"name": "default"}, "config": CONFIG}))
    assert values_of(read_path(file), "model.adapter.rank") == {"model.adapter.rank": 32}
