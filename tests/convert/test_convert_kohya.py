"""kohya's TOML, with the TOML of its data sets, as a config of task diffusion."""

from pathlib import Path
from typing import Any

import pytest
from diffusion_configs import (
    check_every_field_is_named,
    flat_names,
    loaded,
    read_path,
    read_values,
    refused,
    values_of,
)

from samecurve.core.config.document import parse_document
from samecurve_products.convert.converted_config import ConvertedConfig
from samecurve_products.convert.tools import convert

TRAIN = """\
[model_arguments]
pretrained_model_name_or_path = "models/sdxl.safetensors"
v_parameterization = false
[network]
network_module = "networks.lora"
network_dim = 32
network_alpha = 16
network_dropout = 0.1
network_train_unet_only = true
[data]
dataset_config = "sets.toml"
[training]   # sections have no meaning
max_train_epochs = 10
train_batch_size = 4
gradient_accumulation_steps = 2
learning_rate = 1e-5
unet_lr = 1e-4
text_encoder_lr = 1e-5
lr_scheduler = "cosine_with_restarts"
lr_warmup_steps = 0.1
optimizer_type = "AdamW8bit"
optimizer_args = ["weight_decay=0.1", "betas=0.9,0.99"]
max_grad_norm = 0.5
mixed_precision = "bf16"
full_bf16 = true
min_snr_gamma = 5
gradient_checkpointing = true
sdpa = true
cache_latents = true
seed = 42
output_dir = "out"
output_name = "birds"
save_every_n_epochs = 2
save_model_as = "safetensors"
sample_every_n_steps = 100
sample_prompts = "prompts.txt"
"""
SETS = """\
[general]
shuffle_caption = true
caption_extension = ".txt"
keep_tokens = 1

[[datasets]]
resolution = [1024, 1024]
enable_bucket = true
min_bucket_reso = 512
max_bucket_reso = 2048

  [[datasets.subsets]]
  image_dir = "birds"
  num_repeats = 10
  class_tokens = "a bird"
  flip_aug = true

  [[datasets.subsets]]
  image_dir = "fish"
  flip_aug = true
  caption_prefix = "fish of mine"
"""
PROMPTS = """\
# shown while it trains
a bird on a tree --n blur --w 512 --s 28 --l 7.5 --d 1
a fish
"""


@pytest.fixture
def config(tmp_path: Path) -> Path:
    (tmp_path / "sets.toml").write_text(SETS)
    (tmp_path / "prompts.txt").write_text(PROMPTS)
    file = tmp_path / "train.toml"
    file.write_text(TRAIN)
    return file


def flat(**fields: Any) -> ConvertedConfig:
    """A training file of an adapter, with one folder in the same file."""
    values = {
        "pretrained_model_name_or_path": "models/sdxl",
        "network_module": "networks.lora",
        "network_train_unet_only": True,
        "datasets": [{"subsets": [{"image_dir": "birds"}]}],
        "train_batch_size": 1,
        **fields,
    }
    return read_values({name: value for name, value in values.items() if value != "(gone)"})


