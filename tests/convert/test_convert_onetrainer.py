"""OneTrainer's JSON as a config of task diffusion: the model, its data, and its objective."""

import json
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

from samecurve_products.convert.converted_config import ConvertedConfig

CONCEPT: dict[str, Any] = {
    "name": "birds",
    "path": "pictures/birds",
    "seed": 7,
    "enabled": True,
    "type": "STANDARD",
    "include_subdirectories": False,
    "image_variations": 4,
    "text_variations": 2,
    "balancing": 3.0,
    "balancing_strategy": "REPEATS",
    "loss_weight": 0.5,
    "concept_stats": {},
    "image": {
        "enable_crop_jitter": False,
        "enable_random_flip": True,
        "enable_fixed_flip": False,
        "enable_random_rotate": False,
        "random_rotate_max_angle": 3.0,
        "enable_random_brightness": False,
        "enable_resolution_override": False,
        "resolution_override": "512",
    },
    "text": {
        "prompt_source": "filename",
        "prompt_path": "",
        "enable_tag_shuffling": True,
        "tag_delimiter": ";",
        "keep_tags_count": 2,
        "tag_dropout_enable": False,
        "tag_dropout_probability": 0.3,
        "caps_randomize_enable": False,
    },
}
SDXL: dict[str, Any] = {
    "__version": 11,
    "training_method": "LORA",
    "model_type": "STABLE_DIFFUSION_XL_10_BASE",
    "base_model_name": "models/sdxl",
    "peft_type": "LORA",
    "lora_rank": 32,
    "lora_alpha": 8,
    "dropout_probability": 0.1,
    "layer_filter": "attn1, attn2,ff.net",
    "layer_filter_preset": "custom",
    "layer_filter_regex": False,
    "unet": {"train": True, "weight_dtype": "FLOAT_8", "gradient_checkpointing": False},
    "text_encoder": {"train": False, "dropout_probability": 0.05},
    "text_encoder_2": {"train": False, "dropout_probability": 0.05},
    "text_encoder_3": {"train": True},
    "transformer": {"train": True},
    "vae": {"weight_dtype": "FLOAT_32"},
    "concepts": [CONCEPT],
    "samples": [
        {"prompt": "a bird", "negative_prompt": "blur", "diffusion_steps": 20, "cfg_scale": 5.0},
        {"prompt": "a fish", "enabled": False},
        {"prompt": "a tree", "negative_prompt": "blur", "diffusion_steps": 20, "cfg_scale": 5.0},
    ],
    "sample_after": 2,
    "sample_after_unit": "EPOCH",
    "resolution": "1024",
    "aspect_ratio_bucketing": True,
    "batch_size": 4,
    "learning_rate": 1e-4,
    "loss_weight_fn": "MIN_SNR_GAMMA",
    "loss_weight_strength": 5.0,
    "masked_training": True,
    "unmasked_weight": 0.2,
    "normalize_masked_area_loss": False,
    "train_dtype": "BFLOAT_16",
    "backup_after": 2,
    "backup_after_unit": "HOUR",
    "multi_gpu": True,
    "device_indexes": "0,1",
    "gradient_reduce_precision": "FLOAT_32_STOCHASTIC",
    "fused_gradient_reduce": True,
    "async_gradient_reduce_buffer": 100,
}


def sdxl(**fields: Any) -> ConvertedConfig:
    return read_values({**SDXL, **fields})


def with_concepts(*concepts: dict[str, Any]) -> ConvertedConfig:
    return sdxl(concepts=[{"path": f"pictures/{n}", **each} for n, each in enumerate(concepts)])


