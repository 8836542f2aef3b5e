"""Another tool's config: every field of it becomes a key of ours, is left with its reason, or is
refused by name; none is passed over.
"""

from typing import Any

import pytest

from samecurve.core.config.document import Document, dump_document, parse_document
from samecurve.core.config.loading import load_document
from samecurve.core.planning.schedule import choose_peak
from samecurve.errors import InvalidConfigError
from samecurve.tasks import Tasks
from samecurve_products.convert.converted_config import ConvertedConfig
from samecurve_products.convert.tools import convert

NANO = """\
model: {name: nano, hidden_size: 384, num_layers: 8, num_heads: 6, kv_heads: null, \
kv_latent_dim: null, num_experts: null, mamba_layers: [],
  intermediate_size: 1536, vocab_size: 128354, max_seq_len: 512, rope_theta: 10000.0}
trainer:
  target_device: gpu
  learning_rate: 0.0003
  max_steps: 0
  num_epochs: 2
  batch_size: 4
  gradient_accumulation: 2
  checkpoint_dir: "./checkpoints/nano"
  log_interval: 10
  save_interval: 100
  load_balance_alpha: 0.0
  group_size: 4
  beta_kl: 0.04
"""
DIFFUSION: dict[str, Any] = {
    "training_method": "LORA",
    "model_type": "STABLE_DIFFUSION_15",
    "base_model_name": "models/sd",
    "unet": {"train": True},
    "text_encoder": {"train": False},
    "concepts": [{"path": "pictures"}],
    "lora_rank": 16,
    "resolution": "512",
    "secrets": {"huggingface_token": "hf_abc"},
    "batch_size": 4,
    "gradient_accumulation_steps": 2,
    "learning_rate": 1e-5,
    "learning_rate_scheduler": "COSINE",
    "learning_rate_warmup_steps": 200,
    "epochs": 10,
    "train_dtype": "BFLOAT_16",
    "ema": "OFF",
    "optimizer": {
        "optimizer": "ADAMW",
        "beta1": 0.9,
        "beta2": 0.99,
        "weight_decay": 0.01,
        "fused": True,
    },
    "backup_after": 2,
    "backup_after_unit": "EPOCH",
    "workspace_dir": "workspace/run",
    "clip_grad_norm": 1.0,
}
OWN_TASK: tuple[tuple[str, Any], ...] = (("task", "my.py:Mine"), ("model", {}), ("data", {}))


def read(text: str) -> ConvertedConfig:
    found = convert(parse_document(text, "old.yaml"))
    assert found is not None
    return found


def onetrainer(**fields: Any) -> ConvertedConfig:
    found = convert(Document({**DIFFUSION, **fields}))
    assert found is not None
    return found


def keys(converted: ConvertedConfig, *settings: tuple[str, Any]) -> dict[str, Any]:
    """Our config, flat; settings: as flags would."""
    for key, value in settings:
        converted.document.set(key, value, f"--set {key}")
    assert converted.unresolved(converted.document) == []
    loaded = load_document(converted.document, Tasks())
    return {key: _at(loaded.config, key) for key in loaded.origins}


def _at(config: Any, key: str) -> Any:
    for part in key.split("."):
        config = getattr(config, part)
    return config


def test_the_published_nano() -> None:
    """As its guide says: batch 8 on each device, two whole epochs, one learning rate."""
    converted = read(NANO)
    found = keys(converted)
    assert converted.run_directory == "./checkpoints/nano"
    becomes = {
        "model.hidden_size": 384,
        "model.num_layers": 8,
        "model.num_heads": 6,
        "model.vocab_size": 128354,
        "batch.per_device": 4,
        "batch.accumulate": 2,
        "optimizer.lr": 3e-4,
        "train.steps": "2ep",
        "train.save_every": 100,
        "train.keep": 10,
        "schedule.decay": "constant",
    }
    assert {key: found[key] for key in becomes} == becomes
    assert (
        "read   old.yaml:9:3  trainer.gradient_accumulation 2 -> batch.accumulate"
        in converted.summary_lines()
    )