def test_a_training_file_and_its_data_sets(config: Path) -> None:
    converted = read_path(config)
    names = set().union(*parse_document(TRAIN, "train.toml").value.values())
    data = {
        name
        for name in flat_names(parse_document(SETS, "sets.toml").value)
        if "general" not in name
    }
    check_every_field_is_named(converted, names | data)
    becomes = {
        "model.path": "models/sdxl.safetensors",
        "model.adapter.kind": "lora",
        "model.adapter.rank": 32,
        "model.adapter.alpha": 16.0,
        "model.adapter.dropout": 0.1,
        "model.adapter.target": ".*attentions.*",
        "model.min_snr": 5,
        "model.quantize": "bf16",
        "model.encoder_precision": "bf16",
        "data.resolution": 1024,
        "data.buckets": True,
        "data.bucket_step": 64,
        "data.longest": 4.0,
        "data.flip": 0.5,
        "data.crop": "center",
        "data.captions.extension": ".txt",
        "data.captions.missing": "empty",
        "data.captions.shuffle": True,
        "data.captions.keep": 1,
        "data.validation": 0.0,
        "data.prompts": ["a bird on a tree", "a fish"],
        "data.negative_prompt": "blur",
        "data.sample_steps": 28,
        "data.guidance": 7.5,
        "batch.per_device": 4,
        "batch.accumulate": 2,
        "optimizer.name": "adamw8bit",
        "optimizer.lr": 1e-4,
        "optimizer.weight_decay": 0.1,
        "optimizer.betas": (0.9, 0.99),
        "optimizer.clip": 0.5,
        "schedule.decay": "cosine",
        "schedule.final": 0.0,
        "schedule.warmup": "1ep",
        "train.steps": "10ep",
        "train.precision": "bf16",
        "train.recompute": "block",
        "train.seed": 42,
        "train.save_every": "2ep",
        "train.sample_every": 100,
    }
    assert values_of(converted, *becomes) == becomes
    assert converted.run_directory == "out"
    rows = loaded(converted).config.data.model_dump()["source"]
    assert [(row["source"], row["repeats"], row["caption"], row["trigger"]) for row in rows] == [
        ("birds", 10, "a bird", None),
        ("fish", 1, None, "fish of mine"),
    ]
    lines = "\n".join(converted.summary_lines())
    assert "sets.toml:14:3  datasets.0.subsets.0.num_repeats 10" in lines
    assert "train.toml:6:1  network_dim 32" in lines


def test_a_class_word_and_a_prefix_are_both_read() -> None:
    converted = flat(class_tokens="a bird", caption_prefix="sketch")
    (row,) = loaded(converted).config.data.model_dump()["source"]
    assert (row["caption"], row["trigger"]) == ("a bird", "sketch")


def test_folders_whose_names_say_their_repeats(tmp_path: Path) -> None:
    """And the class words, which are all that lies behind the first underscore."""
    for name in ("10_a bird", "3_red_bird", "2_", "7", "0_never", "notes"):
        (tmp_path / "pictures" / name).mkdir(parents=True)
    file = tmp_path / "train.toml"
    file.write_text('pretrained_model_name_or_path = "m"\ntrain_data_dir = "pictures"\n')
    rows = loaded(read_path(file)).config.data.model_dump()["source"]
    assert [(Path(row["source"]).name, row["repeats"], row["caption"]) for row in rows] == [
        ("10_a bird", 10, "a bird"),
        ("2_", 2, None),
        ("3_red_bird", 3, "red_bird"),
        ("7", 7, None),
    ]


def test_what_is_silent_is_what_kohya_does() -> None:
    becomes = {
        "model.adapter.rank": 4,
        "model.adapter.alpha": 1.0,
        "data.captions.extension": ".caption",
        "data.buckets": False,
        "optimizer.lr": 2e-6,
        "optimizer.weight_decay": 0.01,
        "optimizer.clip": 1.0,
        "schedule.decay": "constant",
        "train.steps": 1600,
        "train.precision": "f32",
    }
    assert values_of(flat(), *becomes) == becomes


@pytest.mark.parametrize(
    ("fields", "becomes"),
    [
        ({"network_module": "(gone)"}, {"model.adapter": None}),
        (
            {"network_module": "lycoris.kohya", "network_args": ["algo=lokr", "factor=-1"]},
            {"model.adapter.kind": "lokr", "model.adapter.target": ".*"},
        ),
        (
            {"network_module": "lycoris.kohya", "network_args": ["algo=lora", "dora_wd=True"]},
            {"model.adapter.kind": "dora"},
        ),
        ({"fp8_base": True}, {"model.quantize": "8bit"}),
        ({"fp8_base": True, "network_module": "(gone)"}, {"model.quantize": "none"}),
        ({"v_parameterization": True}, {"model.prediction": "v"}),
        ({"max_train_steps": 500, "lr_warmup_steps": 0.1}, {"schedule.warmup": 50}),
        ({"lr_warmup_steps": 20}, {"schedule.warmup": 20}),
        ({"lr_scheduler": "polynomial"}, {"schedule.decay": "linear"}),
        (
            {"lr_scheduler": "cosine_with_min_lr", "lr_scheduler_min_lr_ratio": 0.2},
            {"schedule.decay": "cosine", "schedule.final": 0.2},
        ),
        ({"resolution": "512,768", "enable_bucket": True}, {"data.resolution": 627}),
        ({"use_8bit_adam": True}, {"optimizer.name": "adamw8bit"}),
        ({"caption_extension": "txt"}, {"data.captions.extension": ".txt"}),
    ],
)
def test_a_field(fields: dict[str, Any], becomes: dict[str, Any]) -> None:
    assert values_of(flat(**fields), *becomes) == becomes