def test_a_file_for_two_gpus() -> None:
    """An adapter of SDXL on four pictures a GPU, with everything that its window can say."""
    converted = sdxl()
    check_every_field_is_named(converted, flat_names(SDXL) - {"vae.weight_dtype"})
    becomes = {
        "model.path": "models/sdxl",
        "model.adapter.kind": "lora",
        "model.adapter.rank": 32,
        "model.adapter.alpha": 8.0,
        "model.adapter.dropout": 0.1,
        "model.adapter.target": ".*(attn1|attn2|ff\\.net).*",
        "model.quantize": "8bit",
        "model.encoder_precision": "f32",
        "model.min_snr": 5.0,
        "data.resolution": 1024,
        "data.buckets": True,
        "data.longest": 4.0,
        "data.crop": "center",
        "data.flip": 0.5,
        "data.variants": 4,
        "data.captions.missing": "name",
        "data.captions.shuffle": True,
        "data.captions.separator": ";",
        "data.captions.keep": 2,
        "data.captions.dropout": 0.05,
        "data.masks": True,
        "data.unmasked_weight": 0.2,
        "data.validation": 0.0,
        "data.prompts": ["a bird", "a tree"],
        "data.negative_prompt": "blur",
        "data.sample_steps": 20,
        "data.guidance": 5.0,
        "batch.per_device": 4,
        "optimizer.lr": 1e-4,
        "train.precision": "bf16",
        "train.recompute": "none",
        "train.sample_every": "2ep",
        "train.save_every": "120min",
        "devices.use": "0,1",
    }
    assert values_of(converted, *becomes) == becomes
    data = loaded(converted).config.data.model_dump()
    assert data["source"] == [
        {"source": "pictures/birds", "repeats": 3, "weight": 0.5, "trigger": None, "caption": None}
    ]
    lines = "\n".join(converted.summary_lines())
    assert "concepts.0.balancing 3.0 -> data.source[0].repeats" in lines
    assert "text_encoder_3.train true" in lines  # a part that SDXL does not have


def test_what_is_silent_is_what_onetrainer_does() -> None:
    """The fewest fields: an epoch crops at random, and captions may be missing."""
    values = {
        "training_method": "FINE_TUNE",
        "model_type": "STABLE_DIFFUSION_3",
        "base_model_name": "models/sd3",
        "concepts": [{"path": "pictures"}],
        **{name: {"train": False} for name in ("text_encoder", "text_encoder_2", "text_encoder_3")},
    }
    becomes = {
        "model.adapter": None,
        "model.time_steps.shift": 1.0,
        "data.resolution": 512,
        "data.crop": "random",
        "data.captions.missing": "empty",
        "data.validation": 0.0,
        "train.precision": "f16",
    }
    converted = read_values(values)
    assert values_of(converted, *becomes) == becomes
    assert loaded(converted).config.data.model_dump()["source"] == ["pictures"]


@pytest.mark.parametrize(
    ("fields", "becomes"),
    [
        ({"training_method": "FINE_TUNE", "layer_filter": ""}, {"model.adapter": None}),
        ({"lora_decompose": True}, {"model.adapter.kind": "dora"}),
        (
            {"peft_type": "LOKR", "lokr_dim": 8, "dropout_probability": 0.0},
            {"model.adapter.kind": "lokr", "model.adapter.rank": 8},
        ),
        ({"layer_filter": "", "layer_filter_preset": "full"}, {"model.adapter.target": ".*"}),
        (
            {"layer_filter": "", "layer_filter_preset": "attn-mlp"},
            {"model.adapter.target": ".*(attentions).*"},
        ),
        (
            {"layer_filter": "attn1|attn2", "layer_filter_regex": True},
            {"model.adapter.target": ".*(attn1|attn2).*"},
        ),
        ({"unet": {"learning_rate": 3e-5}}, {"optimizer.lr": 3e-5}),
        ({"learning_rate_scaler": "BATCH"}, {"optimizer.lr": 2e-4}),
        (
            {"unet": {"learning_rate": 3e-5}, "learning_rate_scaler": "BATCH"},
            {"optimizer.lr": 6e-5},
        ),
        ({"unet": {"weight_dtype": "NFLOAT_4"}}, {"model.quantize": "4bit"}),
        ({"unet": {"weight_dtype": "FLOAT_32"}}, {"model.quantize": "none"}),
        (
            {
                "text_encoder": {"train": False, "weight_dtype": "BFLOAT_16"},
                "text_encoder_2": {"train": False, "weight_dtype": "FLOAT_8"},
            },
            {"model.encoder_precision": "bf16"},
        ),
        ({"force_v_prediction": True}, {"model.prediction": "v"}),
        ({"loss_weight_fn": "CONSTANT"}, {"model.min_snr": None}),
        ({"resolution": "768x768"}, {"data.resolution": 768}),
        ({"aspect_ratio_bucketing": False}, {"data.buckets": False, "data.longest": 2.0}),
        ({"masked_training": False}, {"data.masks": False, "data.unmasked_weight": 0.0}),
        ({"optimizer": {"optimizer": "ADAMW_8BIT"}}, {"optimizer.name": "adamw8bit"}),
        ({"backup_after_unit": "NEVER"}, {"train.save_every": "10min"}),
    ],
)
def test_a_field(fields: dict[str, Any], becomes: dict[str, Any]) -> None:
    assert values_of(sdxl(**fields), *becomes) == becomes