@pytest.mark.parametrize(
    ("change", "becomes"),
    [
        ("max_steps: 5000", {"train.steps": 5000}),
        ("max_checkpoints: 3", {"train.keep": 3}),
        ("max_checkpoints: 0", {"train.keep": 0}),
        ("target_device: cpu", {"devices.use": "cpu"}),
        (
            "distributed: {enabled: true, backend: nccl, gpu_ids: [2, 3]}",
            {"devices.use": "2,3", "devices.sync": "nccl"},
        ),
        ("distributed: {enabled: false, backend: nccl, gpu_ids: [2, 3]}", {"devices.use": "auto"}),
    ],
)
def test_a_field_of_the_trainer(change: str, becomes: dict[str, Any]) -> None:
    name = change.partition(":")[0]
    text = (
        "".join(
            line for line in NANO.splitlines(keepends=True) if not line.startswith(f"  {name}:")
        )
        + f"  {change}\n"
    )
    found = keys(read(text))
    assert {key: found[key] for key in becomes} == becomes


@pytest.mark.parametrize(
    ("fields", "becomes"),
    [
        (
            {
                "enable_multi_gpu": True,
                "distributed_backend": "NCCL",
                "use_torchrun": False,
                "distributed_data_loading": True,
            },
            {"devices.use": "all", "devices.sync": "nccl", "devices.launcher": "spawn"},
        ),
        ({"multi_gpu": True, "device_indexes": "0,2"}, {"devices.use": "0,2"}),
        ({"multi_gpu": False, "device_indexes": "0,2"}, {"devices.strategy": "single"}),
        ({}, {"devices.strategy": "single"}),
        (
            {"multi_gpu": True, "distributed_backend": "nccl", "train_device": "CPU"},
            {"devices.sync": "nccl", "devices.use": "cpu"},
        ),
        (
            {"enable_multi_gpu": True, "lr_scaling": True},
            {"schedule.scale_lr": "linear", "optimizer.lr": 1e-5},
        ),
        (
            {"multi_gpu": True, "learning_rate_scaler": "GLOBAL_BOTH"},
            {"schedule.scale_lr": "sqrt", "schedule.base_batch": 1},
        ),
        (
            {"multi_gpu": True, "learning_rate_scaler": "GLOBAL_BATCH"},
            {"schedule.scale_lr": "sqrt", "schedule.base_batch": 2},
        ),
        ({"multi_gpu": True, "learning_rate_scaler": "BATCH"}, {"optimizer.lr": 2e-5}),
        ({"multi_gpu": True, "learning_rate_warmup_steps": 0.05}, {"schedule.warmup": "0.5ep"}),
        (
            {
                "multi_gpu": True,
                "optimizer": "SGD",
                "optimizer_momentum": 0.5,
                "optimizer_weight_decay": 0.0,
            },
            {"optimizer.name": "sgd", "optimizer.momentum": 0.5, "optimizer.weight_decay": 0.0},
        ),
        (
            {"multi_gpu": True, "epochs": None, "train_dtype": None},
            {"train.steps": "100ep", "train.precision": "f16", "schedule.final": 0.0},
        ),
        (
            {"multi_gpu": True, "backup_after": 100, "backup_after_unit": "STEP"},
            {
                "train.save_every": 50,
                "schedule.warmup": 100,
                "train.precision": "bf16",
                "optimizer.betas": (0.9, 0.99),
                "train.steps": "10ep",
            },
        ),
    ],
)
def test_how_onetrainer_trains(fields: dict[str, Any], becomes: dict[str, Any]) -> None:
    """With a task of one's own in place of the diffusion model.

    Its steps count batches, of which two make one optimizer step here.
    """
    found = keys(onetrainer(**fields), *OWN_TASK)
    assert {key: found[key] for key in becomes} == becomes