RAW = {"model_prediction_type": "raw", "guidance_scale": 1.0}


@pytest.mark.parametrize(
    ("fields", "becomes"),
    [
        (RAW, {"distribution": "uniform", "shift": 3.0}),
        ({**RAW, "timestep_sampling": "uniform"}, {"distribution": "uniform", "shift": 1.0}),
        (
            {**RAW, "timestep_sampling": "sigmoid", "sigmoid_scale": 2},
            {"distribution": "logit_normal", "deviation": 2.0, "shift": 1.0},
        ),
        (
            {**RAW, "timestep_sampling": "shift", "discrete_flow_shift": 3.1582},
            {"distribution": "logit_normal", "shift": 3.1582},
        ),
        (
            {**RAW, "timestep_sampling": "flux_shift"},
            {"distribution": "logit_normal", "shift": None},
        ),
        (
            {**RAW, "weighting_scheme": "logit_normal", "logit_mean": 0.5, "logit_std": 2.0},
            {"distribution": "logit_normal", "mean": 0.5, "deviation": 2.0, "shift": 3.0},
        ),
    ],
)
def test_the_times_of_a_flow(fields: dict[str, Any], becomes: dict[str, Any]) -> None:
    converted = flat(network_module="networks.lora_flux", **fields)
    found = values_of(converted, *(f"model.time_steps.{key}" for key in becomes))
    assert found == {f"model.time_steps.{key}": value for key, value in becomes.items()}


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"network_train_unet_only": "(gone)"}, "network_train_unet_only = true trains"),
        ({"network_train_unet_only": False}, "trains text encoders too"),
        ({"network_module": "networks.oft"}, "is an adapter that is not here"),
        ({"network_args": ["conv_dim=4"]}, "asks for conv_dim"),
        (
            {"network_module": "lycoris.kohya", "network_args": ["algo=loha"]},
            "asks for loha, an adapter",
        ),
        ({"network_weights": "old.safetensors"}, "--init-from"),
        ({"noise_offset": 0.05}, "changes the noise"),
        ({"loss_type": "huber"}, "another loss than the mean square error"),
        ({"max_timestep": 900}, "leaves out some times"),
        ({"clip_skip": 2}, "skips layers of a text encoder"),
        ({"optimizer_type": "Prodigy"}, "Prodigy is not computed here"),
        ({"optimizer_args": ["decouple=True"]}, "has decouple, which"),
        ({"lr_scheduler": "cosine_with_restarts", "lr_scheduler_num_cycles": 3}, "a schedule"),
        ({"bucket_no_upscale": True}, "here they are enlarged"),
        ({"keep_tokens_separator": "|||"}, "keep_tokens"),
        ({"timestep_sampling": "sigmoid"}, "model_prediction_type is not in the file"),
        ({**RAW, "weighting_scheme": "mode"}, "is a distribution that is not here"),
        ({**RAW, "guidance_scale": 3.5}, "another guidance than 1"),
        ({"datasets": "(gone)"}, "dataset_config is not in the file"),
        ({"pretrained_model_name_or_path": "(gone)"}, "describes data alone"),
        ({"datasets": [{"subsets": [{"image_dir": "a", "is_reg": True}]}]}, "regularisation"),
        (
            {
                "datasets": [
                    {"resolution": 512, "subsets": [{"image_dir": "a"}]},
                    {"resolution": 1024, "subsets": [{"image_dir": "a"}]},
                ]
            },
            "is not the same for all folders",
        ),
        ({"new_argument": 1}, "new_argument 1 is a field that this program does not know"),
    ],
)
def test_what_would_change_the_training_is_refused(fields: dict[str, Any], says: str) -> None:
    errors = refused(flat(**fields))
    assert any(says in error for error in errors), errors
    assert all("remedy: " in error for error in errors)


def test_what_is_no_config_of_kohya() -> None:
    for text in ("model_name_or_path = 'a'", "[tool.ruff]\nline-length = 100", "datasets = ['a']"):
        assert convert(parse_document(text, "c.toml")) is None