@pytest.mark.parametrize(
    ("fields", "becomes"),
    [
        ({}, {"distribution": "uniform", "shift": 1.0}),
        ({"timestep_shift": 3.0}, {"distribution": "uniform", "shift": 3.0}),
        ({"dynamic_timestep_shifting": True}, {"distribution": "uniform", "shift": None}),
        (
            {"timestep_distribution": "LOGIT_NORMAL", "noising_weight": 0.5, "noising_bias": -1},
            {"distribution": "logit_normal", "deviation": 1.5, "mean": -1, "shift": 1.0},
        ),
        ({"timestep_distribution": "SIGMOID", "noising_weight": 0.0}, {"distribution": "uniform"}),
    ],
)
def test_the_times_of_a_flow(fields: dict[str, Any], becomes: dict[str, Any]) -> None:
    """OneTrainer shifts no times unless its file says so; its deviation is 1 + noising_weight."""
    values = {**SDXL, "model_type": "FLUX_DEV_1", "loss_weight_fn": "CONSTANT", **fields}
    found = values_of(read_values(values), *(f"model.time_steps.{key}" for key in becomes))
    assert found == {f"model.time_steps.{key}": value for key, value in becomes.items()}


def test_layers_of_a_whole_model_are_groups() -> None:
    """OneTrainer trains the layers whose names have one of the parts; the rest is frozen."""
    converted = sdxl(training_method="FINE_TUNE")
    groups = loaded(converted).config.optimizer.groups
    assert [(group.match, group.freeze) for group in groups] == [
        ("*attn1*", False),
        ("*attn2*", False),
        ("*ff.net*", False),
        ("*", True),
    ]


@pytest.mark.parametrize(
    ("fields", "says", "flags"),
    [
        ({"text_encoder": {"train": True}}, "text_encoder.train true can't be", {}),
        ({"text_encoder_2": {}}, "text_encoder_2.train is not in the file, and then true", {}),
        ({"training_method": "EMBEDDING"}, "trains words or the autoencoder", {}),
        (
            {"peft_type": "LOHA"},
            "LOHA is an adapter that is not here",
            {"model__adapter__kind": "lora"},
        ),
        ({"peft_type": "OFT_2"}, "remedy: LORA or LOKR", {"model__adapter__kind": "lora"}),
        (
            {"peft_type": "LOKR", "lokr_full_matrix": True, "dropout_probability": 0.0},
            "is another LoKr",
            {"model__adapter__kind": "lokr"},
        ),
        ({"lora_model_name": "old.safetensors"}, "--init-from", {}),
        ({"offset_noise_weight": 0.05}, "changes the noise", {}),
        ({"huber_strength": 1.0}, "another loss than the mean square error", {}),
        ({"mse_strength": 2.0}, "scales the loss", {}),
        (
            {"loss_weight_fn": "DEBIASED_ESTIMATION"},
            "MIN_SNR_GAMMA, which is model.min_snr",
            {"model__min_snr": 5.0},
        ),
        ({"timestep_shift": 2.0}, "learns no flow", {}),
        (
            {"timestep_distribution": "BETA"},
            "BETA is a distribution that is not here",
            {"model__time_steps__distribution": "uniform"},
        ),
        (
            {"min_noising_strength": 0.2},
            "leaves out some times",
            {"model__time_steps": {"shift": 1.0}},
        ),
        ({"normalize_masked_area_loss": True}, "the area that counts", {"data__masks": False}),
        ({"resolution": "512,768"}, "is several resolutions", {"data__resolution": 512}),
        ({"unet": {"model_name": "other"}}, "part in a place", {"model__path": "models/mine"}),
        ({"unet": {"guidance_scale": 3.5}}, "another guidance than 1", {}),
        ({"optimizer": {"optimizer": "PRODIGY"}}, "is not computed", {"optimizer__name": "adamw"}),
        ({"text_encoder": {"train": False, "dropout_probability": 0.5}}, "all at once", {}),
        ({"new_field": 1}, "new_field 1 is a field that this program does not know", {}),
    ],
)
def test_what_would_change_the_training_is_refused(
    fields: dict[str, Any], says: str, flags: dict[str, Any]
) -> None:
    converted = sdxl(**fields)
    errors = refused(converted)
    assert any(says in error for error in errors), errors
    assert all("remedy: " in error for error in errors)
    if flags:
        loaded(converted, **flags)