@pytest.mark.parametrize("devices", [1, 3])
@pytest.mark.parametrize(
    ("scaler", "samples", "counts_devices"),
    [
        ("NONE", 1, False),
        ("BATCH", 4, False),
        ("GRADIENT_ACCUMULATION", 2, False),
        ("BOTH", 8, False),
        ("GLOBAL_BATCH", 4, True),
        ("GLOBAL_BOTH", 8, True),
    ],
)
@pytest.mark.parametrize("rate", [1e-5, None])
def test_onetrainers_scaler_gives_its_rate(
    *, devices: int, scaler: str, samples: int, counts_devices: bool, rate: float | None
) -> None:
    """The rate x the root of a number (OneTrainer's LearningRateScaler.get_scale)."""
    converted = onetrainer(multi_gpu=True, learning_rate_scaler=scaler, learning_rate=rate)
    converted.document.set("task", "my.py:Mine", "--set task")
    config = load_document(converted.document, Tasks()).config
    batch = 4 * 2 * devices
    peak = choose_peak(config.schedule, config.optimizer.lr, config.batch, batch).value
    number = samples * devices if counts_devices else samples
    assert peak == pytest.approx((rate or 3e-6) * number**0.5, rel=1e-12)


def test_every_field_has_one_reading_and_comes_back_from_the_file() -> None:
    for converted, fields in (
        (read(NANO), 24),
        (onetrainer(multi_gpu=True, surprise=1), len(DIFFUSION) + 2 + 4),
    ):
        named = [
            reading.field for reading in converted.readings if not reading.field.startswith("(")
        ]
        assert len(named) == len(set(named)) == fields
        text = converted.to_yaml("old")
        assert all(f"#   {field} " in text for field in named)
        assert (
            parse_document(text, "new.yaml").value
            == parse_document(dump_document(converted.document.value), "new.yaml").value
        )
        assert "hf_abc" not in text + "".join(converted.summary_lines())


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ("mamba2_num_heads: 48", "model.mamba2_num_heads is for Mamba layers"),
        ("hiden_size: 48", "did you mean hidden_size?"),
        ("dtype: fp8", "model.dtype fp8 is not one of"),
    ],
)
def test_what_the_model_lacks_is_refused_with_what_serves_it(more: str, says: str) -> None:
    converted = read(f"model:\n  {more}\ntrainer: {{batch_size: 2, max_steps: 5}}\n")
    wrong = "\n".join(map(str, converted.unresolved(converted.document)))
    try:
        load_document(converted.document, Tasks())
    except InvalidConfigError as caught:
        wrong += str(caught)
    assert says in wrong
    assert "docs/tasks.md" in wrong or " is for " not in says


@pytest.mark.parametrize(
    ("converted", "says", "flag"),
    [
        (
            read("trainer: {max_steps: 0, batch_size: 2}\n"),
            "num_epochs does not say how many",
            ("train.steps", "1ep"),
        ),
        (
            read("trainer: {max_steps: 3, batch_size: 2, learning_rat: 1}\n"),
            "did you mean trainer.learning_rate?",
            None,
        ),
        (
            onetrainer(multi_gpu=True, learning_rate_scheduler="REX"),
            "REX is not one of CONSTANT, LINEAR, COSINE",
            ("schedule.decay", "cosine"),
        ),
        (
            onetrainer(multi_gpu=True, train_dtype="TFLOAT_32"),
            "TFLOAT_32 is not one of",
            ("train.precision", "f32"),
        ),
        (onetrainer(multi_gpu="sometimes"), "neither true nor false", ("devices.use", "cpu")),
        (onetrainer(multi_gpu=True, ema="GPU"), "keeps an average of the weights", None),
        (onetrainer(multi_gpu=True, optimizer={"amsgrad": True}), "changes the optimizer", None),
        (
            onetrainer(multi_gpu=True, surprise=1),
            "surprise 1 is a field that this program does not know",
            None,
        ),
    ],
)
def test_what_is_refused_is_settled_by_a_flag_where_one_can(
    converted: ConvertedConfig, says: str, flag: tuple[str, Any] | None
) -> None:
    (error,) = converted.unresolved(converted.document)
    assert says in str(error)
    if flag:
        converted.document.set(*flag, "a flag")
        assert converted.unresolved(converted.document) == []


@pytest.mark.parametrize(
    "text",
    [
        "batch: {samples: 8}\ntrain: {steps: 5}\n",
        "batch: {samples: 8}\ntrainer: {max_steps: 5}\n",
        "trainer: 5\n",
        "{}",
        "task: language\nmulti_gpu: true\n",
    ],
)
def test_our_own_configs_are_left_alone(text: str) -> None:
    assert convert(parse_document(text, "c.yaml")) is None