def test_a_model_section_of_one_s_own_settles_what_belongs_to_the_model() -> None:
    trained = {"train": True, "dropout_probability": 0.05}
    converted = sdxl(offset_noise_weight=0.05, text_encoder=trained)
    loaded(converted, model={"path": "models/mine"})


@pytest.mark.parametrize(
    ("concepts", "says"),
    [
        ([{"image": {"enable_random_flip": True}}, {}], "is not the same for all folders"),
        ([{"image": {"enable_crop_jitter": False}}, {}], "is not the same for all folders"),
        ([{"text": {"tag_delimiter": "|"}}, {}], "--set data.captions.separator=VALUE"),
        ([{"image": {"enable_random_hue": True}}], "in a way that is not here"),
        ([{"image": {"enable_resolution_override": True}}], "a resolution of its own"),
        ([{"text": {"tag_dropout_enable": True}}], "drops parts of captions"),
        ([{"text": {"prompt_source": "concept"}}], "from one file for all pictures"),
        ([{"type": "PRIOR_PREDICTION"}, {}], "is not a folder to train on"),
        ([{"balancing": 0.5}], "no number of whole passes"),
        ([{"balancing_strategy": "SAMPLES"}], "a number of pictures in each epoch"),
        ([{"enabled": False}], "none is switched on"),
    ],
)
def test_a_concept_that_is_not_served(concepts: list[dict[str, Any]], says: str) -> None:
    errors = refused(with_concepts(*concepts))
    assert any(says in error for error in errors), errors


def test_folders_that_agree_share_a_setting_and_the_rest_is_each_folder_s_own() -> None:
    flip = {"image": {"enable_random_flip": True}, "text": {"prompt_source": "sample"}}
    off = {"enabled": False, "image": {"enable_random_hue": True}}
    converted = with_concepts({**flip, "balancing": 2}, off, {**flip, "loss_weight": 2.0})
    data = loaded(converted).config.data.model_dump()
    assert data["flip"] == 0.5
    assert [(row["source"], row["repeats"], row["weight"]) for row in data["source"]] == [
        ("pictures/0", 2, 1.0),
        ("pictures/2", 1, 2.0),
    ]


def test_concepts_and_samples_of_files_of_their_own(tmp_path: Path) -> None:
    """Files are named from OneTrainer's folder, where configs lie a folder deeper."""
    lists = {"training_concepts/birds.json": [CONCEPT], "samples.json": SDXL["samples"]}
    for name, value in lists.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(json.dumps(value))
    names = {"concept_file_name": "training_concepts/birds.json", "concepts": None}
    names |= {"sample_definition_file_name": "samples.json", "samples": None}
    file = tmp_path / "configs" / "mine.json"
    file.parent.mkdir()
    file.write_text(json.dumps({**SDXL, **names}))
    converted = read_path(file)
    assert values_of(converted, "data.flip", "data.prompts") == {
        "data.flip": 0.5,
        "data.prompts": ["a bird", "a tree"],
    }
    line = next(row for row in converted.summary_lines() if "concepts.0.path" in row)
    assert f"{tmp_path / 'training_concepts/birds.json'}:1:" in line


def test_a_concept_file_that_is_not_there_is_no_data(tmp_path: Path) -> None:
    """The default of data.source draws shapes, so what is written names the missing file."""
    file = tmp_path / "mine.json"
    file.write_text(json.dumps({**SDXL, "concepts": None, "concept_file_name": "gone.json"}))
    converted = read_path(file)
    (error,) = refused(converted)
    assert "gone.json is not there" in error
    assert "remedy: -d FOLDER" in error
    assert converted.document.value["data"]["source"] == "folders of gone.json"
    loaded(converted, data__source="pictures")


def test_folders_below_a_folder_are_not_taken_in_silence(tmp_path: Path) -> None:
    (tmp_path / "pictures" / "more").mkdir(parents=True)
    file = tmp_path / "mine.json"
    file.write_text(json.dumps({**SDXL, "concepts": [{"path": "pictures"}]}))
    (error,) = refused(read_path(file))
    assert "passes over the folders in it (more)" in error
    subfolders = [{"path": "pictures", "include_subdirectories": True}]
    file.write_text(json.dumps({**SDXL, "concepts": subfolders}))
    assert refused(read_path(file)) == []
